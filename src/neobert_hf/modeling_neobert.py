"""NeoBERT: a pre-norm Transformer encoder with RoPE, RMSNorm and SwiGLU (Le Breton et al., 2025, arXiv 2502.19587).

The file is in the order in which a batch meets its parts: arguments, documents, padding, RoPE, attention, the block,
the model, five heads. The Hub serves it as remote code, so besides Transformers it imports its siblings only.

Two rules exist because the original, without them, is silently wrong under Transformers 5:

* the model has no buffers: whatever loading, a meta device or `.half()` do to buffers, the rotary table is computed
  from the config in every forward pass, in float32;
* weights are initialised through `transformers.initialization`, which leaves loaded tensors alone.
"""

import difflib
import math
from dataclasses import dataclass
from threading import RLock

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple, is_flash_attention_requested
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_neobert import NeoBERTConfig
from .cpu_neobert import prepare_for_inference


logger = logging.get_logger(__name__)


# The arguments of all forward passes, to tell a misspelt one from what tokenizers and trainers pass to every model.
ARGUMENTS = set(
    "input_ids attention_mask position_ids token_type_ids inputs_embeds labels start_positions end_positions "
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k output_attentions output_hidden_states return_dict "
    "num_items_in_batch".split()
)


def check_arguments(config, input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens, kwargs: dict) -> None:
    """Refuse what a model would otherwise compute without a word, and wrongly. In a graph, values are not read."""
    for name in kwargs.keys() - ARGUMENTS:
        # `pad_mask` is the original's argument, which is added to the scores.
        nearest = ["attention_mask"] if name == "pad_mask" else difflib.get_close_matches(name, ARGUMENTS, 1, 0.85)
        if nearest:
            raise TypeError(f"NeoBERT's forward pass has no argument `{name}`; did you mean `{nearest[0]}`?")
    if kwargs.get("past_key_values") is not None:  # Of PEFT's prefix tuning, which would train nothing.
        raise ValueError("NeoBERT takes no `past_key_values`: use LoRA or prompt tuning in place of prefix tuning.")
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"Pass exactly one of `input_ids` and `inputs_embeds`; got {found}.")
    tokens = inputs_embeds if input_ids is None else input_ids
    if attention_mask is not None and attention_mask.shape != tokens.shape[:2]:
        shapes = f"{tuple(attention_mask.shape)}; it must be {tuple(tokens.shape[:2])}"
        raise ValueError(f"`attention_mask` has shape {shapes}, 1 at real tokens and 0 at padding.")
    if is_tracing(tokens):
        return
    if attention_mask is not None and not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("`attention_mask` must be 1 at real tokens and 0 at padding; this one holds other values.")
    if input_ids is not None and input_ids.device.type == "cpu" and input_ids.numel():
        low, high = input_ids.aminmax()
        if low < 0 or high >= config.vocab_size:
            raise ValueError(f"`input_ids` runs from {low} to {high}; it must be in 0 to {config.vocab_size - 1}.")
    if position_ids is not None and cu_seq_lens is None and tokens.shape[1] > 1 and not position_ids.any():
        # Some attribution tools pass zeros for "no position".
        raise ValueError("`position_ids` is all 0; each 0 begins a document, so leave it out if a row is one text.")
    if cu_seq_lens is not None:
        length = tokens.shape[1]
        fits = cu_seq_lens[0] == 0 and cu_seq_lens[-1] == length and (cu_seq_lens.diff() > 0).all()
        if tokens.shape[0] != 1 or not fits or attention_mask is not None and not attention_mask.all():
            raise ValueError(
                f"`cu_seq_lens_q` is {cu_seq_lens.tolist()} for a batch of shape {tuple(tokens.shape[:2])}; it must "
                f"rise from 0 to {length}, for one row without padding."
            )


