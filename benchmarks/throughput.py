"""How fast NeoBERT and other encoders read on a CPU, as in Table 10 and Figure 3 of the paper, and how close they come
to their own matrix products.

    make bench                              # 16 minutes on 2 quiet CPU cores, 6 GB of memory

glibc gives large blocks back to the kernel, which then has to provide each one again, 4 KB at a time. With
MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=-1 and GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment, as in
`make bench`, glibc keeps the blocks and asks for huge pages.

The encoders have their published shapes and random weights (encoders.py). A batch is full (every row has all tokens) or
ragged (lognormal lengths, mean 35% of the longest, at least 8 rows). Only real tokens count. NeoBERT gets a ragged
batch packed into one row; the others get padding and a mask. The models take turns, and the medians over the rounds
count.

A training step is the loss of masked language modelling and its backward pass, without the optimizer. Bare products are
those of every linear layer and of attention, with the same weights and the shapes that the model computes: forward, one
of a linear layer and two of attention; in a training step three and six. A model and its products take turns, too.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from encoders import ENCODERS, build_model, make_batch, ragged_lengths
from matplotlib.figure import Figure
from runner import BLUE, GREY, LIGHT, Settings, medians, new_figure, run_benchmark, table
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel


LENGTHS, LAYOUTS = (128, 512), ("full", "ragged")
# Tokens of a full batch, and the least number of rows of a ragged one.
TOKENS, RAGGED_ROWS = 1024, 8
# Rows and tokens that are compared with bare products; the published depth, and that of every model's training step.
SHAPES, LAYERS, TRAINING_LAYERS = ((8, 128), (4, 512)), 28, 4
# Measured turns of each model.
ROUNDS = 5


def read(model: PreTrainedModel, inputs: dict) -> None:
    with torch.inference_mode():
        model(**inputs)


def measure_speeds() -> dict:
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


def bare_products(
    model: PreTrainedModel, step: Callable[[], None], batch: int, length: int, training: bool
) -> Callable[[], None]:
    """A function that computes the matrix products of a step and nothing else."""
    config, linear = model.config, []

    def note(layer: nn.Linear, inputs: tuple[torch.Tensor]) -> None:
        weight = layer.weight.detach()
        rows = inputs[0].numel() // weight.shape[1]
        linear.append((torch.randn(rows, weight.shape[1]), weight, torch.randn(rows, weight.shape[0])))

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    step()
    for hook in hooks:
        hook.remove()
    heads = config.num_attention_heads
    q, k, v, out = torch.randn(4, batch, heads, length, config.hidden_size // heads).unbind(0)

    @torch.no_grad()
    def products() -> None:
        for inputs, weight, gradient in linear:
            F.linear(inputs, weight)
            if training:
                gradient @ weight
                gradient.t() @ inputs
        for _ in range(config.num_hidden_layers):
            scores = q @ k.transpose(-1, -2)
            scores @ v
            if training:
                scores.transpose(-1, -2) @ out
                of_scores = out @ v.transpose(-1, -2)
                of_scores @ k
                of_scores.transpose(-1, -2) @ q

    return products


def compare_with_products(name: str, batch: int, length: int, training: bool) -> dict:
    """Seconds of a step and of its bare products."""
    layers = TRAINING_LAYERS if training else LAYERS
    model = build_model(name, num_hidden_layers=layers).train(training)
    inputs, labels = make_batch(model.config, torch.full((batch,), length))

    def train() -> None:
        model.zero_grad()
        model(**inputs, labels=labels).loss.backward()

    step = train if training else partial(read, model.base_model, inputs)
    found = medians({"step": step, "products": bare_products(model, step, batch, length, training)}, ROUNDS)
    row = {"what": "training step" if training else "forward pass", "model": name, "layers": layers}
    row |= {"batch": f"{batch} x {length}"} | found
    print(row, flush=True)
    return row


def measure(settings: Settings) -> dict:
    speeds = measure_speeds()
    steps = [compare_with_products("NeoBERT", *shape, training=False) for shape in SHAPES]
    for shape, name in product(SHAPES, ("NeoBERT", "BERT-base", "ModernBERT-base")):
        steps.append(compare_with_products(name, *shape, training=True))
    return speeds | {"steps": steps}


def speed_table(found: dict) -> str:
    """Real tokens a second, a line each model and a column each kind of batch."""
    speeds = {(row["model"], row["layout"], row["length"]): row["tokens"] for row in found["rows"]}
    columns = list(product(LAYOUTS, LENGTHS))
    lines = []
    for name, count in found["parameters"].items():
        lines.append([name, f"{count / 1e6:.0f}M", *(f"{speeds[(name, *column)]:,.0f}" for column in columns)])
    titles = {"full": "all of {} tokens", "ragged": "mixed, up to {}"}
    return table(["", "parameters", *(titles[layout].format(length) for layout, length in columns)], lines)


def step_table(steps: list[dict]) -> str:
    rows = []
    for row in steps:
        times = [f"{value:.2f}" for value in (row["step"], row["products"], row["products"] / row["step"])]
        rows.append([row["what"], row["model"], row["layers"], row["batch"], *times])
    return table(["", "", "layers", "rows x tokens", "seconds", "bare products", "share"], rows)


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
        "# With texts of mixed lengths NeoBERT is as fast as encoders of half its size, or faster",
        "![Real tokens a second of each encoder](throughput.png)",
        "The forward pass of published shapes with random weights. A cell is the real tokens a second, the median of "
        f"{ROUNDS} rounds. Rows of mixed lengths have 35% of the tokens of the longest on average. NeoBERT computes no "
        "padding, the others do. The top of `benchmarks/throughput.py` says how it is measured.",
        speed_table(found),
        "## Most of NeoBERT's time goes into its matrix products",
        "The same shapes in float32: the encoder's forward pass, and the forward and backward pass of masked language "
        "modelling without the optimizer. `share` is the time of the bare matrix products over that of the model.",
        step_table(found["steps"]),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("throughput", measure, page, plot, args=args)


if __name__ == "__main__":
    main()
