"""What all benchmarks share: one way to run, stored runs, the machine, intervals, turns, tables and pictures.

A benchmark has a function that measures, one that makes a page of what was measured, and mostly one for its picture.
`run_benchmark` writes NAME.json, which holds every number and how it was made, and from it NAME.md and NAME.png. With
`--page_only true` nothing is measured: the page and its picture are made again from NAME.json.
"""

import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats

from neobert_hf.common.files import write_json, write_png, write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import parse_config


# In the processes of recipes, threads that wait must not spin, since they would keep a core from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if TYPE_CHECKING:  # A GPU's container image may lack matplotlib.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
# One colour is one thing, in all pictures. Blue is always ours.
BLUE, ORANGE, GREEN, GREY, LIGHT = "#1f5fa8", "#c75b12", "#3a8a4d", "#6b6b6b", "#c9c9c9"


@dataclass(kw_only=True)
class Settings:
    """The settings that every benchmark has; some add their own."""

    results: str = field(
        default=str(ROOT / "benchmarks/results"), metadata={"help": "folder of the page", "path": True}
    )
    page_only: bool = field(
        default=False, metadata={"help": "measure nothing; make the page and picture again from the stored numbers"}
    )


def run_benchmark(
    name: str,
    measure: Callable[[Any], Any],
    page: Callable[[Any], list[str]],
    plot: "Callable[[Any], Figure] | None" = None,
    packages: Sequence[str] = (),
    kind: type[Settings] = Settings,
    args: list[str] | None = None,
) -> None:
    """Measure, store the numbers, and make the page.

    Args:
        name: of the script and its files of results.
        measure: takes the settings and returns what it found, as JSON can hold it.
        page: takes what was found and returns the paragraphs of the page. How it was made is added at the end.
        plot: takes what was found and returns the page's picture, if it has one.
        packages: packages whose versions matter, besides torch and Transformers.
        kind: of the settings.
        args: the command line without the program's name; `sys.argv[1:]` if None.
    """
    args = sys.argv[1:] if args is None else args
    (settings,) = parse_config(kind, args=args)
    folder = Path(settings.results)
    folder.mkdir(parents=True, exist_ok=True)
    if not settings.page_only:
        found = measure(settings)
        allocator = [f"{option}={os.environ[option]}" for option in ALLOCATOR if option in os.environ]
        made = {
            "date": str(date.today()),
            "machine": machine(),
            "versions": {package: version(package) for package in ("torch", "transformers", *packages)},
            "command": shlex.join([*allocator, "python", f"benchmarks/{name}.py", *args]),
        }
        write_json(folder / f"{name}.json", {"made": made, "found": found})
    stored = json.loads((folder / f"{name}.json").read_text())
    if plot:
        write_png(folder / f"{name}.png", plot(stored["found"]))
    write_text(folder / f"{name}.md", "\n\n".join([*page(stored["found"]), how_made(stored["made"])]) + "\n")


def how_made(made: dict) -> str:
    """The end of every page: when, where and how its numbers were made. Some have a `note` on what differs today."""
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    return f"Measured: {made['date']}, {made['machine']}; {versions}. {made.get('note', '')}".strip() + (
        f"\n\n```bash\n{made['command']}\n```"
    )


