"""Pseudo-perplexity by length: curves, table and plot."""

import math
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
from datasets import Dataset

from neobert_hf.common.files import atomic_write, write_text
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.evaluation.pseudo_perplexity.recipe import Job


def scores_of(job: Job) -> list[dict]:
    """The mean loss and pseudo-perplexity of each text, with a 95% interval for the positions that were not scored."""
    rows, losses = [], iter(job.losses)
    for text in job.texts:
        interval = mean_interval(list(islice(losses, len(text.positions))), text.maskable)
        row = {"model": job.model, "rope": job.rope, "cut": job.cut, "document": text.document}
        row |= {"tokens": len(text.ids), "positions": len(text.positions), "maskable": text.maskable}
        rows.append(row | {"mean_loss": interval[0]} | _exponentials(interval))
    return rows


def _exponentials(interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("pseudo_perplexity", "low", "high"), np.exp(interval).tolist()))


def curve_name(row: dict) -> str:
    return row["model"] if row["rope"] == "native" else f"{row['model']}, {row['rope']}"


def curves(scores: list[dict]) -> dict[str, dict[int, dict]]:
    """For each model and RoPE setting, a point for each length.

    The length is what documents were cut to, or else the next power of two. A point is the geometric mean of the
    documents' pseudo-perplexities, exp of the mean of their losses, with a 95% interval over documents. (The few worst
    documents would dominate an arithmetic mean.)

    Args:
        scores: rows of `scores.parquet`.
    """
    losses: dict[str, dict[int, list[float]]] = {}
    for row in scores:
        length = row["cut"] or 2 ** math.ceil(math.log2(row["tokens"]))
        losses.setdefault(curve_name(row), {}).setdefault(length, []).append(row["mean_loss"])
    return {
        name: {
            length: {"documents": len(values)} | _exponentials(mean_interval(values))
            for length, values in sorted(by_length.items())
        }
        for name, by_length in losses.items()
    }


def lengths_of(points: dict[str, dict[int, dict]]) -> list[int]:
    return sorted({length for curve in points.values() for length in curve})


def table(points: dict[str, dict[int, dict]]) -> str:
    """Markdown with a row for each curve and a column for each length, and below the number of documents."""
    lengths = lengths_of(points)
    rows, names_of = [], defaultdict(list)
    for name, curve in points.items():
        rows.append(
            [name, *(f"{curve[length]['pseudo_perplexity']:,.1f}" if length in curve else "-" for length in lengths)]
        )
        names_of[tuple(curve[length]["documents"] if length in curve else 0 for length in lengths)].append(name)
    for counts, names in names_of.items():
        label = "documents" if len(names_of) == 1 else f"documents of {'; '.join(names)}"
        rows.append([label, *(f"{count:,}" for count in counts)])
    return "\n".join(markdown_table(["tokens", *(f"{length:,}" for length in lengths)], rows)) + "\n"


def plot(points: dict[str, dict[int, dict]], file: Path) -> None:
    """Plot a line for each curve, as in Figure 2."""
    lines = [
        Line([(length, point["pseudo_perplexity"]) for length, point in curve.items()], name, {"marker": "o"})
        for name, curve in points.items()
    ]
    labels = {"xlabel": "length (tokens)", "ylabel": "pseudo-perplexity", "yscale": "log"}
    plot_lines(file, [Panel(lines, labels, lengths_of(points))], size=(8, 5))


def write_report(output: Path, jobs: list[Job]) -> str:
    """Write `scores.parquet`, `pseudo_perplexity.md` and `pseudo_perplexity.png`; returns the Markdown."""
    scores = [row for job in jobs for row in scores_of(job)]
    with atomic_write(output / "scores.parquet") as partial:
        Dataset.from_list(scores).to_parquet(partial)
    points = curves(scores)
    plot(points, output / "pseudo_perplexity.png")
    text = "Pseudo-perplexity, geometric mean over documents:\n\n" + table(points)
    write_text(output / "pseudo_perplexity.md", text)
    return text