def find_documents(config, shape, device, mask, position_ids, cu_seq_lens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The position of each token in its document, and the number of its document in its row.

    A document is a row, or begins where `cu_seq_lens` or a 0 in `position_ids` says so.

    Args:
        mask: bool (batch, length), True at real tokens; None if all are.

    Returns:
        `position_ids` (batch or 1, length), and `document_ids` (batch, length) or None if every row is one document.
    """
    columns = torch.arange(shape[1], device=device)[None]
    if cu_seq_lens is not None:
        document_ids = torch.searchsorted(cu_seq_lens[1:], columns.to(cu_seq_lens.dtype), right=True)
        return columns - cu_seq_lens[document_ids] if position_ids is None else position_ids, document_ids
    if position_ids is not None:
        starts = position_ids == 0 if mask is None else (position_ids == 0) & mask
        document_ids = starts.cumsum(-1).clamp(min=1).expand(shape)  # What is before the first 0 belongs to it.
        return position_ids if mask is None else position_ids * mask, document_ids
    if mask is None:
        return columns, None
    if config.rope:
        # From the first real token. Tokens that are masked out in the middle keep their place.
        return (columns - mask.int().argmax(-1, keepdim=True)) * mask, None
    return (mask.int().cumsum(-1) - 1) * mask, None  # The original counts real tokens.


@dataclass
class UnpaddedBatch:
    """The real tokens of a batch, laid end to end in one row of documents.

    Args:
        indices: int (tokens,), where each real token lies in the flattened padded batch.
        position_ids: int (1, tokens), the position of each token in its document.
        cu_seq_lens: int32 (documents + 1,), where the documents begin and end.
        longest: the length of the longest document.
        shape: (batch, length) of the padded batch.
    """

    indices: torch.Tensor
    position_ids: torch.Tensor
    cu_seq_lens: torch.Tensor
    longest: int
    shape: tuple[int, int]

    @classmethod
    def from_padded(cls, shape, mask, position_ids, document_ids) -> "UnpaddedBatch":
        """Find the real tokens and documents of a batch, described as `find_documents` returns it."""
        rows = torch.arange(shape[0], device=position_ids.device)[:, None]
        # No row goes on with the last number of the row before it: numbers are 0, or 1 to `length`.
        numbers = rows if document_ids is None else rows * (shape[1] + 1) + document_ids
        numbers = numbers.expand(shape).flatten()
        indices = torch.arange(len(numbers), device=numbers.device) if mask is None else mask.flatten().nonzero()[:, 0]
        lengths = torch.unique_consecutive(numbers[indices], return_counts=True)[1]
        cu_seq_lens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)  # The dtype of FlashAttention.
        position_ids = position_ids.expand(shape).flatten()[indices][None]
        return cls(indices, position_ids, cu_seq_lens, max(lengths.tolist(), default=0), shape)

    def unpad(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From (batch, length, hidden_size) to (1, tokens, hidden_size)."""
        return hidden_states.flatten(0, 1).index_select(0, self.indices)[None]

    def pad(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From (1, tokens, hidden_size) to (batch, length, hidden_size), with zeros at padding."""
        padded = hidden_states.new_zeros(self.shape[0] * self.shape[1], hidden_states.shape[-1])
        # The last block may be on another device than the first (`device_map`).
        return padded.index_copy(0, self.indices.to(padded.device), hidden_states[0]).view(*self.shape, -1)

    def attention_arguments(self) -> dict:
        """What attention functions need, under Transformers' names."""
        return {
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def rotary_table(config: NeoBERTConfig, position_ids: torch.Tensor) -> torch.Tensor:
    """Cosine and sine of every rotation angle (Su et al., 2021, arXiv 2104.09864).

    Args:
        position_ids: int (batch or 1, length).

    Returns:
        float32 (batch or 1, length, 1, 1, dim_head / 2, 2), including the attention factor of YaRN and LongRoPE.
    """
    rope, device, factor = config.rope_parameters, position_ids.device, 1.0
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.dim_head, 2, dtype=torch.float32, device=device) / config.dim_head
        inv_freq = rope["rope_theta"] ** -exponents
    else:
        # Only these two types depend on the longest text of the batch.
        seq_len = position_ids.max() + 1 if rope["rope_type"] in ("dynamic", "longrope") else None
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device, seq_len=seq_len)
    # In float32 whatever the model's dtype: bfloat16 cannot tell positions 256 and 257 apart.
    # (batch or 1, length, one for all heads, one for queries and keys, dim_head / 2)
    angles = position_ids[..., None, None, None].float() * inv_freq.float()
    return torch.stack((angles.cos(), angles.sin()), dim=-1) * factor


def rotate(query_key: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs (x0, x1) of queries and keys, (batch, length, heads, 2, dim_head), in float32 or wider."""
    pairs = query_key.to(torch.promote_types(query_key.dtype, torch.float32)).unflatten(-1, (-1, 2))
    if is_tracing(query_key) or query_key.device.type not in ("cpu", "cuda"):
        # Compilers fuse these steps into one; not all exporters and devices know complex numbers.
        (x0, x1), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
        rotated = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1)
    else:
        # A product of complex numbers is one kernel instead of seven: 1.08 times the model's speed on two CPU cores.
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    return rotated.flatten(-2).to(query_key.dtype)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, which also returns its weights (batch, heads, length, length)."""
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2), weights


def varlen_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """`sdpa` of documents that lie end to end, (1, heads, tokens, dim_head)."""
    if has_varlen_kernel(query, dropout):
        from torch.nn.attention.varlen import varlen_attn  # It scales by 1 / sqrt(dim_head), as we do.

        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        return varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)[None], None
    return sdpa_of_each(query, key, value, cu_seq_lens_q, scaling, dropout), None


