"""`neobert-hf export`: files of a model that run without PyTorch, each checked before it is kept.

    neobert-hf export runs/embeddings/model exported

writes `onnx/model.onnx` (float32), `onnx/model_fp16.onnx`, `onnx/model_quantized.onnx` (int8) and, beside `onnx/`, the
config, the tokenizer and, for an embedding model, the files that say how tokens are pooled. Linear layers after the
pooling are part of the ONNX files: these output hidden states that have gone through the linear layers, and whose mean
is the embedding. The server Text Embeddings Inference also takes the folder. `--space` writes a web page around these
files (`space.py`), `--gguf` files for llama.cpp instead (`gguf.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.common.files import atomic_folder, folder_lock
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.hub.exported_model import TASKS, read_source
from neobert_hf.hub.gguf import write_gguf
from neobert_hf.hub.model_folder import local_folder
from neobert_hf.hub.onnx_files import FILES, write_folder
from neobert_hf.hub.space import write_page


@dataclass
class ExportSettings:
    """What is exported, and where to. For a Sentence Transformers model, the encoder is exported."""

    model: str = field(metadata={"help": "checkpoint: a local folder or a Hub id", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder to write; must not exist yet", "path": True})
    task: str | None = field(
        default=None, metadata={"choices": list(TASKS), "help": "the task of the checkpoint's class if unset"}
    )
    precisions: list[str] | None = field(
        default=None, metadata={"choices": list(FILES), "help": "one or more; all if unset"}
    )
    gguf: bool = field(default=False, metadata={"help": "write files for llama.cpp and Ollama instead of ONNX files"})
    space: bool = field(
        default=False, metadata={"help": "write a web page around the model, in float16 if `precisions` is unset"}
    )


@recipe(positional=("model", "output_dir"))
def export(settings: ExportSettings) -> Result:
    """Write a model as ONNX files, as a web page around them, or as files for llama.cpp.

    Each ONNX file is run and compared with PyTorch. A model with something that the files, or the programs that read
    them, do not compute is refused. The folder is written whole or not at all.

    Returns:
        The folder, as `output`, and in `scores` how far each ONNX file is from PyTorch, as a share of the norm.
    """
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already. Choose another folder, or delete this one if it is an old export.")
    if settings.gguf and settings.space:
        raise ValueError("The page of `--space` runs ONNX files: give `--gguf` or `--space`, each with its own folder.")
    write = write_gguf if settings.gguf else write_page if settings.space else write_folder
    with folder_lock(output):
        source = read_source(local_folder(settings.model), settings.task)
        with atomic_folder(output) as partial:
            errors = write(source, partial, settings.precisions)
    print(f"{output} is complete.")
    return Result(scores=errors, output=output)
