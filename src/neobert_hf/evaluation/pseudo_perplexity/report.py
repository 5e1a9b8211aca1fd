"""Pseudo-perplexity against length: curves, table and plot."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from neobert_hf.common.atomic_writes import write_png
from neobert_hf.evaluation.pseudo_perplexity.scoring import MaskableText, mean_interval


def score_texts(texts: list[MaskableText], losses: list[float]) -> list[dict]:
    """Of each text mean loss and pseudo-perplexity, with a 95% interval for what was not scored."""
    rows, rest = [], iter(losses)
    for text in texts:
        interval = mean_interval(np.array(list(islice(rest, len(text.positions)))), text.maskable)
        sizes = {"tokens": len(text.ids), "positions": len(text.positions), "maskable": text.maskable}
        rows.append({"document": text.document} | sizes | {"mean_loss": interval[0]} | _exponentials(interval))
    return rows


def _exponentials(interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("pseudo_perplexity", "low", "high"), np.exp(interval).tolist()))


def curve_name(row: dict) -> str:
    return row["model"] if row["rope"] == "native" else f"{row['model']}, {row['rope']}"


def curves(scores: list[dict]) -> dict[str, dict[int, dict]]:
    """Of each model and RoPE setting, a point for each length.

    The length is what documents were cut to, or else the power of two that holds them. A point is the geometric mean of
    the documents' pseudo-perplexities, exp of the mean of their losses (an arithmetic one would be that of the few
    worst), with a 95% interval over documents.

    Args:
        scores: rows of `scores.parquet`.
    """
    losses: dict[str, dict[int, list[float]]] = {}
    for row in scores:
        length = row["cut"] or 2 ** math.ceil(math.log2(row["tokens"]))
        losses.setdefault(curve_name(row), {}).setdefault(length, []).append(row["mean_loss"])
    return {
        name: {
            length: {"documents": len(values)} | _exponentials(mean_interval(np.array(values)))
            for length, values in sorted(by_length.items())
        }
        for name, by_length in losses.items()
    }


def table(points: dict[str, dict[int, dict]]) -> str:
    """Markdown, a row for each curve and a column for each length."""
    lengths = sorted({length for curve in points.values() for length in curve})
    lines = [f"| tokens | {' | '.join(f'{length:,}' for length in lengths)} |", "| --- |" + " --- |" * len(lengths)]
    for name, curve in points.items():
        cells = [f"{curve[length]['pseudo_perplexity']:,.1f}" if length in curve else "-" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    counts: dict[tuple[int, ...], list[str]] = {}
    for name, curve in points.items():
        counts.setdefault(tuple(curve[length]["documents"] if length in curve else 0 for length in lengths), []).append(
            name
        )
    for documents, names in counts.items():
        label = "documents" if len(counts) == 1 else f"documents of {'; '.join(names)}"
        lines.append(f"| {label} | {' | '.join(f'{count:,}' for count in documents)} |")
    return "\n".join(lines) + "\n"


def plot(points: dict[str, dict[int, dict]], file: Path) -> None:
    """As Figure 2, a line for each curve."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in points.items():
        axes.plot(list(curve), [point["pseudo_perplexity"] for point in curve.values()], "o-", markersize=4, label=name)
    lengths = sorted({length for curve in points.values() for length in curve})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set(xlabel="length (tokens)", ylabel="pseudo-perplexity", title="Geometric mean over documents")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    write_png(file, figure)
