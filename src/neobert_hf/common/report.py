"""Tables, plots and intervals of the reports that recipes and benchmarks write."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from neobert_hf.common.files import write_png


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# A plot of more classes would be unreadable.
MOST_CLASSES_SHOWN = 60


def markdown_table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table; cells are written with `str`."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]


def mean_interval(values: Sequence[float], population: int | None = None) -> tuple[float, float, float]:
    """Mean of a random sample, and its 95% confidence interval by Student's t.

    Args:
        values: the sample.
        population: the size of the population, if it is small: the interval is then narrower by a factor of
            sqrt(1 - share), where share is the part of the population that was sampled.

    Returns:
        Mean, lower and upper end. Both ends are NaN if one value was drawn from several, and equal the mean if the
        sample is the whole population.
    """
    from scipy import stats

    mean, count = float(np.mean(values)), len(values)
    if count == population:
        return mean, mean, mean
    if count < 2:
        return mean, math.nan, math.nan
    error = np.std(values, ddof=1) / math.sqrt(count) * math.sqrt(1 - count / population if population else 1)
    margin = float(stats.t.ppf(0.975, count - 1) * error)
    return mean, mean - margin, mean + margin


@dataclass
class Line:
    """One line of a plot.

    Args:
        points: (x, y), in the order in which they are connected.
        label: for the legend; None leaves the line out of it.
        style: what `matplotlib.axes.Axes.plot` takes: `marker`, `color`, `linestyle`, ...
    """

    points: Sequence[tuple[float, float]]
    label: str | None = None
    style: dict[str, Any] = field(default_factory=dict)


@dataclass
class Panel:
    """One panel of a figure.

    Args:
        lines: those without points are left out.
        labels: what `matplotlib.axes.Axes.set` takes: `title`, `xlabel`, `ylabel`, `xscale`, `ylim`, ...
        lengths: sequence lengths to mark on a logarithmic x axis (base 2); None for an ordinary axis.
        legend: what `matplotlib.axes.Axes.legend` takes: `loc`, `fontsize`, ...
    """

    lines: list[Line]
    labels: dict[str, Any]
    lengths: Sequence[int] | None = None
    legend: dict[str, Any] = field(default_factory=dict)

    def draw(self, axes: "Axes") -> None:
        axes.set(**self.labels)
        for line in self.lines:
            if line.points:
                axes.plot(*zip(*line.points), label=line.label, **({"markersize": 3} | line.style))
        if self.lengths is not None:
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.lengths, [f"{length:,}" for length in self.lengths])
        if any(line.points and line.label for line in self.lines):
            axes.legend(**({"fontsize": "small"} | self.legend))


def plot_lines(file: Path, panels: Sequence[Panel], columns: int = 2, size: tuple[float, float] = (5, 3.7)) -> None:
    """Write a PNG with the panels row by row, `columns` to a row, each panel of width and height `size` in inches."""
    # Not imported at the top: tables need no matplotlib, which may be missing from a GPU's container image.
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(size[0] * columns + 1, size[1] * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels):
        panel.draw(axes)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    write_png(file, figure)


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
