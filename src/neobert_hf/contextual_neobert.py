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
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from .configuration_neobert import NeoBERTConfig
from .modeling_neobert import (
    NeoBERTModel,
    NeoBERTPreTrainedModel,
    check_arguments,
    find_documents,
    mean_of_tokens,
)


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
        ValueError: as `NeoBERTConfig`; also without RoPE, since learned positions have none for a context.
    """

    model_type = "neobert_contextual"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "contextual_neobert.NeoBERTContextualConfig",
        "AutoModel": "contextual_neobert.NeoBERTContextualModel",
    }

    context_size: int = 512
    context_dropout: float | int = 0.0
    soft_prompts: int = 8
    text_position: int = 0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not self.rope:
            raise ValueError("`rope` is False; it must be True: a context needs RoPE.")


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
            `last_hidden_state` (batch, length, hidden_size) of the stage. Its `hidden_states` and
            `attentions` include the prefix of the second stage.

        Raises:
            ValueError: as `NeoBERTModel`, and on a context of a wrong shape.
            TypeError: on a misspelt argument.
        """
        for name in ("position_ids", "cu_seq_lens_q"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` is given; a contextual model reads one text a row, so leave it out.")
        kwargs["return_dict"] = True
        if dataset_embeddings is None:
            outputs = self.first_stage(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
            pooled = mean_of_tokens(outputs.last_hidden_state, attention_mask)
            embeddings = _apply(self.first_head, pooled)
        else:
            check_arguments(self.config, input_ids, inputs_embeds, attention_mask, None, None, kwargs)
            text = self.second_stage.encoder(input_ids) if inputs_embeds is None else inputs_embeds
            outputs = self._encode_in_context(text, attention_mask, dataset_embeddings, **kwargs)
            pooled = mean_of_tokens(outputs.last_hidden_state, attention_mask, prompt_length)
            embeddings = pooled + _apply(self.second_head, pooled)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=embeddings,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _encode_in_context(self, text, attention_mask, dataset_embeddings, **kwargs):
        """The second stage's states of the text, (batch, length, hidden_size), which also attends to the prefix."""
        prefix = self.build_prefix(dataset_embeddings, text.shape[0]).to(text)
        prefix_length = prefix.shape[1]
        hidden_states = torch.cat((prefix.expand(text.shape[0], -1, -1), text), dim=1)
        mask = None if attention_mask is None else attention_mask.bool()
        positions, _ = find_documents(self.config, text.shape[:2], text.device, mask, None, None)
        mask = None if mask is None else F.pad(mask, (prefix_length, 0), value=True)
        positions = F.pad(positions + self.config.text_position, (prefix_length, 0))
        outputs = self.second_stage.encode(hidden_states, positions, mask, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state[:, prefix_length:]
        return outputs

    def build_prefix(self, dataset_embeddings: torch.Tensor, rows: int) -> torch.Tensor:
        """The second stage's prefix of every text: (rows or 1, context_size + soft_prompts, hidden_size).

        Args:
            rows: the number of rows in the batch; in training with context dropout, each has its own prefix.
        """
        prompts, size = self.soft_prompts.weight, self.config.context_size
        found, needed = tuple(dataset_embeddings.shape), (size, self.config.hidden_size)
        if found != needed and not (found == (0, needed[1]) and self.config.context_dropout):
            raise ValueError(
                f"`dataset_embeddings` has shape {found}; it must be {needed}, or (0, {needed[1]}) for no context if "
                "the model was trained with `context_dropout`."
            )
        context = dataset_embeddings.to(prompts.device).unsqueeze(0)
        if not context.shape[1]:
            context = self.null_context.weight.expand(1, size, -1)
        elif self.training and self.config.context_dropout:
            dropped = torch.rand(rows, size, 1, device=context.device) < self.config.context_dropout
            context = torch.where(dropped, self.null_context.weight, context)
        return torch.cat((context, prompts.expand(len(context), -1, -1)), dim=1)


def _apply(head: nn.Sequential, pooled: torch.Tensor) -> torch.Tensor:
    """Apply a head in its own dtype; the output has the dtype of `pooled`."""
    return head(pooled.to(next(head.parameters()).dtype)).to(pooled.dtype)


NeoBERTContextualConfig.register_for_auto_class()
NeoBERTContextualModel.register_for_auto_class("AutoModel")

__all__ = ["NeoBERTContextualConfig", "NeoBERTContextualModel"]
