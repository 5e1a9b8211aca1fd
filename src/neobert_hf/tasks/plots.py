"""What the reports of the tasks draw."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from neobert_hf.common.files import write_png


# A plot of more classes would be unreadable.
MOST_CLASSES_SHOWN = 60


def plot_confusion(file: Path, counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Write a PNG of a confusion matrix: rows are true classes, columns predicted ones, colors shares of the row.

    Returns:
        Lines of Markdown that show it; none if there are too many classes to draw.
    """
    if len(names) > MOST_CLASSES_SHOWN:
        return []
    from matplotlib.figure import Figure

    size = max(4, 0.28 * len(names) + 2)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="found", ylabel="right")
    # Matplotlib would parse text between two dollar signs as a formula, which most labels are not.
    axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    if len(names) <= 15:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, count, ha="center", va="center", fontsize="small", color=color)
    write_png(file, figure)
    return [f"![confusion matrix]({file.name})", ""]


def means_by_length(lengths: Sequence[float], values: Sequence[float], groups: int = 6) -> list[tuple[float, float]]:
    """Mean length and mean value of groups of about equal size, shortest first; equal lengths share a group."""
    if not len(lengths):
        return []
    lengths, values = np.asarray(lengths, dtype=float), np.asarray(values, dtype=float)
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, groups + 1)[1:-1], method="inverted_cdf"))
    of_group = np.searchsorted(edges, lengths, side="left")
    return [
        (float(lengths[of_group == group].mean()), float(values[of_group == group].mean()))
        for group in np.unique(of_group)
    ]