def has_varlen_kernel(query: torch.Tensor, dropout: float) -> bool:
    """Whether torch's FlashAttention can do it: 16 bits, from compute capability 8.0, without dropout."""
    kernel = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0
    return kernel and not dropout and torch.cuda.get_device_capability(query.device) >= (8, 0)


@torch.compiler.disable  # A block that is compiled by itself would be compiled anew for each set of lengths.
def sdpa_of_each(query, key, value, cu_seq_lens: torch.Tensor, scaling: float, dropout: float) -> torch.Tensor:
    """One call for each document; (1, tokens, heads, dim_head)."""
    lengths = cu_seq_lens.diff().tolist()
    if not lengths:  # A batch of padding only.
        return query.transpose(1, 2)
    documents = zip(*(states.split(lengths, dim=2) for states in (query, key, value)))
    attended = [F.scaled_dot_product_attention(*states, dropout_p=dropout, scale=scaling) for states in documents]
    return torch.cat([states.transpose(1, 2) for states in attended], dim=1)


class NeoBERTRMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.is_cuda:
            return super().forward(hidden_states)  # One kernel.
        # On a CPU the formula takes half the time of torch's, and the TorchScript exporter to ONNX knows it.
        states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square() / states.shape[-1]
        # In place, which is 1.03 times the speed of short texts in int8.
        return (states * torch.rsqrt(mean_square + self.eps)).mul_(self.weight).to(hidden_states.dtype)


def swiglu_width(config: NeoBERTConfig) -> int:
    """Two thirds keep the parameters of the two-matrix MLP; a multiple of 8 keeps the tiles of a GPU full."""
    return 8 * math.ceil(int(2 * config.intermediate_size / 3) / 8)


class NeoBERTSwiGLU(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv 2002.05202), gate and input in one matrix; SiLU acts on the first half."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * swiglu_width(config), bias=False)
        self.w3 = nn.Linear(swiglu_width(config), config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.w12(hidden_states).chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return self.w3(F.silu(gate) * up)
        return self.w3(F.silu(gate, inplace=True).mul_(up))  # Less memory to fetch: 1.05 times the speed on a CPU.


def build_norm(config: NeoBERTConfig) -> nn.Module:
    norm = NeoBERTRMSNorm if config.rms_norm else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_eps)


