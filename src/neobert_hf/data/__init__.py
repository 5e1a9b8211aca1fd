"""Data as a user has them: the one reader of tables, tokenizers, and corpora that are prepared for pretraining.

`deduplicate` needs another extra, so it is in `neobert_hf.data.duplicates`.
"""

from neobert_hf.data.preparing import prepare_data
from neobert_hf.data.tokenizer import train_tokenizer


__all__ = ["prepare_data", "train_tokenizer"]
