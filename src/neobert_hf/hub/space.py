"""`neobert-hf export --space`: a web page around an exported model, which computes in the visitor's browser.

    neobert-hf export runs/embeddings/model space --space
    python -m http.server --directory space

The folder is also a static Space of the Hub: `hf upload me/my-space space --type space` sends it.
"""

import shutil
from pathlib import Path

from neobert_hf.common.files import write_json
from neobert_hf.hub.export import ExportedFile, export_onnx, load_for_task, pooling_modes
from neobert_hf.hub.model_folder import read_json, read_modules, read_sentence_config


# The page, which is also `examples/browser`.
PAGE = Path(__file__).parent / "browser"
MODEL = "model"
DTYPES = {"float16": "fp16", "float32": "fp32", "int8": "q8"}


def export_page(
    source: Path, folder: Path, task: str | None = None, precisions: list[str] | None = None
) -> list[ExportedFile]:
    """Write the page and, in `model`, the exported files of an embedding model or a masked language model.

    Args:
        precisions: float16 if None. The page loads the first.

    Raises:
        ValueError: if the checkpoint cannot be exported, or is a model of another kind.
    """
    _, task = load_for_task(source, task)
    if task == "feature-extraction":
        models = {"search": search_settings(source), "fill": None}
    elif task == "fill-mask":
        models = {"search": None, "fill": {"model": MODEL}}
    else:
        raise ValueError(
            f"{source} is a model for {task}; the page is for embedding models and masked language models. Give "
            "`--task feature-extraction` for the encoder alone, or leave out `--space`."
        )
    precisions = precisions or ["float16"]
    (folder / MODEL).mkdir()
    files = export_onnx(source, folder / MODEL, task, precisions)
    for file in PAGE.iterdir():
        shutil.copyfile(file, folder / file.name)
    settings = read_json(PAGE / "settings.json") | {"dtype": DTYPES[precisions[0]]} | models
    write_json(folder / "settings.json", settings)
    return files


def search_settings(source: Path) -> dict[str, str]:
    """How the page computes embeddings. Encoders without a pooling get the mean, as in Sentence Transformers."""
    modes = next((pooling_modes(module) for module in read_modules(source) if module.name == "Pooling"), ["mean"])
    if modes not in (["mean"], ["cls"]):
        raise ValueError(f"{source} has the pooling {' and '.join(modes)}; in the browser it must be mean or cls.")
    prompts = read_sentence_config(source).get("prompts") or {}
    asked = {f"{name}_prompt": prompts.get(name, "") for name in ("query", "document")}
    return {"model": MODEL, "pooling": modes[0]} | asked
