"""Texts laid end to end instead of padded, for Sentence Transformers models on NeoBERT.

Sentence Transformers flattens a batch only if a flash attention is set. NeoBERT takes flattened batches with `sdpa` as
well, on any device (README, "Attention backends"). It strips the padding of padded batches by itself, so its layers
gain nothing from this. The modules after them do: the decoder of a SPLADE model then runs on real tokens only.
"""

from sentence_transformers.base.model import BaseModel
from transformers import DataCollatorWithFlattening
from transformers.utils.generic import is_flash_attention_requested

from neobert_hf.modeling_neobert import NeoBERTPreTrainedModel


def flatten_inputs(encoder: BaseModel) -> None:
    """Let a model lay its texts end to end.

    Its outputs stay the same, and so does what `save_pretrained` writes. `encoder[0].unpad_inputs = False` undoes
    this.

    Args:
        encoder: a Sentence Transformers model of any kind on NeoBERT.

    Raises:
        ValueError: if its first module is not a NeoBERT, or its attention would compute a mask over all texts at once.
    """
    transformer = encoder[0]
    if not isinstance(model := getattr(transformer, "model", None), NeoBERTPreTrainedModel):
        raise ValueError(f"Flattened inputs need a NeoBERT model; the first module holds {type(model).__name__}.")
    attention = model.config._attn_implementation
    if attention != "sdpa" and not is_flash_attention_requested(requested_attention_implementation=attention):
        raise ValueError(
            f"Attention {attention!r} would compute a mask over all texts of a batch at once: load the model with "
            "attn_implementation 'sdpa' or a flash attention."
        )
    transformer.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    transformer._flatten_position_offset = 0
    transformer.can_flatten_inputs = True
