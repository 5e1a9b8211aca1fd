"""How close a training step on a CPU comes to its own matrix products, for NeoBERT and other encoders.

    python benchmarks/training_step.py      # 12 minutes on 2 CPU cores, with the environment of `make bench`

A step is the loss of masked language modelling and its backward pass, without the optimizer. Its bare products are
those of every linear layer and of attention, forward and backward, with the shapes that the model computes: a linear
layer has three of the same size, attention two forward and four backward. All take turns in one process, and medians
are compared, because machines are noisy. Processes also differ, by two or three hundredths: three measure, and for each
row the median one counts. Rewrites benchmarks/results/training_step.md.
"""

import argparse
import datetime
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from encoders import build_config, build_model
from forward import in_processes, machine, medians, table
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from neobert_hf.common.files import write_json, write_text


COMPILED = ", compiled"
NAMES = ("NeoBERT", "BERT-base", "ModernBERT-base")


def linear_products(model: PreTrainedModel, step: Callable[[], None]) -> list[tuple[torch.Tensor, int]]:
    """The weight of every linear layer that a step uses, and the rows that it is used for."""
    used, hooks = [], []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):

            def note(layer: nn.Linear, inputs: tuple[torch.Tensor]) -> None:
                used.append((layer.weight.detach(), inputs[0].numel() // inputs[0].shape[-1]))

            hooks.append(layer.register_forward_pre_hook(note))
    step()
    for hook in hooks:
        hook.remove()
    return used


def bare_products(model: PreTrainedModel, step: Callable[[], None], batch: int, length: int) -> Callable[[], None]:
    """Functions that compute the matrix products of a step and nothing else."""
    config = model.config
    linear = []
    for weight, rows in linear_products(model, step):
        linear.append((torch.randn(rows, weight.shape[1]), weight, torch.randn(rows, weight.shape[0])))
    heads = config.num_attention_heads
    q, k, v, out = torch.randn(4, batch, heads, length, config.hidden_size // heads).unbind(0)

    def products() -> None:
        for inputs, weight, gradient in linear:
            F.linear(inputs, weight)
            gradient @ weight
            gradient.t() @ inputs
        for _ in range(config.num_hidden_layers):
            scores = q @ k.transpose(-1, -2)
            scores @ v
            scores.transpose(-1, -2) @ out
            of_scores = out @ v.transpose(-1, -2)
            of_scores @ k
            of_scores.transpose(-1, -2) @ q

    return products


def training_step(model: PreTrainedModel, batch: int, length: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 30_000, (batch, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.2, -100)

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()

    return step


def measure_all(names: list[str], layers: int, shapes: list[tuple[int, int]], repeats: int) -> list[dict]:
    return [row for shape in shapes for row in measure(names, layers, *shape, repeats)]


def measure(names: list[str], layers: int, batch: int, length: int, repeats: int) -> list[dict]:
    candidates = {}
    for name in names:
        config = build_config(name.removesuffix(COMPILED), num_hidden_layers=layers)
        model = build_model(config, "sdpa", "cpu", torch.float32).train()
        step = training_step(model, batch, length)
        candidates |= {name: step, f"{name}, products": bare_products(model, step, batch, length)}
        if name.endswith(COMPILED):
            # After the products, which are counted by hooks on the layers inside blocks.
            model.compile(dynamic=True)
    seconds = medians(candidates, repeats)
    return [
        {
            "batch": f"{batch} x {length}",
            "model": name,
            "step_s": seconds[name],
            "products_s": seconds[f"{name}, products"],
            "share_of_products": seconds[f"{name}, products"] / seconds[name],
        }
        for name in names
    ]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=3, help="for each row the median one counts")
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds; the median of them counts")
    parser.add_argument("--layers", type=int, default=4, help="of each model")
    parser.add_argument(
        "--models", nargs="+", default=NAMES, help=f"with '{COMPILED}' behind it, its blocks are compiled"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens; of 128 8 rows, of 512 4")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the tables")
    settings = parser.parse_args(args)

    shapes = [(8 if length <= 128 else 4, length) for length in settings.lengths]
    measured = (measure_all, settings.models, settings.layers, shapes, settings.repeats)
    rows = in_processes(settings.processes, "share_of_products", *measured)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    flags = f"--processes {settings.processes} --repeats {settings.repeats} --layers {settings.layers}"
    if tuple(settings.models) != NAMES:
        flags += f" --models {shlex.join(settings.models)}"
    command = f"python benchmarks/training_step.py {flags}"
    setting = f"{machine()}, float32, {settings.layers} layers, {versions}, {datetime.date.today()}, `{command}`"
    how = "Each row comes from the process with the median share, so rows may come from different processes."
    text = f"# A training step and its bare products\n\n{setting}\n\n{how}\n\n{table(rows)}\n"
    print(text)
    settings.output.mkdir(parents=True, exist_ok=True)
    write_text(settings.output / "training_step.md", text)
    write_json(settings.output / "training_step.json", {"setting": setting, "rows": rows})


if __name__ == "__main__":
    main()
