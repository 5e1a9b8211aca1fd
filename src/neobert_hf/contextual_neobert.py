"""Contextual document embeddings (CDE; Morris and Rush, 2024, arXiv 2410.02525) with two NeoBERT encoders.

The first stage embeds each of J documents of a corpus; these vectors are the context. The second stage embeds a query
or a document, and attends to these vectors in addition to its tokens. The same two stages are used for queries and
documents, and the stages share no weights.

This file is also served from the Hub as remote code, so besides Transformers it imports its siblings only.
"""

from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from .configuration_neobert import MOST_POSITIONS, NeoBERTConfig, bounded
from .input_checks_neobert import check_keywords, refuse_values
from .modeling_neobert import NeoBERTModel, NeoBERTPreTrainedModel


@strict
class NeoBERTContextualConfig(NeoBERTConfig):
    r"""Configuration of a contextual embedding model. Both stages have the architecture that `NeoBERTConfig` describes.

    Args:
        context_size (`int`): J, the number of documents in a context. 512 in the paper (appendix G.2).
        context_dropout (`float`): In training, the probability that a context vector is replaced by one learned vector,
            drawn for each text and vector. Above 0, the model can also embed without a context. 0 in the reference
            code, 0.005 in the article of Morris and Rush.
        soft_prompts (`int`): Number of learned vectors after those of the context. 8 in the reference code.
        text_position (`int`): Position of the first token of the text: 0, as without context (ours), or `context_size`
            (the reference code). All vectors before the text have position 0, so their order does not matter.

    Raises:
        ValueError: as `NeoBERTConfig`; also without RoPE, and with another `text_position`.
    """

    model_type = "neobert_contextual"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "contextual_neobert.NeoBERTContextualConfig",
        "AutoModel": "contextual_neobert.NeoBERTContextualModel",
    }
    # None: the plans of `NeoBERTConfig` are for one encoder. Here there are two, and a prefix is computed between them.
    base_model_tp_plan = None
    base_model_pp_plan = None

    context_size: int = bounded(512, 1, MOST_POSITIONS)
    context_dropout: float | int = bounded(0.0, 0, 1, "[)")
    soft_prompts: int = bounded(8, 1, MOST_POSITIONS)
    text_position: int = bounded(0, 0, MOST_POSITIONS)

    def validate_architecture(self):
        super().validate_architecture()
        if not self.rope:
            raise ValueError("`rope` is False: a context needs RoPE, since learned positions have none for it.")
        if self.text_position not in (0, self.context_size):
            raise ValueError(
                f"`text_position` is {self.text_position}, it must be 0 or `context_size` ({self.context_size})."
            )

    def _estimate_parameters(self) -> int:
        return 2 * super()._estimate_parameters()


