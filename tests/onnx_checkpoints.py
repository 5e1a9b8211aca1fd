"""Small checkpoints with a tokenizer, for the tests of the ONNX export."""

from pathlib import Path

from conftest import small_model
from small_tokenizer import small_tokenizer

from neobert_hf import NeoBERTModel


def save_checkpoint(folder: Path, cls=NeoBERTModel, model=None, **changes) -> Path:
    model = model or small_model(cls, **changes)
    model.save_pretrained(folder)
    small_tokenizer(model_max_length=64).save_pretrained(folder)
    return folder
