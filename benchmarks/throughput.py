"""How fast NeoBERT and other encoders are on this machine, as in Table 10 and Figure 3 of the paper.

    python benchmarks/throughput.py         # 25 minutes on 2 CPU cores, with the environment of `make bench`

Nine encoders with their published shapes and random weights (encoders.py) are measured: the forward pass of the encoder
without a head (on a GPU in bfloat16), and a training step of masked language modelling of 20% of the tokens with AdamW
(on a GPU in bfloat16 autocast). NeoBERT and ModernBERT run the decoder on the labelled tokens only, which their
configurations allow; dropout is as published. Batches are full (every row has all tokens) or ragged (lognormal, mean
35% of the longest, at least 8 rows). Only real tokens count. NeoBERT gets a ragged batch packed into one row; the
others get padding and a mask. BERT and RoBERTa have positions for 512 tokens, so longer texts are left out.

Models take turns, once in each round, and medians over the rounds count. The share of the machine's speed is the rate
of the operations that the task needs (`encoders.forward_flops`, three times as many for training), divided by that of
plain matrix products of the same type, which are measured before every turn. Finished measurements are kept in
`output_dir`, so that an interrupted command goes on.
"""

import itertools
import statistics
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from encoders import CUDA, DEVICE, ENCODERS, Bench, build_config, count_parameters, product_flops, ragged_lengths
from runner import BLUE, GREY, LIGHT, Settings, StoredRuns, machine, new_figure, run_benchmark, set_title, table

from neobert_hf.common.files import write_png


DTYPE = torch.bfloat16 if CUDA else torch.float32
RAGGED_ROWS, MODES = 8, ("forward", "training")


@dataclass(kw_only=True)
class ThroughputSettings(Settings):
    models: list[str] = field(default_factory=lambda: list(ENCODERS), metadata={"help": ", ".join(ENCODERS)})
    lengths: list[int] = field(default_factory=lambda: [128, 512], metadata={"help": "of the forward pass"})
    training_lengths: list[int] = field(default_factory=lambda: [128], metadata={"help": "of the training step"})
    tokens: int = field(default=32_768 if CUDA else 1024, metadata={"help": "of a batch, with its padding"})
    rounds: int = field(default=3, metadata={"help": "turns of each model"})
    seconds: float = field(default=0.5 if CUDA else 0.0, metadata={"help": "least time of a measurement"})
    layers: int | None = field(default=None, metadata={"help": "fewer layers than published, for a trial"})
    output_dir: str = field(default="runs/throughput", metadata={"help": "finished measurements"})


