"""How many tokens a model can read."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def tokens_read(model: PreTrainedModel, *limits: int | None) -> int | None:
    """The smallest of the given limits and of the model's own, where its positions begin after the padding id.

    They do in RoBERTa and its relatives (XLM-R, MPNet, Longformer): a table of 514 positions is for 512 tokens. Their
    published tokenizers store that limit, others may not.

    Args:
        model: the model whose table of positions is looked at.
        limits: limits from the settings, the tokenizer and the config; None for no limit.

    Returns:
        The limit in tokens; None if there is none.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    shifted = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    left = [table.num_embeddings - table.padding_idx - 1 for table in shifted]
    return min([limit for limit in (*limits, *left) if limit is not None], default=None)


def length_to_cut_at(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """`wanted` tokens, or the limit of the model or its tokenizer if that is lower; a message is printed then."""
    positions = getattr(model.config, "max_position_embeddings", None)
    length = tokens_read(model, wanted, tokenizer.model_max_length, positions)
    if length < wanted:
        print(f"Texts are cut at {length:,} tokens, the model's limit; `max_length` is {wanted:,}.", flush=True)
    return length