def processor() -> str:
    """The name of the CPU, as Linux reports it but for its trade marks: "Intel Xeon", "AMD EPYC"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return model[0].replace("(R)", "").removesuffix(" Processor") if model else platform.processor()


def machine() -> str:
    """The GPU; or the CPU and the threads that are used."""
    cuda = torch.cuda.is_available()
    return torch.cuda.get_device_name() if cuda else f"{processor()}, {torch.get_num_threads()} threads"


class StoredRuns:
    """The results of single runs, in a JSON file that is committed beside the page.

    A benchmark with many trainings takes longer than one machine is available. So each result is stored at once, under
    a name that holds everything it depends on: weights, data, flags, seed. A stored run is not repeated, on this
    machine or another one.

    Args:
        file: written after each run.
    """

    def __init__(self, file: Path):
        self.file, self.used = file, set()
        self.runs = json.loads(file.read_text()) if file.exists() else {}

    def result(self, name: str, run: Callable[[], Any]) -> Any:
        """The stored result of the run with this name (JSON values); if there is none, `run` makes it."""
        if name not in self.runs:
            self.runs[name] = {"found": run(), "date": str(date.today()), "processor": processor()}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, self.runs)
        self.used.add(name)
        # As read from a file, even if it was just made.
        return json.loads(json.dumps(self.runs[name]["found"]))

    def places(self) -> str:
        """When and where the runs that this process has used were made."""
        places = sorted({(self.runs[name]["date"], self.runs[name]["processor"]) for name in self.used})
        return ", ".join(f"{day} ({place})" for day, place in places)


def run_apart(recipe: Callable[..., Any], log: Path, threads: int = 2, **settings: Any) -> None:
    """Call a recipe in a process of its own, whose output goes to `log`; RuntimeError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=_call, args=(recipe, log, threads, settings))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{recipe.__name__} ended with {process.exitcode}; see {log}")


def _call(recipe: Callable[..., Any], log: Path, threads: int, settings: dict[str, Any]) -> None:
    with open(log, "a", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(threads)
    recipe(**settings)


def medians(candidates: dict[str, Callable[[], Any]], repeats: int, pause: float = 0.0) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a slow moment hits all alike, `pause` seconds apart."""
    times = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, function in candidates.items():
            time.sleep(pause)
            start = time.perf_counter()
            function()
            if repeat:  # The first round warms up.
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    return "\n".join(markdown_table(head, rows))


def margin(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of a random sample's mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, and half of its 95% interval."""
    return f"{statistics.fmean(values):.{digits}f} ± {margin(values):.{digits}f}"


def difference(better: Sequence[float], worse: Sequence[float], digits: int) -> str:
    """The mean of the differences, pair by pair, and its 95% interval."""
    pairs = [first - second for first, second in zip(better, worse)]
    mean, half = statistics.fmean(pairs), margin(pairs)
    return f"{mean:+.{digits}f} ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"


def new_figure(message: str, unit: str, size: tuple[float, float] = (7.6, 3.9)) -> "tuple[Figure, Axes]":
    """A figure of `size` inches without a box. Its title is the message; below it is in grey what the numbers are."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import blended_transform_factory

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, color=GREY, labelcolor="#333333")
    # The title begins at the left edge of the figure.
    place = blended_transform_factory(figure.transFigure, axes.transAxes)
    for height, text, look in ((23, message, {"fontweight": "bold"}), (8, unit, {"color": GREY, "fontsize": 9.5})):
        axes.annotate(text, (0.01, 1), (0, height), xycoords=place, textcoords="offset points", **look)
    return figure, axes


def draw_lines(axes: "Axes", lines: dict[str, tuple[Sequence[tuple[float, float]], str]], unit: str = "") -> None:
    """Lines, each labelled at its end in its own colour. Labels that would cover each other move apart.

    Args:
        lines: points (x, y) and colour by label.
        unit: format of the last value, which stands behind the label; empty for none.
    """
    for points, color in lines.values():
        axes.plot(*zip(*points), color=color, marker="o", markersize=3.5, linewidth=1.8)
    low, high = axes.get_ylim()
    right = max(points[-1][0] for points, _ in lines.values())
    heights = {label: points[-1][1] for label, (points, _) in lines.items()}
    at_right = sorted((label for label in lines if lines[label][0][-1][0] == right), key=heights.get)
    for _ in range(100):
        for lower, upper in pairwise(at_right):
            missing = 0.065 * (high - low) - (heights[upper] - heights[lower])
            heights[lower] -= max(missing, 0) / 2
            heights[upper] += max(missing, 0) / 2
    for label, (points, color) in lines.items():
        text = f"{label} {unit.format(points[-1][1])}" if unit else label
        # The end of a shorter line may lie beside a longer one.
        offset = (8, 0) if label in at_right else (2, 12)
        place = (points[-1][0], heights[label])
        axes.annotate(text, place, offset, textcoords="offset points", color=color, va="center", annotation_clip=False)
