"""How many tokens a model can read."""

from transformers import PreTrainedModel


def tokens_read(model: PreTrainedModel, *limits: int | None) -> int | None:
    """The smallest of the limits and the model's positions, where these begin after the padding id.

    So they do in RoBERTa and its kin (XLM-R, MPNet, Longformer): a table of 514 is for 512 tokens. Their published
    tokenizers store that limit, others may not.

    Args:
        model: whose table of positions counts.
        limits: of the settings, the tokenizer, the config; None for no limit.

    Returns:
        Tokens, None without any limit.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    shifted = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    left = [table.num_embeddings - table.padding_idx - 1 for table in shifted]
    return min([limit for limit in (*limits, *left) if limit is not None], default=None)