class NeoBERTContextualModel(NeoBERTPreTrainedModel):
    """Embeds texts: by the first stage without a context, and by the second stage with one.

    References:
        The NeoBERT paper, section 5.2.2 and appendix G; Morris and Rush, 2024, arXiv 2410.02525.
    """

    config_class = NeoBERTContextualConfig

    def __init__(self, config: NeoBERTContextualConfig):
        super().__init__(config)
        width = config.hidden_size
        self.first_stage = NeoBERTModel(config)
        self.first_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.second_stage = NeoBERTModel(config)
        self.second_head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.soft_prompts = nn.Embedding(config.soft_prompts, width)
        if config.context_dropout:
            self.null_context = nn.Embedding(1, width)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        dataset_embeddings: torch.FloatTensor | None = None,
        prompt_length: int | torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        r"""
        Args:
            input_ids, attention_mask, inputs_embeds: as in `NeoBERTModel`; one text a row.
            dataset_embeddings (`(context_size, hidden_size)`): the context: embeddings of the first stage, in any
                order, on any device. `None` for embeddings of the first stage. `(0, hidden_size)` for embeddings of the
                second stage without a context, if the model was trained for that (`context_dropout`).
            prompt_length: how many of a row's first real tokens are an instruction. The second stage attends to them,
                but leaves them out of the mean.
            token_type_ids: accepted because BERT tokenizers emit them, and unused.

        Returns:
            `pooler_output` (batch, hidden_size), the embeddings, not normalised, in float32 or wider;
            `last_hidden_state` (batch, length, hidden_size) of the stage.

        Raises:
            ValueError: as `NeoBERTModel`, and on a context of a wrong shape.
            TypeError: on unknown arguments. Packed rows are not supported.
        """
        check_keywords(kwargs)
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        kwargs |= {"return_dict": True, "require_tokens": True}
        if dataset_embeddings is None:
            outputs = self.first_stage(**texts, **kwargs)
            pooled = mean_of_tokens(outputs.last_hidden_state, attention_mask)
            embeddings = _apply(self.first_head, pooled)
        else:
            # Not `len`, which would fix the batch size in a graph.
            rows = (input_ids if input_ids is not None else inputs_embeds).shape[0]
            prefix = self.build_prefix(dataset_embeddings, rows)
            position = self.config.text_position
            outputs = self.second_stage(**texts, prefix_embeds=prefix, text_position=position, **kwargs)
            pooled = mean_of_tokens(outputs.last_hidden_state, attention_mask, prompt_length)
            embeddings = pooled + _apply(self.second_head, pooled)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=embeddings,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def build_prefix(self, dataset_embeddings: torch.Tensor, rows: int) -> torch.Tensor:
        """The second stage's prefix of every text: (rows or 1, context_size + soft_prompts, hidden_size).

        Args:
            rows: the number of rows in the batch; in training with context dropout, each has its own prefix.
        """
        self._check_context(dataset_embeddings)
        prompts, size = self.soft_prompts.weight, self.config.context_size
        context = dataset_embeddings.to(prompts.device).unsqueeze(0)
        if not context.shape[1]:
            context = self.null_context.weight.expand(1, size, -1)
        elif self.training and self.config.context_dropout:
            dropped = torch.rand(rows, size, 1, device=context.device) < self.config.context_dropout
            context = torch.where(dropped, self.null_context.weight, context)
        return torch.cat((context, prompts.expand(len(context), -1, -1)), dim=1)

    def _check_context(self, context: torch.Tensor) -> None:
        size, width = self.config.context_size, self.config.hidden_size
        if not isinstance(context, torch.Tensor):
            raise TypeError(f"`dataset_embeddings` is a {type(context).__name__}; it must be a torch.Tensor.")
        if context.ndim != 2 or context.shape[1] != width or context.shape[0] not in (0, size):
            raise ValueError(
                f"`dataset_embeddings` has shape {tuple(context.shape)}, it must be (context_size={size}, "
                f"hidden_size={width}), or (0, {width}) for no context."
            )
        if not context.is_floating_point():
            raise ValueError(f"`dataset_embeddings` has dtype {context.dtype}, it must be a floating dtype.")
        if not len(context) and not self.config.context_dropout:
            raise ValueError(
                "`dataset_embeddings` has no rows, but this model cannot embed without a context: it was trained with "
                "`context_dropout` 0. Pass a context, see `embed_context`."
            )
        refuse_values("dataset_embeddings", context, ~context.isfinite(), "a finite number everywhere")


def mean_of_tokens(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, prompt_length: int | torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over each row's real tokens after its prompt, (batch, hidden_size), in float32 or wider.

    NeoBERT's hidden states reach 130: their sums overflow in float16 and lose the small dimensions in bfloat16.

    Args:
        prompt_length: number of prompt tokens, one for all rows or one per row; Sentence Transformers passes a tensor
            in training.

    Raises:
        ValueError: if `prompt_length` is negative.
    """
    states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if attention_mask is None and prompt_length is None:
        return states.mean(1)
    if attention_mask is None:
        attention_mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    kept = attention_mask.bool().to(states.device)
    if prompt_length is not None:
        lengths = torch.as_tensor(prompt_length, device=states.device)
        refuse_values("prompt_length", lengths, lengths < 0, "0 or more")
        kept = kept & (kept.cumsum(-1) > lengths.reshape(-1, 1))
    # A row without a token after its prompt becomes NaN, which is noticed; zeros would go unnoticed.
    return (states * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)


def _apply(head: nn.Sequential, pooled: torch.Tensor) -> torch.Tensor:
    """Apply a head in its own dtype; the output has the dtype of `pooled`."""
    return head(pooled.to(head[0].weight.dtype)).to(pooled.dtype)


# The code is saved with the model, so that it can be loaded without the package.
NeoBERTContextualConfig.register_for_auto_class()
NeoBERTContextualModel.register_for_auto_class("AutoModel")

__all__ = ["NeoBERTContextualConfig", "NeoBERTContextualModel"]
