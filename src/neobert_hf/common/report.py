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


def markdown_table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table; cells are written with `str`."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of a random sample, and the two ends of its 95% confidence interval by Student's t: NaN for one value."""
    from scipy import stats

    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, math.nan, math.nan
    margin = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
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
