"""How fast NeoBERT and other encoders read on a CPU, as in Table 10 and Figure 3 of the paper.

    python benchmarks/throughput.py         # ten minutes on 2 quiet CPU cores, 6 GB of memory

The encoders have their published shapes and random weights (encoders.py). A batch is full (every row has all tokens) or
ragged (lognormal lengths, mean 35% of the longest, at least 8 rows). Only real tokens count. NeoBERT gets a ragged
batch packed into one row; the others get padding and a mask. The models take turns, and the medians over the rounds
count.
"""

from functools import partial
from itertools import product

import torch
from encoders import ENCODERS, build_model, make_batch, ragged_lengths
from matplotlib.figure import Figure
from runner import BLUE, GREY, LIGHT, Settings, medians, new_figure, run_benchmark, table
from transformers import PreTrainedModel


LENGTHS, LAYOUTS = (128, 512), ("full", "ragged")
# Tokens of a full batch, and the least number of rows of a ragged one.
TOKENS, RAGGED_ROWS = 1024, 8
# Measured turns of each model.
ROUNDS = 5


def read(model: PreTrainedModel, inputs: dict) -> None:
    with torch.inference_mode():
        model(**inputs)


def measure(settings: Settings) -> dict:
    """Real tokens a second of each model and kind of batch."""
    models = {name: build_model(name).base_model.eval() for name in ENCODERS}
    rows = []
    for length, layout in product(LENGTHS, LAYOUTS):
        count = TOKENS // length
        lengths = torch.full((count,), length) if layout == "full" else ragged_lengths(max(RAGGED_ROWS, count), length)
        turns = {}
        for name, model in models.items():
            inputs, _ = make_batch(model.config, lengths, packed=layout == "ragged" and name == "NeoBERT")
            turns[name] = partial(read, model, inputs)
        for name, seconds in medians(turns, ROUNDS).items():
            rows.append({"model": name, "length": length, "layout": layout, "tokens": int(lengths.sum()) / seconds})
            print(rows[-1], flush=True)
    parameters = {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}
    return {"parameters": parameters, "rows": rows}


def speed_table(found: dict) -> str:
    """Real tokens a second, a line each model and a column each kind of batch."""
    speeds = {(row["model"], row["layout"], row["length"]): row["tokens"] for row in found["rows"]}
    columns = list(product(LAYOUTS, LENGTHS))
    lines = []
    for name, count in found["parameters"].items():
        lines.append([name, f"{count / 1e6:.0f}M", *(f"{speeds[(name, *column)]:,.0f}" for column in columns)])
    titles = {"full": "all of {} tokens", "ragged": "mixed, up to {}"}
    return table(["", "parameters", *(titles[layout].format(length) for layout, length in columns)], lines)


def plot(found: dict) -> Figure:
    """Speed with full and with ragged batches of the longest texts, a line each model."""
    length = max(LENGTHS)
    speeds = {(row["model"], row["layout"]): row["tokens"] for row in found["rows"] if row["length"] == length}
    names = sorted(found["parameters"], key=lambda name: speeds[name, "ragged"])
    title = "Only NeoBERT loses nothing when texts differ in length"
    unit = f"Real tokens a second; forward pass, texts of up to {length} tokens"
    figure, axes = new_figure(title, unit, size=(7.2, 0.42 * len(names) + 1.2))
    for place, name in enumerate(names):
        color = BLUE if name == "NeoBERT" else GREY
        ragged, full = speeds[name, "ragged"], speeds[name, "full"]
        axes.plot([ragged, full], [place, place], color=LIGHT, linewidth=2, zorder=1)
        axes.scatter([full], [place], s=42, facecolor="white", edgecolor=color, zorder=2)
        axes.scatter([ragged], [place], s=42, color=color, zorder=3)
    # The words stand at the points of the two models that are the fastest of their kind.
    for text, layout in (("mixed lengths", "ragged"), (f"all {length} tokens", "full")):
        place = max(range(len(names)), key=lambda place: speeds[names[place], layout])
        point = (speeds[names[place], layout], place)
        axes.annotate(text, point, (0, 9), textcoords="offset points", ha="center")
    axes.set_yticks(range(len(names)), names)
    for tick, name in zip(axes.get_yticklabels(), names):
        tick.set(color=BLUE if name == "NeoBERT" else "#333333", fontweight="bold" if name == "NeoBERT" else "normal")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0)
    axes.set_ylim(-0.6, len(names) - 0.3)
    return figure


def page(found: dict) -> list[str]:
    return [
        "# Texts of mixed lengths are where NeoBERT is the fastest encoder",
        "![Real tokens a second of each encoder](throughput.png)",
        "The forward pass of published shapes with random weights. A cell is the real tokens a second, the median of "
        f"{ROUNDS} rounds. Rows of mixed lengths have 35% of the tokens of the longest on average. NeoBERT computes no "
        "padding, the others do. The top of `benchmarks/throughput.py` says how it is measured.",
        speed_table(found),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("throughput", measure, page, plot, args=args)


if __name__ == "__main__":
    main()
