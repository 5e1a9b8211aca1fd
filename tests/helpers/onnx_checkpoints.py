"""Small checkpoints with a tokenizer, and their export, for the tests of the ONNX files."""

from pathlib import Path

from neobert_hf import NeoBERTModel
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


def save_checkpoint(folder: Path, cls=NeoBERTModel, model=None, **changes) -> Path:
    model = model or small_model(cls, **changes)
    model.save_pretrained(folder)
    small_tokenizer(model_max_length=64).save_pretrained(folder)
    return folder


def export(source: Path, output: Path, **options) -> None:
    # It needs packages that a test which is left out without them may lack.
    from neobert_hf.hub.export import ExportSettings
    from neobert_hf.hub.export import export as export_checkpoint

    export_checkpoint(ExportSettings(str(source), str(output), **options))
