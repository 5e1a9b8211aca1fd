"""The steps of examples/shrink_embeddings.py: a smaller embedding model is cut out of a large one."""

from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from sentence_transformers import SentenceTransformer

from neobert_hf.common.atomic_writes import atomic_folder, write_json, write_text
from neobert_hf.common.report import plot_lines
from neobert_hf.common.settings import LocalPath, PathOrId, Range
from neobert_hf.common.text_sources import stream_text
from neobert_hf.embeddings.inference import check_finite
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.modeling_neobert import NeoBERTModel
from neobert_hf.training.cutting import Cut, CutSettings, cut_model


@dataclass(kw_only=True)
class EmbeddingCutSettings(CutSettings):
    """Which embedding model becomes smaller, how small, and on which texts that is measured."""

    model: PathOrId = field(metadata={"help": "the large embedding model: path or Hub id"})
    texts: PathOrId = field(
        metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    column: str = field(default="text", metadata={"help": "that holds the text"})
    measured_texts: Annotated[int, Range(1)] = field(
        default=200, metadata={"help": "the first ones, on which layers and units are measured"}
    )
    output_dir: LocalPath = field(default="runs/shrink_embeddings", metadata={"help": "folder of model and report"})


def load_large_model(settings: EmbeddingCutSettings) -> tuple[SentenceTransformer, dict[str, int]]:
    """The model, in float32, and the sizes that it is cut to.

    Raises:
        FileNotFoundError, ValueError: if there is no such model, or it is none of NeoBERT, or not larger.
    """
    model = load_trained_model(settings.model).float().eval()
    encoder = getattr(model[0], "model", None)
    if not isinstance(encoder, NeoBERTModel):
        raise ValueError(
            f"`model` is {settings.model!r}, which begins with {type(encoder or model[0]).__name__}; it must be an "
            "embedding model of NeoBERT."
        )
    return model, settings.sizes(encoder.config)


def read_texts(settings: EmbeddingCutSettings) -> list[str]:
    """The first texts of the source that are not empty."""
    rows = (row[settings.column] for row in stream_text(settings.texts, settings.column))
    if texts := list(islice((text for text in rows if text and text.strip()), settings.measured_texts)):
        return texts
    raise ValueError(f"{settings.texts!r} holds no text in the column {settings.column!r}: name another one.")


def cut_encoder(model: SentenceTransformer, sizes: dict[str, int], texts: list[str]) -> Cut:
    """Cut the encoder, in place. What is measured is how far the embeddings of the texts turn: 1 - cosine, on average.

    A masked loss would say nothing of what an embedding model is for, and it has no decoder.
    """

    def embed() -> np.ndarray:
        vectors = model.encode_document(texts, normalize_embeddings=True, show_progress_bar=False)
        check_finite(vectors, texts)
        return vectors

    whole = embed()
    return cut_model(model[0].model, sizes, "1 - cosine", lambda: float(1 - (whole * embed()).sum(1).mean()))


def save_cut(
    model: SentenceTransformer, cut: Cut, settings: EmbeddingCutSettings, texts: list[str], parameters: int
) -> str:
    """Write `model/`, `report.md`, `report.json` and `shrink.png`.

    Args:
        texts: on which was measured.
        parameters: of the large model.

    Returns:
        The Markdown.
    """
    output = Path(settings.output_dir)
    small = sum(weight.numel() for weight in model.parameters())
    lines = [
        "# A smaller embedding model",
        "",
        f"{settings.model} with {small:,} of its {parameters:,} parameters, {small / parameters:.1%}, measured on "
        f"{len(texts):,} texts of {settings.texts}. It has not been trained since: distil it from the large one.",
        "",
        *cut.lines(),
    ]
    with atomic_folder(output / "model") as partial:
        model.save_pretrained(str(partial), create_model_card=False)
    plot_lines(output / "shrink.png", [cut.panel()])
    write_json(output / "report.json", {"parameters": {"large": parameters, "small": small}, "cut": asdict(cut)})
    write_text(output / "report.md", text := "\n".join(lines) + "\n")
    return text
