"""How close a forward pass and a training step on a CPU come to their own matrix products, for NeoBERT and others.

    make bench                              # six minutes on 2 quiet CPU cores

glibc gives large blocks back to the kernel, which then has to provide each one again, 4 KB at a time. With
MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=-1 and GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment, as in
`make bench`, glibc keeps the blocks and asks for huge pages.

A training step is the loss of masked language modelling and its backward pass, without the optimizer. Bare products are
those of every linear layer and of attention, with the same weights and the shapes that the model computes: forward, one
of a linear layer and two of attention; in a training step three and six. A model and its products take turns, and
medians are compared, because machines are noisy.
"""

from collections.abc import Callable

import torch
from encoders import build_model, make_batch
from runner import Settings, medians, run_benchmark, table
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel


# Rows and tokens, and the number of turns whose median is taken.
SHAPES, ROUNDS = ((8, 128), (4, 512)), 7
# The published depth, and that of every model's training step.
LAYERS, TRAINING_LAYERS = 28, 4


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


def measure_model(name: str, batch: int, length: int, training: bool) -> dict:
    """A row of the table."""
    layers = TRAINING_LAYERS if training else LAYERS
    model = build_model(name, num_hidden_layers=layers).train(training)
    inputs, labels = make_batch(model.config, torch.full((batch,), length))

    def forward() -> None:
        with torch.inference_mode():
            model.base_model(**inputs)

    def train() -> None:
        model.zero_grad()
        model(**inputs, labels=labels).loss.backward()

    step = train if training else forward
    found = medians({"step": step, "products": bare_products(model, step, batch, length, training)}, ROUNDS)
    row = {"what": "training step" if training else "forward pass", "model": name, "layers": layers}
    row |= {"batch": f"{batch} x {length}"} | found | {"share": found["products"] / found["step"]}
    print(row, flush=True)
    return row


def measure(settings: Settings) -> list[dict]:
    rows = [measure_model("NeoBERT", *shape, training=False) for shape in SHAPES]
    for shape in SHAPES:
        rows += [measure_model(name, *shape, training=True) for name in ("NeoBERT", "BERT-base", "ModernBERT-base")]
    return rows


def page(found: list[dict]) -> list[str]:
    rows = []
    for row in found:
        times = [f"{row[key]:.2f}" for key in ("step", "products", "share")]
        rows.append([row["what"], row["model"], row["layers"], row["batch"], *times])
    return [
        "# NeoBERT takes little more time than its matrix products",
        "The published shapes with random weights in float32: the encoder's forward pass, and the forward and backward "
        "pass of masked language modelling without the optimizer. `share` is the time of the bare matrix products over "
        "that of the model; times are medians of runs that take turns.",
        table(["", "", "layers", "rows x tokens", "seconds", "bare products", "share"], rows),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("forward", measure, page, args=args)


if __name__ == "__main__":
    main()