class NeoBERTEncoderBlock(GradientCheckpointingLayer):
    """Attention and MLP, each after a norm and added to the residual stream; parameter names are the original's."""

    is_causal = False  # Read by Transformers' attention functions.

    def __init__(self, config: NeoBERTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx, self.scaling = layer_idx, config.dim_head**-0.5  # vLLM reads both by these names.
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
        rotary: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        **varlen_arguments,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream (batch, length, hidden_size) after the block, and the attention weights if there are any.

        Args:
            rotary: see `rotary_table`; None without RoPE.
            varlen_arguments: where the documents of an unpadded batch lie, see `UnpaddedBatch.attention_arguments`.
        """
        # The fused projection is laid out per head: (heads, 3, dim_head).
        qkv = self.qkv(self.attention_norm(hidden_states)).unflatten(-1, (-1, 3, self.config.dim_head))
        query_key, value = qkv[..., :2, :], qkv[..., 2, :]
        if rotary is not None:
            query_key = rotate(query_key, rotary)
        query, key = query_key.unbind(-2)
        name = self.config._attn_implementation
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        if varlen_arguments and name == "sdpa":
            attention_function = varlen_sdpa
        attended, weights = attention_function(
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention_mask,
            scaling=self.scaling,
            # Tools such as TRL switch dropout off in its modules.
            dropout=self.dropout.p if self.dropout.training else 0.0,
            **varlen_arguments,
        )
        hidden_states = hidden_states + self.dropout(self.wo(attended.reshape(hidden_states.shape)))
        return hidden_states + self.dropout(self.ffn(self.ffn_norm(hidden_states))), weights


# Modules on top of the backbone; a checkpoint need not have been trained for the task of the model it is loaded into.
TASK_HEADS = ("dense", "classifier", "qa_outputs")

LOADING_LOCK = RLock()


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Initialisation as published, and loading that refuses checkpoints that do not fit."""

    config_class = NeoBERTConfig
    base_model_prefix = "model"
    _input_embed_layer = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTEncoderBlock"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(NeoBERTEncoderBlock, index=0),
        "attentions": OutputRecorder(NeoBERTEncoderBlock, index=1),
    }

    prepare_for_inference = prepare_for_inference

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            # `self` is the model that owns the module.
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

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in Transformers, but a tensor that is missing, left over, of another shape or not finite is an error.

        The head of a task may be missing, and is then new; heads of other tasks may be in the file, and are not used.

        Raises:
            ValueError: naming the tensors.
        """
        # Transformers changes torch's default dtype while it loads. Two threads that load at once would leave float16
        # as the default of the process (seen with 5.23.0).
        with LOADING_LOCK:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        model._check_loaded(info, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    def _check_loaded(self, info: dict, where: object) -> None:
        """Refuse tensors that do not fit, and initialise a classifier anew that belongs to another kind of head."""
        own = [name for name in TASK_HEADS if hasattr(self, name)]
        missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
        new = [name for name in own if {f"{name}.weight", f"{name}.bias"} <= missing]
        other_heads = set(TASK_HEADS) if hasattr(self, "decoder") else {*TASK_HEADS, "decoder"}
        wrong = {
            "missing": {name for name in missing if name.split(".")[0] not in new},
            "unexpected": {name for name in unexpected if name.split(".")[0] not in other_heads},
            "of another shape": {name for name, *_ in info["mismatched_keys"] if name.split(".")[0] not in TASK_HEADS},
            # Quantised and sharded tensors are of other classes.
            "not finite": {
                name
                for name, tensor in self.named_parameters()
                if type(tensor) is nn.Parameter and not tensor.is_meta and not tensor.isfinite().all()
            },
        }
        if any(wrong.values()):
            found = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in wrong.items() if names)
            raise ValueError(f"{where} does not hold a {type(self).__name__}. Tensors {found}.")
        # Sequence and token classification both call their last layer `classifier`; only the former has a `dense`.
        other_kind = "dense" in new or "dense.weight" in unexpected
        if "classifier" in own and "classifier" not in new and other_kind:
            nn.init.normal_(self.classifier.weight, std=self.config.classifier_init_range)
            nn.init.zeros_(self.classifier.bias)
            logger.warning(f"The classifier of {where} belongs to another kind of head: it was initialised anew.")


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The encoder: token ids to hidden states.

    References:
        Le Breton et al., NeoBERT: A Next-Generation BERT, 2025, arXiv 2502.19587, section 3.1.
    """

    # Every MLM checkpoint has a decoder, and every embedding model is loaded from one: this needs no report each time.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.(weight|bias)$"]

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        if not config.rope:
            # Position p is in row p + 1, as in the original, which keeps row 0 for padding.
            self.positional_embedding = nn.Embedding(config.max_length + 1, config.hidden_size, padding_idx=0)
        self.transformer_encoder = nn.ModuleList(
            NeoBERTEncoderBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.layer_norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cu_seq_lens_q: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        r"""
        Args:
            input_ids (`(batch, length)`): token ids. Pass either these or `inputs_embeds`.
            attention_mask (`(batch, length)`): 1 at real tokens, 0 at padding, which may be anywhere.
            position_ids (`(batch or 1, length)`): positions from 0. At each 0 a new document begins, and no attention
                crosses its border.
            token_type_ids: accepted because BERT tokenizers emit them, and unused.
            inputs_embeds (`(batch, length, hidden_size)`): embeddings instead of ids.
            cu_seq_lens_q (`(documents + 1,)`): offsets of the documents of one packed row (batch 1), as
                `DataCollatorWithFlattening` gives them, together with three more arguments that are not needed.
            kwargs: `output_hidden_states`, `output_attentions` (with `eager`) and `return_dict` of Transformers. Others
                are ignored, as BERT does, unless they look like a misspelt argument.

        Returns:
            `last_hidden_state` (batch, length, hidden_size), after the final norm; zero at padding.

        Raises:
            ValueError: on inputs that do not fit, naming the argument and what is allowed.
            TypeError: on a misspelt argument.
        """
        if self.config._attn_implementation == "vllm":
            # A step's texts lie end to end in one row. vLLM's attention keeps them apart, and its warm-up is all zeros.
            hidden_states = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
            return self.encode(hidden_states, position_ids, return_dict=True, **kwargs)
        check_arguments(self.config, input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens_q, kwargs)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        hidden_states = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        shape, device = hidden_states.shape[:2], hidden_states.device
        mask = None if attention_mask is None else attention_mask.bool()
        position_ids, document_ids = find_documents(self.config, shape, device, mask, position_ids, cu_seq_lens_q)
        return self.encode(hidden_states, position_ids, mask, document_ids, return_dict=True, **kwargs)

    def encode(self, hidden_states, position_ids, mask=None, document_ids=None, **kwargs) -> BaseModelOutput:
        """The blocks over embeddings (batch, length, hidden_size), without the padding where that is possible.

        Args:
            position_ids, mask, document_ids: see `find_documents`.
        """
        tracing = is_tracing(hidden_states)
        if not tracing:  # The shapes of a graph must not depend on values.
            mask = None if mask is None or mask.all() else mask
            document_ids = None if document_ids is None or (document_ids == document_ids[:, :1]).all() else document_ids
        if mask is None and document_ids is None:
            return self._run_blocks(hidden_states, position_ids, None, {}, **kwargs)
        name = self.config._attn_implementation
        flash = is_flash_attention_requested(requested_attention_implementation=name)
        # Hidden states that are asked for keep the shape of the batch, so that they have gradients.
        states_wanted = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        unpad = (flash or name == "sdpa") and self.config.unpad and not states_wanted and not tracing
        if unpad or (flash and document_ids is not None):  # FlashAttention has no mask to keep documents apart.
            return self._encode_unpadded(hidden_states, position_ids, mask, document_ids, **kwargs)
        return self._encode_masked(hidden_states, position_ids, mask, document_ids, **kwargs)

    def _encode_unpadded(self, hidden_states, position_ids, mask, document_ids, **kwargs) -> BaseModelOutput:
        batch = UnpaddedBatch.from_padded(hidden_states.shape[:2], mask, position_ids, document_ids)
        hidden_states, arguments = batch.unpad(hidden_states), batch.attention_arguments()
        outputs = self._run_blocks(hidden_states, batch.position_ids, None, arguments, **kwargs)
        outputs.last_hidden_state = batch.pad(outputs.last_hidden_state)
        if outputs.hidden_states is not None:  # Those that were not selected are None.
            outputs.hidden_states = tuple(None if each is None else batch.pad(each) for each in outputs.hidden_states)
        return outputs

    def _encode_masked(self, hidden_states, position_ids, mask, document_ids, **kwargs) -> BaseModelOutput:
        if self.config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise ValueError(
                f"`attn_implementation` is {self.config._attn_implementation!r}, which has no mask function for padded "
                "batches: register one with `transformers.AttentionMaskInterface`."
            )
        same_document = None if document_ids is None else packed_sequence_mask_function(document_ids)
        attention_mask = create_bidirectional_mask(
            self.config, inputs_embeds=hidden_states, attention_mask=mask, and_mask_function=same_document
        )
        outputs = self._run_blocks(hidden_states, position_ids, attention_mask, {}, **kwargs)
        if mask is not None:
            padding = ~mask[..., None].to(outputs.last_hidden_state.device)
            outputs.last_hidden_state = outputs.last_hidden_state.masked_fill(padding, 0.0)
        return outputs

    @capture_outputs
    def _run_blocks(self, hidden_states, position_ids, attention_mask, varlen_arguments, **kwargs) -> BaseModelOutput:
        if self.config.rope:
            rotary = rotary_table(self.config, position_ids)
        else:
            rotary = None
            hidden_states = hidden_states + self.positional_embedding(position_ids + 1)
        for block in self.transformer_encoder:
            hidden_states, _ = block(hidden_states, rotary, attention_mask, **varlen_arguments)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class NeoBERTForMaskedLM(NeoBERTPreTrainedModel):
    """Masked language modelling: a linear decoder with bias, tied to the embeddings only if the config says so."""

    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}

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
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ) -> MaskedLMOutput:
        r"""
        Args:
            labels (`(batch, length)`): ids to predict, -100 where there is nothing to predict.

        Returns:
            `loss` in nats, and `logits` (batch, length, vocab_size). With labels and `config.sparse_prediction`, the
            logits are those of the labelled positions only, (labelled positions, vocab_size), in reading order.
        """
        kwargs["return_dict"] = True
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        hidden_states, loss = outputs.last_hidden_state, None
        if labels is not None and self.config.sparse_prediction:
            # The decoder takes 11% of the published model's multiplications; 80% of its rows would be ignored.
            labels = labels.to(hidden_states.device).flatten()
            labelled = (labels != -100).nonzero()[:, 0]
            hidden_states = hidden_states.flatten(0, 1).index_select(0, labelled)
            labels = labels.index_select(0, labelled)
        logits = self.decoder(hidden_states)
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


