"""Data as a user has them: the one reader of tables, tokenizers, and corpora that are prepared for pretraining."""

from neobert_hf.common.exports import offer


RECIPES = {"deduplicate": "duplicates", "prepare_data": "preparing", "train_tokenizer": "tokenizer"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
