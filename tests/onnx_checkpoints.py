"""Small checkpoints with a tokenizer, for the tests of the ONNX export."""

import string
from pathlib import Path

from conftest import small_model
from transformers import BertTokenizer

from neobert_hf import NeoBERTModel


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [prefix + letter for prefix in ("", "##") for letter in string.ascii_lowercase]


def letter_tokenizer() -> BertTokenizer:
    """A token for each letter: real ragged text for 100 embeddings, each of which has a token."""
    tokens = [*SPECIAL, *LETTERS, *".,!?;-()", *string.digits]
    tokens += [f"[unused{number}]" for number in range(100 - len(tokens))]
    return BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}, model_max_length=64)


def save_checkpoint(folder: Path, cls=NeoBERTModel, model=None, **changes) -> Path:
    model = model or small_model(cls, **changes)
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder
