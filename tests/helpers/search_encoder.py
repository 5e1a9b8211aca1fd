"""The encoder of the tests of search."""

from pathlib import Path
from pydoc_data.topics import topics

from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import word_tokenizer


def save_search_encoder(folder: Path) -> str:
    """Save a random encoder of 64 tokens, whose attention and embeddings are far from uniform. Returns the folder."""
    tokenizer = word_tokenizer(" ".join(topics.values()).lower(), 600, max_length=64)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    small_model(**sizes, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
