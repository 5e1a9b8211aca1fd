"""The steps of examples/shrink_embeddings.py: a smaller embedding model is cut out of a large one.

The cut changes the hidden states of the encoder, so a linear layer that was trained on those of the large model no
longer fits. It is replaced by the linear layer that brings the embeddings nearest to those of the large model, which is
computed by ridge regression. That takes no training, and a model that had no such layer gets one. The same measure
decides which layers of the encoder are dropped: how much of the embeddings even the best linear layer cannot restore.
"""

from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sklearn.linear_model import RidgeCV
from torch import nn

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
    """The embedding model to make smaller, its new size, and the texts on which the loss of quality is measured."""

    model: PathOrId = field(metadata={"help": "the large embedding model: path or Hub id"})
    texts: PathOrId = field(
        metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    column: str = field(default="text", metadata={"help": "name of the column that holds the text"})
    measured_texts: Annotated[int, Range(2)] = field(
        default=200, metadata={"help": "number of texts, from the first, on which layers and units are measured"}
    )
    fitted_texts: Annotated[int, Range(2)] = field(
        default=10_000,
        metadata={"help": "number of texts, from the first, on which the linear layer after the pooling is fitted"},
    )
    output_dir: LocalPath = field(default="runs/shrink_embeddings", metadata={"help": "folder for model and report"})


def load_large_model(settings: EmbeddingCutSettings) -> tuple[SentenceTransformer, dict[str, int]]:
    """The model, in float32, and the sizes that it is cut to.

    Raises:
        FileNotFoundError, ValueError: if there is no such model, or it has no NeoBERT encoder, or it is not larger.
    """
    model = load_trained_model(settings.model).float().eval()
    encoder = getattr(model[0], "model", None)
    if not isinstance(encoder, NeoBERTModel):
        raise ValueError(
            f"`model` is {settings.model!r}, which begins with {type(encoder or model[0]).__name__}; it must be an "
            "embedding model with a NeoBERT encoder."
        )
    return model, settings.sizes(encoder.config)


def read_texts(settings: EmbeddingCutSettings) -> tuple[list[str], list[str]]:
    """The first texts of the source that are not empty: those to measure on, and those to fit a layer on."""
    rows = (row[settings.column] for row in stream_text(settings.texts, settings.column))
    wanted = max(settings.measured_texts, settings.fitted_texts)
    texts = list(islice((text for text in rows if text and text.strip()), wanted))
    if len(texts) < 2:
        raise ValueError(
            f"{settings.texts!r} holds {len(texts)} texts in the column {settings.column!r}; it must hold two or more. "
            "Name another column or source."
        )
    return texts[: settings.measured_texts], texts[: settings.fitted_texts]


def module_outputs(model: SentenceTransformer, kinds: tuple[type[nn.Module], ...], texts: list[str]) -> np.ndarray:
    """Outputs of the last module of these kinds for texts as documents and, if queries have another prompt, as queries.

    Returns:
        (texts or twice as many, width), float64.

    Raises:
        FloatingPointError: if an output is not finite.
    """
    part = SentenceTransformer(
        modules=list(model)[: last(model, kinds) + 1], prompts=model.prompts, device=model.device
    )
    ways = [part.encode_document]
    if model.prompts.get("query") != model.prompts.get("document"):
        ways.append(part.encode_query)
    found = []
    for encode in ways:
        found.append(encode(texts, show_progress_bar=False))
        check_finite(found[-1], texts)
    return np.concatenate(found).astype(np.float64)


def last(model: SentenceTransformer, kinds: tuple[type[nn.Module], ...]) -> int:
    return max(place for place, module in enumerate(model) if isinstance(module, kinds))


def embeddings_to_keep(model: SentenceTransformer, texts: list[str]) -> np.ndarray:
    """The embeddings of the large model, before they are normalized; see `module_outputs`."""
    return module_outputs(model, (Pooling, Dense), texts)


def best_linear_layer(states: np.ndarray, wanted: np.ndarray) -> tuple[RidgeCV, float]:
    """Ridge regression, whose penalty is chosen by leave-one-out cross-validation.

    Args:
        states: outputs of the pooling, (texts, width).
        wanted: the embeddings of the large model.

    Returns:
        The regression, and the share of the variance of `wanted` that it does not explain, by leave-one-out.
    """
    # Relative to how much the states vary, summed over all texts.
    penalties = np.logspace(-7, 1, 17) * states.var(0).mean() * len(states)
    ridge = RidgeCV(penalties).fit(states, wanted)
    return ridge, float(-ridge.best_score_ / wanted.var(0).mean())


def cut_encoder(model: SentenceTransformer, sizes: dict[str, int], texts: list[str]) -> Cut:
    """Cut the encoder, in place. Each cut is judged by how much of the embeddings no linear layer can restore.

    A masked loss would say nothing about the embeddings, and an embedding model has no decoder to compute one.
    """
    wanted = embeddings_to_keep(model, texts)

    def lost() -> float:
        return best_linear_layer(module_outputs(model, (Pooling,), texts), wanted)[1]

    return cut_model(model[0].model, sizes, "the share of the embeddings that is lost", lost)


def fit_linear_layer(model: SentenceTransformer, texts: list[str], wanted: np.ndarray) -> float:
    """Put one linear layer after the pooling, in place: the one that brings the embeddings nearest to the wanted ones.

    Args:
        model: after the cut. The linear layers that it has are removed.
        wanted: `embeddings_to_keep` of the large model.

    Returns:
        The share of the embeddings that is still lost.
    """
    ridge, lost = best_linear_layer(module_outputs(model, (Pooling,), texts), wanted)
    weight, bias = (torch.from_numpy(each).float() for each in (ridge.coef_, ridge.intercept_))
    layer = Dense(*weight.T.shape, activation_function=nn.Identity(), init_weight=weight, init_bias=bias)
    pooling = last(model, (Pooling,))
    for place in range(last(model, (Pooling, Dense)), pooling, -1):
        del model[place]
    model.insert(pooling + 1, layer.to(model.device))
    return lost


def save_cut(
    model: SentenceTransformer,
    cut: Cut,
    lost: float,
    settings: EmbeddingCutSettings,
    texts: tuple[list[str], list[str]],
    parameters: int,
) -> str:
    """Write `model/`, `report.md`, `report.json` and `shrink.png`.

    Args:
        lost: as `fit_linear_layer` returns it.
        texts: as `read_texts` returns them.
        parameters: number of parameters of the large model.

    Returns:
        The Markdown.
    """
    output, (measured, fitted) = Path(settings.output_dir), texts
    small = sum(weight.numel() for weight in model.parameters())
    lines = [
        "# A smaller embedding model",
        "",
        f"{settings.model} with {small:,} of its {parameters:,} parameters, {small / parameters:.1%}, measured on "
        f"{len(measured):,} texts of {settings.texts}. It has not been trained since: distil it from the large model.",
        "",
        f"A linear layer after the pooling was fitted on {len(fitted):,} texts to reproduce the embeddings of the "
        f"large model. {lost:.1%} of their variance is lost (leave-one-out).",
        "",
        *cut.lines(),
    ]
    with atomic_folder(output / "model") as partial:
        model.save_pretrained(str(partial), create_model_card=False)
    plot_lines(output / "shrink.png", [cut.panel()])
    sizes = {"large": parameters, "small": small}
    write_json(output / "report.json", {"parameters": sizes, "cut": asdict(cut), "lost": lost})
    write_text(output / "report.md", text := "\n".join(lines) + "\n")
    return text
