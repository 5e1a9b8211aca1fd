"""Small checkpoints with a tokenizer, for the tests of the ONNX export."""

from pathlib import Path

from neobert_hf import NeoBERTModel
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


def save_checkpoint(folder: Path, cls=NeoBERTModel, model=None, **changes) -> Path:
    model = model or small_model(cls, **changes)
    model.save_pretrained(folder)
    small_tokenizer(model_max_length=64).save_pretrained(folder)
    return folder