def measure_turn(settings: ThroughputSettings, name: str, mode: str, runs: StoredRuns, number: int) -> list[dict]:
    """All batches of one model, which is loaded if any of them has not been measured."""
    lengths = settings.lengths if mode == "forward" else settings.training_lengths
    lengths = [length for length in lengths if length <= ENCODERS[name].longest]
    changes = {"num_hidden_layers": settings.layers} if settings.layers else {}

    @cache
    def load() -> tuple[float, Bench]:
        ceiling, _ = product_flops(torch.device(DEVICE), DTYPE)
        return ceiling, Bench(build_config(name, **changes), "sdpa", DTYPE, mode == "training")

    def measure_batch(length: int, layout: str) -> dict:
        ceiling, bench = load()
        count = max(1, settings.tokens // length)
        of_rows = torch.full((count,), length) if layout == "full" else ragged_lengths(max(RAGGED_ROWS, count), length)
        packed = layout == "ragged" and name == "NeoBERT"
        return {**bench.measure(of_rows, packed, settings.seconds), "ceiling": ceiling}

    rows = []
    for length, layout in itertools.product(lengths, ("full", "ragged")):
        key = f"{name}; {mode}; {length}; {layout}; round {number}; {settings.tokens} tokens; {changes}; {machine()}"
        found = runs.result(key, partial(measure_batch, length, layout))
        rows.append({"model": name, "mode": mode, "length": length, "layout": layout, **found})
    return rows


def measure(settings: ThroughputSettings) -> dict:
    runs = StoredRuns(Path(settings.output_dir) / f"{DEVICE}.json")
    rounds: dict[tuple, list[dict]] = {}
    for number, name, mode in itertools.product(range(settings.rounds), settings.models, MODES):
        for row in measure_turn(settings, name, mode, runs, number):
            rounds.setdefault(tuple(row[key] for key in ("model", "mode", "length", "layout")), []).append(row)
        print(number + 1, name, mode, flush=True)
    ceiling = statistics.median(row["ceiling"] for found in rounds.values() for row in found)
    rows = []
    for found in rounds.values():
        speeds, flops = ([row[key] for row in found] for key in ("tokens", "flops"))
        row = {key: found[0][key] for key in ("model", "mode", "length", "layout", "memory")}
        row |= {"tokens": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
        rows.append(row | {"share": statistics.median(flops) / ceiling})
    parameters = {name: count_parameters(build_config(name)) for name in settings.models}
    return {"ceiling": ceiling, "parameters": parameters, "rows": rows}


def speed_table(found: dict, layout: str) -> str:
    """Real tokens a second and share of the machine's speed, a line each model."""
    cells = {(row["model"], row["mode"], row["length"]): row for row in found["rows"] if row["layout"] == layout}
    columns = sorted({key[1:] for key in cells})
    lines = []
    for name, count in found["parameters"].items():
        rows = [cells.get((name, *column)) for column in columns]
        texts = [f"{row['tokens']:,.0f} ({row['share']:.0%})" if row else "-" for row in rows]
        lines.append([name, f"{count / 1e6:.0f}M", *texts])
    return table(["", "parameters", *(f"{mode}, {length:,} tokens" for mode, length in columns)], lines)


def plot(found: dict, file: Path) -> None:
    """Speed with full and with ragged batches of the longest texts, a line each model."""
    length = max(row["length"] for row in found["rows"] if row["mode"] == "forward")
    speeds = {
        (row["model"], row["layout"]): row["tokens"]
        for row in found["rows"]
        if (row["mode"], row["length"]) == ("forward", length)
    }
    names = sorted({name for name, _ in speeds}, key=lambda name: speeds[name, "ragged"])
    figure, (axes,) = new_figure(size=(7.2, 0.42 * len(names) + 1.2))
    for place, name in enumerate(names):
        color = BLUE if name == "NeoBERT" else GREY
        ragged, full = speeds[name, "ragged"], speeds[name, "full"]
        axes.plot([ragged, full], [place, place], color=LIGHT, linewidth=2, zorder=1)
        axes.scatter([full], [place], s=42, facecolor="white", edgecolor=color, zorder=2)
        axes.scatter([ragged], [place], s=42, color=color, zorder=3)
    top = len(names) - 1
    axes.annotate("mixed lengths", (speeds[names[top], "ragged"], top), (0, 9), textcoords="offset points", ha="center")
    widest = max(range(len(names)), key=lambda place: speeds[names[place], "full"])
    full = speeds[names[widest], "full"]
    axes.annotate(f"all {length} tokens", (full, widest), (0, 9), textcoords="offset points", ha="center")
    axes.set_yticks(range(len(names)), names)
    for tick, name in zip(axes.get_yticklabels(), names):
        tick.set(color=BLUE if name == "NeoBERT" else "#333333", fontweight="bold" if name == "NeoBERT" else "normal")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0)
    axes.set_ylim(-0.6, top + 0.7)
    unit = f"Real tokens a second; forward pass, texts of up to {length} tokens"
    set_title(axes, "Only NeoBERT loses nothing when texts differ in length", unit)
    write_png(file, figure)


def page(stored: dict, folder: Path) -> list[str]:
    found = stored["found"]
    plot(found, folder / "throughput.png")
    return [
        "# Texts of mixed lengths are where NeoBERT is the fastest encoder",
        "![Real tokens a second of nine encoders](throughput.png)",
        "Published shapes with random weights. A cell is the real tokens a second, the median of the rounds, and in "
        "brackets the operations that the task needs as a share of the machine's plain matrix products "
        f"({found['ceiling'] / 1e9:,.0f} GFLOP/s). The top of `benchmarks/throughput.py` says how it is measured.",
        "## Full batches",
        speed_table(found, "full"),
        "## Ragged batches",
        "Rows have 35% of the tokens of the longest on average. NeoBERT computes no padding, the others do.",
        speed_table(found, "ragged"),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("throughput", ThroughputSettings, measure, page, args=args)


if __name__ == "__main__":
    main()
