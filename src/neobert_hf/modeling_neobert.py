"""NeoBERT: a pre-norm Transformer encoder with RoPE, RMSNorm and SwiGLU (Le Breton et al., 2025, arXiv 2502.19587).

The same file is used for training, evaluation and the Hub. The Hub serves it as remote code, so besides Transformers it
imports its siblings only.

Two rules of this file exist because the original, without them, was silently wrong under Transformers 5:

* the model has no buffers. Whatever `from_pretrained`, `to_empty`, a meta device or `.half()` do to buffers, the rotary
  table is computed from the config in every forward pass, in float32 (about ten operations on (tokens, dim_head / 2));
* weights are initialised only through `transformers.initialization`, which does not change loaded tensors.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel, load_state_dict
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_neobert import SERVERS, AttentionBackend, attention_function, choose_attention, dropout_in_use
from .checkpoint_checks_neobert import (
    TASK_HEADS,
    check_division,
    check_indexes,
    check_names,
    check_size,
    check_values,
    loading,
    read_checkpoint,
    save_pretrained,
)
from .configuration_neobert import MODEL_CLASSES, NeoBERTConfig
from .cpu_neobert import blocks_to_compute_in_place, forward_in_place, is_looked_at, own_part, prepare_for_inference
from .gradients_neobert import NeoBERTRMSNorm, split_and_rotate, swiglu
from .input_checks_neobert import (
    check_answers,
    check_contents,
    check_inputs,
    check_keywords,
    check_labels,
    check_on_device,
    check_one_document_a_row,
    check_sequence_labels,
    check_span,
    has_values,
    read_on_host,
    take_server_arguments,
)
from .packing_neobert import (
    Batch,
    BatchInputs,
    build_mask,
    hide_padding,
    lay_out_batch,
    lay_out_served,
    pool,
    put_prefix_before,
    stays_on_device,
)
from .rotary_neobert import rotary_table


logger = logging.get_logger(__name__)


def swiglu_width(config: NeoBERTConfig) -> int:
    """Two thirds keep the number of parameters of the two-matrix MLP; a multiple of 8 keeps the GPU's tiles full."""
    return 8 * -(-int(2 * config.intermediate_size / 3) // 8)


@own_part
class NeoBERTSwiGLU(nn.Module):
    """SwiGLU (Shazeer, 2020) with gate and input in one matrix; SiLU is applied to the first half of its output."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        width = swiglu_width(config)
        self.w12 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.w3 = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.w3(swiglu(self.w12(hidden_states)))


class NeoBERTEncoderBlock(GradientCheckpointingLayer):
    """Attention and MLP, each after a norm and added to the residual stream; parameter names are the original's."""

    is_causal = False

    def __init__(self, config: NeoBERTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # The attention function of a server looks up its data for the layer by this.
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if config.hidden_act == "swiglu":
            self.ffn = NeoBERTSwiGLU(config)
        else:
            self.ffn = nn.Sequential(
                nn.Linear(config.hidden_size, config.intermediate_size, bias=False),
                nn.GELU(),
                nn.Linear(config.intermediate_size, config.hidden_size, bias=False),
            )
        self.attention_norm, self.ffn_norm = build_norm(config), build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        attn_implementation: str = "eager",
        in_place: tuple | None = None,
        compiled: Callable | None = None,
        padded: Batch | None = None,
        **packed,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream after the block, and the attention weights of backends that return them.

        Args:
            compiled: a compiled version of `compute` to run instead, see `NeoBERTPreTrainedModel.compile`.
            padded: the layout of the batch, if input and output have the caller's shape.
        """
        arguments = (rotary, attention_mask, attn_implementation, packed)
        if in_place:
            return forward_in_place(self, hidden_states, partial(self._attend, arguments), in_place)
        if padded is not None:
            hidden_states = padded.strip(hidden_states)
        compute = compiled or NeoBERTEncoderBlock.compute
        hidden_states, weights = compute(self, hidden_states, *arguments)
        return hidden_states if padded is None else padded.restore(hidden_states), weights

    def compute(self, hidden_states: torch.Tensor, *arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self._attend(arguments, self.qkv(self.attention_norm(hidden_states)))
        hidden_states = hidden_states + self.dropout(self.wo(attended))
        return hidden_states + self.dropout(self.ffn(self.ffn_norm(hidden_states))), weights

    def _attend(
        self, arguments: tuple, qkv: torch.Tensor, split: Callable = split_and_rotate
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The concatenated heads, (batch, length, hidden_size), and the weights of backends that return them."""
        rotary, attention_mask, attn_implementation, packed = arguments
        # The fused projection is laid out per head: (heads, 3, dim_head).
        query, key, value = split(qkv.unflatten(-1, (-1, 3, self.config.head_dim)), rotary)
        if not value.shape[1]:  # The batch consists of padding only, so no token is left.
            return value.flatten(2), None
        attended, weights = attention_function(attn_implementation)(
            self,
            *(states.transpose(1, 2) for states in (query, key, value)),
            attention_mask,
            scaling=self.config.head_dim**-0.5,
            dropout=dropout_in_use(self),
            **packed,
        )
        return attended.reshape(*value.shape[:2], -1), weights  # A server returns the heads concatenated already.


def build_norm(config: NeoBERTConfig) -> nn.Module:
    return (NeoBERTRMSNorm if config.rms_norm else nn.LayerNorm)(config.hidden_size, eps=config.norm_eps)


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Initialisation as published, and loading that refuses checkpoints that do not fit."""

    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTEncoderBlock"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _supports_context_parallel = False  # Transformers divides sequences among GPUs only for causal attention.
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(NeoBERTEncoderBlock, index=0),
        "attentions": OutputRecorder(NeoBERTEncoderBlock, index=1),
    }

    prepare_for_inference = prepare_for_inference
    save_pretrained = save_pretrained

    def __init__(self, config: NeoBERTConfig, *args, **kwargs):
        config.validate_architecture()
        config.validate_rope()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            # `self` is the model that owns the module. Transformers does not always call this on models themselves.
            if any(module is getattr(self, name, None) for name in TASK_HEADS):
                init.normal_(module.weight, std=self.config.classifier_init_range)
            else:
                init.uniform_(module.weight, -self.config.decoder_init_range, self.config.decoder_init_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -self.config.embedding_init_range, self.config.embedding_init_range)
        elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)

    def compile(self, **options) -> None:
        """Compile the encoder blocks, in place. All of them share one graph, for batches of every size.

        Checks, unpadding and offsets are not compiled, since they read values. On a CPU without gradients, blocks run
        uncompiled, which is faster there. `torch.compile(model)` instead compiles everything and keeps padding.

        Args:
            options: of `torch.compile`; `dynamic` is True unless given.
        """
        compiled = torch.compile(NeoBERTEncoderBlock.compute, **{"dynamic": True} | options)
        for module in self.modules():
            if isinstance(module, NeoBERTModel):
                module.compiled_block = compiled

    def __getstate__(self) -> dict:
        # As with torch's `compile`: a copy is not compiled, and a graph cannot be pickled.
        state = super().__getstate__()
        return state | {"compiled_block": None} if "compiled_block" in state else state

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in Transformers, but missing, unknown or damaged tensors in a checkpoint are an error, not a warning.

        A task head may be completely missing from the checkpoint (it is newly initialised, with Transformers' report),
        and heads of other tasks may be present. If several threads load models, they do so one after the other.

        Raises:
            ValueError: naming the tensors.
        """
        check_indexes(pretrained_model_name_or_path, kwargs.get("subfolder", ""))
        with loading(pretrained_model_name_or_path):
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        check_names(*loaded, pretrained_model_name_or_path)
        return loaded if output_loading_info else loaded[0]

    @classmethod
    def _load_pretrained_model(cls, model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # Called when Transformers knows config and files, before it allocates anything. Not checked: adapters of PEFT,
        # whose file holds no whole model, and quantized checkpoints, which store no floating-point numbers.
        check_division(model)
        tensors = {}
        if checkpoint_files and load_config.hf_quantizer is None and not model._hf_peft_config_loaded:
            tensors = read_checkpoint(checkpoint_files, partial(load_state_dict, weights_only=load_config.weights_only))
            check_size(model, tensors)
            if not checkpoint_files[0].endswith(".safetensors"):
                state_dict = dict(tensors)
        info, offloaded = super()._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )
        check_values(tensors, info)
        return info, offloaded


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The encoder: token ids to hidden states.

    References:
        Le Breton et al., NeoBERT: A Next-Generation BERT, 2025, arXiv 2502.19587, section 3.1.
    """

    # Every MLM checkpoint has a decoder, and every embedding model is loaded from one: this needs no report each time.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.(weight|bias)$"]
    # If False, the values of batches that can be laid out without them are not read; only the GPU's assertions remain.
    check_values = True

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        if not config.rope:
            # Row 0 is for padding, as in the original: position p is in row p + 1.
            self.positional_embedding = nn.Embedding(config.max_length + 1, config.hidden_size, padding_idx=0)
        blocks = (NeoBERTEncoderBlock(config, number) for number in range(config.num_hidden_layers))
        self.transformer_encoder = nn.ModuleList(blocks)
        self.layer_norm = build_norm(config)
        self.compiled_block: Callable | None = None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cu_seq_lens_q: torch.LongTensor | None = None,
        cu_seq_lens_k: torch.LongTensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        prefix_embeds: torch.FloatTensor | None = None,
        text_position: int = 0,
        **kwargs,
    ) -> BaseModelOutput:
        r"""
        Args:
            input_ids (`(batch, length)`): token ids. Pass either these or `inputs_embeds`.
            attention_mask (`(batch, length)`): 1 at real tokens, 0 at padding, which may be anywhere. Bool or integer;
                a floating dtype only with a 1 in every row, and not while compiling.
            position_ids (`(batch or 1, length)`): positions from 0. Where they restart at 0, a new document begins, and
                no attention crosses the border.
            token_type_ids: accepted because BERT tokenizers emit them, and unused.
            inputs_embeds (`(batch, length, hidden_size)`): embeddings instead of ids.
            cu_seq_lens_q, cu_seq_lens_k (`(documents + 1,)`): offsets of the documents of one packed row (batch 1),
                as `DataCollatorWithFlattening` gives them.
            max_length_q, max_length_k: at least the longest document; only needed with `cu_seq_lens_q` while compiling.
            prefix_embeds (`(batch or 1, prefix, hidden_size)`): vectors before every row. They and its tokens attend to
                each other. All have position 0, so that their order does not matter; this needs RoPE. Of the outputs,
                only `attentions` includes them.
            text_position: position of a row's first real token after a prefix.
            require_tokens: refuse rows that are all padding, as the heads for whole sequences and questions do.
            one_document: refuse `position_ids` with several documents in a row, as the same heads do.

        Returns:
            `last_hidden_state` (batch, length, hidden_size), after the final norm; zero at padding, also in rows that
            are all padding.

        Raises:
            ValueError: on inputs that do not fit, naming the argument and what is allowed.
        """
        needed = {name: kwargs.pop(name, False) for name in ("require_tokens", "one_document")}
        for_server = take_server_arguments(self.config, kwargs)
        check_keywords(kwargs)
        packed = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, kwargs.get("seq_idx"))
        prefix = (prefix_embeds, text_position)
        inputs = BatchInputs(input_ids, inputs_embeds, attention_mask, position_ids, *packed, *prefix, **needed)
        check_inputs(self.config, inputs)
        backend = self._choose_attention(inputs.tokens, kwargs.get("output_attentions"))
        batch = self._lay_out(inputs, backend, for_server)
        check_span(self.config, batch.span)
        hidden_states = batch.tokens if batch.tokens.is_floating_point() else self.encoder(batch.tokens)
        outputs = self._encode(hidden_states, batch, backend.name, return_dict=True, **kwargs)
        return batch.restore_outputs(outputs)

    def _lay_out(self, inputs: BatchInputs, backend: AttentionBackend, for_server: dict) -> Batch:
        """The batch in the layout of the blocks. Its values are read and checked here, once."""
        if backend.name in SERVERS:
            check_one_document_a_row(inputs)
            return lay_out_served(self.config, inputs, for_server)
        on_host = has_values(inputs.tokens)
        if on_host and (self.check_values or not stays_on_device(self.config, inputs, backend)):
            inputs, limits = read_on_host(self.config, inputs)
            check_contents(self.config, inputs, limits)
            if limits.get("padding", (0, 0))[1]:
                self.warn_if_padding_and_no_attention_mask(inputs.input_ids, None)
        else:
            on_host = False
            check_on_device(inputs)
        inputs = put_prefix_before(inputs, self.encoder)
        if on_host and inputs.input_ids is not None and is_looked_at(self.encoder):
            # Hooks on the embedding, or a replacement for it, must get the caller's rows, on every backend. Otherwise
            # padding is stripped first, and not embedded.
            inputs = replace(inputs, input_ids=None, inputs_embeds=self.encoder(inputs.input_ids))
        return lay_out_batch(self.config, inputs, backend, on_host)

    @capture_outputs
    def _encode(self, hidden_states: torch.Tensor, batch: Batch, implementation: str, **kwargs) -> BaseModelOutput:
        """The blocks and the final norm, in the layout of `batch`."""
        rotary, attention_mask = None, None
        if self.config.rope:
            rotary = rotary_table(self.config, batch.position_ids, batch.span)
        else:
            hidden_states = hidden_states + self.positional_embedding(batch.position_ids + 1)
        if batch.attention_mask is not None or batch.document_ids is not None:
            attention_mask = build_mask(self.config, implementation, hidden_states, batch)
        # Decided once for all blocks: between the products of two layers, with cold caches, this would take ten times
        # as long. A hook that another hook adds during the pass is therefore called only from the next pass on.
        in_place = blocks_to_compute_in_place(self.transformer_encoder, hidden_states, NeoBERTEncoderBlock)
        options = {"attention_mask": attention_mask, "attn_implementation": implementation}
        on_cpu_for_inference = hidden_states.device.type == "cpu" and not torch.is_grad_enabled()
        options |= {"compiled": None if on_cpu_for_inference else self.compiled_block, **batch.varlen_arguments()}
        kept = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        if kept and torch.is_grad_enabled() and not batch.prefix_length:
            # Hidden states in the caller's shape are then part of the output's graph, so that `retain_grad` works.
            batch.kept_padded, hidden_states = True, batch.restore(hidden_states)
            options["padded"] = batch
        for block, fast in zip(self.transformer_encoder, in_place):
            # On a pipeline stage, the placeholders for blocks of other stages return only the hidden states.
            output = block(hidden_states, rotary=rotary, in_place=fast, **options)
            hidden_states = output[0] if isinstance(output, tuple) else output
        hidden_states = batch.strip(hidden_states) if batch.kept_padded else hidden_states
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))

    def _choose_attention(self, tokens: torch.Tensor, output_attentions: bool | None) -> AttentionBackend:
        device = tokens.device.type
        dtype = getattr(self.encoder, "weight", tokens).dtype  # A server may have replaced the embedding.
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        dropout = max([0.0, *map(dropout_in_use, self.transformer_encoder)])
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        return choose_attention(self.config, tokens, dtype, dropout, weights)


class NeoBERTForMaskedLM(NeoBERTPreTrainedModel):
    """Masked language modelling: a linear decoder with bias, not tied to the embeddings."""

    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}
    _tp_plan = {"decoder": "colwise_gather_output"}
    _pp_plan = {"decoder": (["hidden_states"], ["logits"])}

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # Transformers derives it from the class name, which a subclass changes.
        self.model = NeoBERTModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        r"""
        Args:
            labels (`(batch, length)`): ids to predict, -100 where there is nothing to predict.
            num_items_in_batch: number of labels by which the summed loss is divided, 1 or more; without it the loss is
                the mean over the labels, which is NaN if all are -100, as in Transformers.

        Returns:
            `loss` in nats, and `logits` (batch, length, vocab_size). With labels and `config.sparse_prediction`, the
            logits are those of the labelled positions only, (labelled positions, vocab_size), in reading order.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, return_dict=True, **kwargs
        )
        hidden_states, loss = outputs.last_hidden_state, None
        if labels is not None:
            check_labels(labels, hidden_states.shape[:2], self.config.vocab_size)
            if self.config.sparse_prediction:
                # The decoder takes 11% of the published model's multiplications; 80% of its rows would be ignored.
                labels = labels.to(hidden_states.device).flatten()
                labelled = (labels != -100).nonzero().squeeze(1)
                # The gradient of `hidden_states[labelled]` would sort the positions, to add up repeated ones.
                hidden_states = hidden_states.flatten(0, 1).index_select(0, labelled)
                labels = labels.index_select(0, labelled)
        logits = self.decoder(hidden_states)
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class NeoBERTPooledClassifier(NeoBERTPreTrainedModel):
    """The original's head, used for two tasks: pooling of a sequence, a tanh layer and a classifier."""

    # The losses are plain means, so the Trainer itself must divide them by the number of accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: NeoBERTConfig, outputs: int):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, outputs)
        self.post_init()

    def classify(self, hidden_states, attention_mask, cu_seq_lens) -> torch.Tensor:
        """Scores (sequences, outputs); each document of a packed row is a sequence."""
        if self.training and not self.dense.weight.requires_grad and not is_tracing(hidden_states):
            logger.warning_once(
                "`dense` is frozen in training. If it is new, it must be saved with the adapter; otherwise reloading "
                'initialises another random one: LoraConfig(modules_to_save=["dense", "classifier"]).'
            )
        pooled = pool(hidden_states, self.config.classifier_pooling, attention_mask, cu_seq_lens)
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


class NeoBERTForSequenceClassification(NeoBERTPooledClassifier):
    """Classification or regression of whole sequences, with the original's head."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, config.num_labels)
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        r"""
        Args:
            labels (`(sequences,)` or `(sequences, num_labels)`): classes (-100 for none; the loss is NaN if all are
                -100), regression targets, or a matrix of 0 and 1 or of probabilities, as set by `config.problem_type`
                (guessed from the labels' dtype if unset).

        Returns:
            `loss` and `logits` (sequences, num_labels); the documents of a row packed with `cu_seq_lens_q` count as
            sequences.
        """
        kwargs |= {"return_dict": True, "require_tokens": True, "one_document": True}
        outputs = self.model(input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, **kwargs)
        logits = self.classify(outputs.last_hidden_state, attention_mask, kwargs.get("cu_seq_lens_q"))
        loss = None
        if labels is not None:
            check_sequence_labels(labels, logits, self.config.problem_type)
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class NeoBERTForMultipleChoice(NeoBERTPooledClassifier):
    """Multiple choice among sequences, as in SWAG: the head scores each, and a softmax runs over the choices."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> MultipleChoiceModelOutput:
        r"""
        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: as in `NeoBERTModel`, with a dimension `choices`
                after the batch.
            labels (`(batch,)`): index of the right choice, -100 for none; the loss is NaN if all are -100.

        Returns:
            `loss` and `logits` (batch, choices).
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None and tokens.ndim != (3 if input_ids is not None else 4):
            raise ValueError(
                f"The input has shape {tuple(tokens.shape)}, it must be (batch, choices, length) for `input_ids` and "
                "(batch, choices, length, hidden_size) for `inputs_embeds`."
            )
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("`cu_seq_lens_q`: choices cannot be packed, since their rows tell which belong together.")
        flat = [
            None if x is None else x.flatten(0, 1) for x in (input_ids, attention_mask, position_ids, inputs_embeds)
        ]
        input_ids, attention_mask, position_ids, inputs_embeds = flat
        kwargs |= {"return_dict": True, "require_tokens": True, "one_document": True}
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.classify(outputs.last_hidden_state, attention_mask, None).view(*tokens.shape[:2])
        loss = None
        if labels is not None:
            check_labels(labels, logits.shape[:1], logits.shape[1])
            loss = F.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class NeoBERTForTokenClassification(NeoBERTPreTrainedModel):
    """A class for every token, as in named entity recognition."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.loss_type = "ForTokenClassification"
        self.num_labels = config.num_labels
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        r"""
        Args:
            labels (`(batch, length)`): classes, -100 where there is none; the mean loss is NaN if all are -100.

        Returns:
            `loss` and `logits` (batch, length, num_labels).
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_labels(labels, logits.shape[:2], self.num_labels)
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class NeoBERTForQuestionAnswering(NeoBERTPreTrainedModel):
    """Extractive question answering: the first and last token of the answer, as in SQuAD."""

    accepts_loss_kwargs = False

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.loss_type = "ForQuestionAnswering"
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        r"""
        Args:
            start_positions, end_positions (`(batch,)`): of the answer; the loss is NaN if all are beyond the sequence.

        Returns:
            `loss` (mean of the two), `start_logits` and `end_logits` (batch, length).
        """
        if (start_positions is None) != (end_positions is None):
            raise ValueError("Pass both `start_positions` and `end_positions`, or neither.")
        if start_positions is not None:
            if kwargs.get("cu_seq_lens_q") is not None:
                raise ValueError("`cu_seq_lens_q` with answers: the softmax would run over all documents in the row.")
        kwargs |= {"return_dict": True, "require_tokens": True, "one_document": start_positions is not None}
        outputs = self.model(input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, **kwargs)
        start_logits, end_logits = self.qa_outputs(self.dropout(outputs.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None:
            check_answers(start_positions, end_positions, len(start_logits), attention_mask)
            scores = (hide_padding(logits, attention_mask) for logits in (start_logits, end_logits))
            loss = self.loss_function(*scores, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# The code is saved with the model, so that it can be loaded without the package.
for auto_class, name in MODEL_CLASSES.items():
    globals()[name].register_for_auto_class(auto_class)

__all__ = ["NeoBERTPreTrainedModel", *MODEL_CLASSES.values()]
