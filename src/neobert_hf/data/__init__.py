"""Data as a user has them: the one reader of tables, tokenizers, and corpora that are prepared for pretraining."""

from neobert_hf.common.exports import offer


__all__ = ["deduplicate", "prepare_data", "train_tokenizer"]
__getattr__ = offer(__name__, __all__)
