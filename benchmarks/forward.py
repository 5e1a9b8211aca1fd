"""How close a forward pass and a training step on a CPU come to their own matrix products, for NeoBERT and others.

    make bench                              # half an hour on 2 CPU cores

glibc gives large blocks back to the kernel, which then has to provide each one again, 4 KB at a time. With
MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=-1 and GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment, as in
`make bench`, glibc keeps the blocks and asks for huge pages.

A training step is the loss of masked language modelling and its backward pass, without the optimizer. Bare products are
those of every linear layer and of attention, with the same weights and the shapes that the model computes: forward, one
of a linear layer and two of attention; in a training step three and six. All take turns in one process, and medians are
compared, because machines are noisy. Of several processes the one with the median share counts.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from encoders import Bench, build_config, make_batch
from runner import Settings, medians, run_benchmark, table
from torch import nn
from torch.nn import functional as F


SHAPES = ((8, 128), (4, 512))


@dataclass(kw_only=True)
class ForwardSettings(Settings):
    repeats: int = field(default=7, metadata={"help": "measured rounds; the median of them counts"})
    processes: int = field(default=3, metadata={"help": "an odd number; the one in the middle counts"})
    layers: int = field(default=28, metadata={"help": "of NeoBERT's forward pass; 28 is the published model"})
    training_layers: int = field(default=4, metadata={"help": "of every model's training step"})
    models: list[str] = field(
        default_factory=lambda: ["NeoBERT", "BERT-base", "ModernBERT-base"],
        metadata={"help": "whose training steps are measured, of encoders.py"},
    )


def linear_products(model: nn.Module, step: Callable[[], None]) -> list[tuple[torch.Tensor, int]]:
    """The weight of every linear layer that a step uses, and the rows that it is used for."""
    used, hooks = [], []

    def note(layer: nn.Linear, inputs: tuple[torch.Tensor]) -> None:
        used.append((layer.weight.detach(), inputs[0].numel() // inputs[0].shape[-1]))

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            hooks.append(layer.register_forward_pre_hook(note))
    step()
    for hook in hooks:
        hook.remove()
    return used


def bare_products(bench: Bench, step: Callable[[], None], batch: int, length: int) -> Callable[[], None]:
    """A function that computes the matrix products of a step and nothing else."""
    config, training = bench.model.config, bench.training
    linear = []
    for weight, rows in linear_products(bench.model, step):
        linear.append((torch.randn(rows, weight.shape[1]), weight, torch.randn(rows, weight.shape[0])))
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


def gradients(bench: Bench, inputs: dict, labels: torch.Tensor) -> None:
    bench.model.zero_grad()
    bench.model(**inputs, labels=labels).loss.backward()


def measure_models(names: list[str], layers: int, training: bool, repeats: int) -> list[dict]:
    rows, candidates = [], {}
    for batch, length in SHAPES:
        for name in names:
            bench = Bench(build_config(name, num_hidden_layers=layers), "sdpa", torch.float32, training)
            inputs, labels = make_batch(bench.model.config, torch.full((batch,), length))
            step = partial(gradients, bench, inputs, labels) if training else partial(bench.step, inputs, labels)
            candidates |= {name: step, f"{name}, products": bare_products(bench, step, batch, length)}
        found = medians(candidates, repeats)
        what = "training step" if training else "forward pass"
        for name in names:
            row = {"what": what, "model": name, "layers": layers, "batch": f"{batch} x {length}"}
            row |= {"step": found[name], "products": found[f"{name}, products"]}
            rows.append(row | {"share": row["products"] / row["step"]})
    return rows


def measure(settings: ForwardSettings) -> list[dict]:
    """Of every row, that of the process with the median share: the place of a process's memory changes its times."""
    middle = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as executor:
        for job in (["NeoBERT"], settings.layers, False), (settings.models, settings.training_layers, True):
            runs = [executor.submit(measure_models, *job, settings.repeats).result() for _ in range(settings.processes)]
            for rows in zip(*runs):
                row = sorted(rows, key=lambda row: row["share"])[len(rows) // 2]
                middle.append(row | {"by_process": sorted(row["share"] for row in rows)})
    return middle


def page(stored: dict, folder: Path) -> list[str]:
    rows = []
    for row in stored["found"]:
        cells = [row["what"], row["model"], row["layers"], row["batch"], f"{row['step']:.2f}", f"{row['products']:.2f}"]
        shares = ", ".join(f"{share:.3f}" for share in row["by_process"])
        rows.append([*cells, f"{row['share']:.2f}", shares])
    head = ["", "", "layers", "rows x tokens", "seconds", "bare products", "share", "of each process"]
    return [
        "# NeoBERT takes little more time than its matrix products",
        "The published shapes with random weights in float32: the encoder's forward pass, and the forward and backward "
        "pass of masked language modelling without the optimizer. `share` is the time of the bare matrix products over "
        "that of the model; times are medians of runs that take turns. Each row is that of the process with the median "
        "share, so rows may come from different processes.",
        table(head, rows),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("forward", ForwardSettings, measure, page, args=args)


if __name__ == "__main__":
    main()
