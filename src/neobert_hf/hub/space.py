"""`neobert-hf export --space`: a web page around an exported model, which computes in the visitor's browser.

    neobert-hf export runs/embeddings/model space --space
    python -m http.server --directory space

The folder is also a static Space of the Hub: `neobert-hf publish space me/my-space` sends it.
"""

import shutil
from pathlib import Path

from neobert_hf.common.files import write_json
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.hub.exported_model import Source, needs_lengths, pooling_of
from neobert_hf.hub.model_folder import read_json
from neobert_hf.hub.onnx_files import write_folder


# The page, which is also `examples/browser`.
PAGE = Path(__file__).parent / "browser"
MODEL = "model"
DTYPES = {"float16": "fp16", "float32": "fp32", "int8": "q8"}


def write_page(source: Source, folder: Path, precisions: list[str] | None = None) -> dict[str, float]:
    """Write the page and, in `model`, the exported files of an embedding model or a masked language model.

    Args:
        precisions: float16 if None. The page loads the first.

    Returns:
        As `write_folder`.

    Raises:
        ValueError: if it is a model of another kind, or the page would compare other vectors than it does.
    """
    if source.task not in ("feature-extraction", "fill-mask"):
        raise ValueError(
            f"The model is one for {source.task}; the page is for embedding models and masked language models. Give "
            "`--task feature-extraction` for the encoder alone, or leave out `--space`."
        )
    search = fill = None
    if source.sentences:
        pooling = pooling_of(source.sentences)
        if pooling not in ("mean", "cls"):
            raise ValueError(f"The model has the pooling {pooling!r}; in the browser it must be 'mean' or 'cls'.")
        if (dimensions := source.sentences.truncate_dim) is not None:
            raise ValueError(f"The model keeps {dimensions} dimensions (`truncate_dim`); the page would compare all.")
        if needs_lengths(source.sentences):
            compared = source.sentences.similarity_fn_name
            raise ValueError(f"The model compares vectors by {compared!r} (`similarity_fn_name`), the page by cosine.")
        search = {"model": MODEL, "pooling": pooling}
        search |= {f"{kind}_prompt": prompt_of(source.sentences, kind) for kind in ("query", "document")}
    else:
        fill = {"model": MODEL}
    precisions = precisions or ["float16"]
    for file in PAGE.iterdir():
        shutil.copyfile(file, folder / file.name)
    changes = {"dtype": DTYPES[precisions[0]], "search": search, "fill": fill}
    write_json(folder / "settings.json", read_json(PAGE / "settings.json") | changes)
    (folder / MODEL).mkdir()
    return write_folder(source, folder / MODEL, precisions)