def mean_of_tokens(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, prompt_length: int | torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over each row's real tokens after its prompt, (batch, hidden_size), in float32 or wider.

    NeoBERT's hidden states reach 130: their sums overflow in float16 and lose the small dimensions in bfloat16.

    Args:
        prompt_length: number of prompt tokens, one for all rows or one per row; Sentence Transformers passes a tensor
            in training.
    """
    states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if attention_mask is None and prompt_length is None:
        return states.mean(1)
    if attention_mask is None:
        attention_mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    kept = attention_mask.bool().to(states.device)
    if prompt_length is not None:
        kept = kept & (kept.cumsum(-1) > torch.as_tensor(prompt_length, device=states.device).reshape(-1, 1))
    # A row without a token after its prompt becomes NaN, which is noticed; zeros would go unnoticed.
    return (states * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)


class NeoBERTPooledClassifier(NeoBERTPreTrainedModel):
    """The original's head for whole sequences: pooling, a tanh layer and a classifier."""

    # The loss is a plain mean, so the Trainer itself must divide it by the number of accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: NeoBERTConfig, outputs: int):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, outputs)
        self.post_init()

    def classify(self, hidden_states, attention_mask, cu_seq_lens=None) -> torch.Tensor:
        """Scores (sequences, outputs). Each document of a row that is packed with offsets is a sequence."""
        if self.training and not self.dense.weight.requires_grad and not is_tracing(hidden_states):
            logger.warning_once(
                "`dense` is frozen in training. If it is new, it must be saved with the adapter; otherwise reloading "
                'initialises another random one: LoraConfig(modules_to_save=["dense", "classifier"]).'
            )
        if cu_seq_lens is not None:
            rows = hidden_states[0].split(cu_seq_lens.diff().tolist())
            pooled = torch.stack([row[0] if self.config.classifier_pooling == "cls" else row.mean(0) for row in rows])
        elif self.config.classifier_pooling == "mean":
            pooled = mean_of_tokens(hidden_states, attention_mask).to(hidden_states.dtype)
        elif attention_mask is None:
            pooled = hidden_states[:, 0]
        else:
            first = attention_mask.int().argmax(-1).to(hidden_states.device)
            pooled = hidden_states[torch.arange(hidden_states.shape[0], device=first.device), first]
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


class NeoBERTForSequenceClassification(NeoBERTPooledClassifier):
    """Classification or regression of whole sequences, with the original's head."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, config.num_labels)
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ) -> SequenceClassifierOutput:
        r"""
        Args:
            labels (`(sequences,)` or `(sequences, num_labels)`): classes (-100 for none), regression targets, or a
                matrix of 0 and 1, as `config.problem_type` says (guessed from the labels' dtype if unset).

        Returns:
            `loss` and `logits` (sequences, num_labels).
        """
        kwargs["return_dict"] = True
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.classify(outputs.last_hidden_state, attention_mask, kwargs.get("cu_seq_lens_q"))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class NeoBERTForMultipleChoice(NeoBERTPooledClassifier):
    """Multiple choice among sequences, as in SWAG: the head scores each, and a softmax runs over the choices."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, 1)

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ) -> MultipleChoiceModelOutput:
        r"""
        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: as in `NeoBERTModel`, with a dimension `choices`
                after the batch.
            labels (`(batch,)`): index of the right choice.

        Returns:
            `loss` and `logits` (batch, choices).
        """
        kwargs["return_dict"] = True
        choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        input_ids, attention_mask, position_ids, inputs_embeds = (
            None if given is None else given.flatten(0, 1)
            for given in (input_ids, attention_mask, position_ids, inputs_embeds)
        )
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.classify(outputs.last_hidden_state, attention_mask).view(-1, choices)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(loss, logits, outputs.hidden_states, outputs.attentions)


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
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ) -> TokenClassifierOutput:
        r"""
        Args:
            labels (`(batch, length)`): classes, -100 where there is none.

        Returns:
            `loss` and `logits` (batch, length, num_labels).
        """
        kwargs["return_dict"] = True
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class NeoBERTForQuestionAnswering(NeoBERTPreTrainedModel):
    """Extractive question answering: the first and last token of the answer, as in SQuAD."""

    accepts_loss_kwargs = False  # As for whole sequences.

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
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        start_positions=None,
        end_positions=None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        r"""
        Args:
            start_positions, end_positions (`(batch,)`): first and last token of the answer.

        Returns:
            `loss` (mean of the two), `start_logits` and `end_logits` (batch, length).
        """
        kwargs["return_dict"] = True
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        start_logits, end_logits = self.qa_outputs(self.dropout(outputs.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            start, end = start_logits, end_logits
            if attention_mask is not None:  # The softmax runs over real tokens.
                padding, lowest = (attention_mask == 0).to(start.device), torch.finfo(start.dtype).min
                start, end = start.masked_fill(padding, lowest), end.masked_fill(padding, lowest)
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss, start_logits, end_logits, outputs.hidden_states, outputs.attentions)


NeoBERTModel.register_for_auto_class("AutoModel")
NeoBERTForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
NeoBERTForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
NeoBERTForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
NeoBERTForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
NeoBERTForMultipleChoice.register_for_auto_class("AutoModelForMultipleChoice")

__all__ = [
    "NeoBERTPreTrainedModel",
    "NeoBERTModel",
    "NeoBERTForMaskedLM",
    "NeoBERTForSequenceClassification",
    "NeoBERTForTokenClassification",
    "NeoBERTForQuestionAnswering",
    "NeoBERTForMultipleChoice",
]
