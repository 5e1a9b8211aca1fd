"""How many tokens a model can read."""

from transformers import PreTrainedModel


def tokens_read(model: PreTrainedModel, *limits: int | None) -> int | None:
    """The smallest of the limits, those that are not None, and of the positions that are left for tokens.

    In RoBERTa and its kin (XLM-R, MPNet, Longformer) positions begin after the padding id: a table of 514 is for 512
    tokens. Their published tokenizers store that limit, others may not.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    shifted = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    left = [table.num_embeddings - table.padding_idx - 1 for table in shifted]
    return min([limit for limit in (*limits, *left) if limit is not None], default=None)
