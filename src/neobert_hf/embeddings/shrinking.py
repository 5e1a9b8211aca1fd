"""The steps of examples/shrink_embeddings.py: a smaller embedding model is cut out of a large one.

The states of the encoder are other ones after the cut, and a linear layer that was trained on those of the large model
does not fit them. So it is computed anew, by ridge regression: of all linear layers the one after which the embeddings
are nearest to those of the large model. That takes no training, and a model that had no such layer gets one.
"""

from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sentence_transformers.util import pairwise_cos_sim
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
    """Which embedding model becomes smaller, how small, and on which texts that is measured."""

    model: PathOrId = field(metadata={"help": "the large embedding model: path or Hub id"})
    texts: PathOrId = field(
        metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    column: str = field(default="text", metadata={"help": "that holds the text"})
    measured_texts: Annotated[int, Range(1)] = field(
        default=200, metadata={"help": "the first ones, on which layers and units are measured"}
    )
    fitted_texts: Annotated[int, Range(0)] = field(
        default=2000,
        metadata={
            "help": "those behind them, on which a linear layer after the pooling is fitted; 0 leaves it as it was"
        },
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


def read_texts(settings: EmbeddingCutSettings) -> tuple[list[str], list[str]]:
    """The first texts of the source that are not empty: those to measure on, and those to fit a layer on."""
    rows = (row[settings.column] for row in stream_text(settings.texts, settings.column))
    wanted = settings.measured_texts + settings.fitted_texts
    texts = list(islice((text for text in rows if text and text.strip()), wanted))
    if not texts:
        raise ValueError(f"{settings.texts!r} holds no text in the column {settings.column!r}: name another one.")
    measured, fitted = texts[: settings.measured_texts], texts[settings.measured_texts :]
    if settings.fitted_texts and not fitted:
        raise ValueError(
            f"{settings.texts!r} holds {len(texts):,} texts, and `measured_texts` is {settings.measured_texts:,}: none "
            "is left to fit a linear layer on. Give more texts or set a smaller `measured_texts`, or `fitted_texts` to "
            "0, which leaves the layer as it was."
        )
    return measured, fitted


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


@dataclass
class Fit:
    """What a linear layer that was fitted anew does: 1 - cosine with the embeddings of the large model, on average.

    Args:
        texts: on which it was fitted. The cosines are those of the measured texts, which are others.
        before: with the layers that the large model has after its pooling.
        after: with the new layer in their place.
    """

    texts: int
    before: float
    after: float

    def line(self) -> str:
        return (
            f"A linear layer after the pooling was fitted on {self.texts:,} other texts. Without it the embeddings "
            f"turn by {self.before:.4f} (1 - cosine, on average), and with it by {self.after:.4f}."
        )


def last_linear(model: SentenceTransformer) -> int:
    """The place of the last linear layer behind the pooling, or of the pooling if there is none."""
    return max(place for place, module in enumerate(model) if isinstance(module, (Pooling, Dense)))


def outputs(model: SentenceTransformer, place: int, texts: list[str]) -> np.ndarray:
    """What the module at a place gives for texts as queries and, where those have another prompt, as documents too.

    Returns:
        (texts or twice as many, width): text by text.
    """
    part = SentenceTransformer(modules=list(model)[: place + 1], prompts=model.prompts, device=model.device)
    ways = [part.encode_document]
    if model.prompts.get("query") != model.prompts.get("document"):
        ways.append(part.encode_query)
    vectors = np.stack([encode(texts, show_progress_bar=False) for encode in ways], axis=1)
    return vectors.reshape(-1, vectors.shape[-1])


def embeddings_to_fit(model: SentenceTransformer, measured: list[str], fitted: list[str]) -> list[np.ndarray]:
    """What the last linear layer of the large model gives for both lists of texts; nothing if none are to be fitted."""
    return [outputs(model, last_linear(model), texts) for texts in (measured, fitted)] if fitted else []


def fit_linear_layer(
    model: SentenceTransformer, measured: list[str], fitted: list[str], wanted: list[np.ndarray]
) -> Fit:
    """Put one linear layer, in place, after the pooling: that which brings the embeddings nearest to the wanted ones.

    How much its weights are held small (ridge regression) is chosen by leave-one-out cross-validation.

    Args:
        model: after the cut.
        measured: texts to tell how near they come.
        fitted: texts to fit on.
        wanted: of the large model, from `embeddings_to_fit`.
    """
    end = last_linear(model)
    pooling = max(place for place, module in enumerate(model) if isinstance(module, Pooling))
    before = mean_turn(outputs(model, end, measured), wanted[0])
    states = outputs(model, pooling, fitted).astype(np.float64)
    # In units of the states: how much they vary, over all texts.
    penalties = np.logspace(-7, 1, 17) * states.var(0).mean() * len(states)
    ridge = RidgeCV(penalties).fit(states, wanted[1])
    weight, bias = (torch.from_numpy(each).float() for each in (ridge.coef_, ridge.intercept_))
    layer = Dense(*weight.T.shape, activation_function=nn.Identity(), init_weight=weight, init_bias=bias)
    for place in range(end, pooling, -1):
        del model[place]
    model.insert(pooling + 1, layer.to(model.device))
    return Fit(len(fitted), before, mean_turn(outputs(model, pooling + 1, measured), wanted[0]))


def mean_turn(first: np.ndarray, second: np.ndarray) -> float:
    """1 - cosine of each row of two matrices, on average."""
    return float(1 - pairwise_cos_sim(first, second).mean())


def save_cut(
    model: SentenceTransformer,
    cut: Cut,
    fit: Fit | None,
    settings: EmbeddingCutSettings,
    texts: list[str],
    parameters: int,
) -> str:
    """Write `model/`, `report.md`, `report.json` and `shrink.png`.

    Args:
        fit: of the linear layer; None if it is as it was.
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
        *(["", fit.line()] if fit else []),
    ]
    with atomic_folder(output / "model") as partial:
        model.save_pretrained(str(partial), create_model_card=False)
    plot_lines(output / "shrink.png", [cut.panel()])
    found = {"parameters": {"large": parameters, "small": small}, "cut": asdict(cut), "fit": fit and asdict(fit)}
    write_json(output / "report.json", found)
    write_text(output / "report.md", text := "\n".join(lines) + "\n")
    return text
