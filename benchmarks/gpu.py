"""How fast NeoBERT's published shape (222M parameters) is on this machine's GPU, as a Markdown table.

    python benchmarks/gpu.py        # make gpu

Measured are the forward pass of the encoder and a training step: masked language modelling of 20% of the tokens,
backward pass and AdamW. Both run on three batches of the same number of rows:

- dense: every row has all tokens;
- padded: rows have 35% of the tokens on average, the rest is padding under a mask;
- packed: the same texts one after the other in a single row, without padding.

Only real tokens count. The last column is the rate of the model's matrix products in operations per second, divided by
that of one large matrix product of the same type, which is measured first. Weights are random. Without a GPU the script
runs on the CPU, which takes long at the published size: choose fewer `--layers` and `--tokens`.
"""

import argparse
import itertools
import os
import platform
import shlex
import sys
from datetime import date
from pathlib import Path

import torch
import transformers
from encoders import CUDA, DEVICE, Bench, build_config, product_flops, ragged_lengths
from transformers.utils import is_flash_attn_2_available

from neobert_hf.common.files import write_text
from neobert_hf.common.report import markdown_table


HEAD = ["", "type", "attention", "tokens a row", "batch", "tokens/s", "peak GiB", "TFLOP/s", "of a bare product"]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = ("dense", "padded", "packed")


def measure(
    settings: argparse.Namespace, training: bool, dtype: torch.dtype, attention: str, length: int, layout: str
) -> dict[str, float | None]:
    """Real tokens and operations per second, and the memory at its peak, of one batch."""
    bench = Bench(build_config("NeoBERT", **settings.shape), attention, dtype, training)
    rows = max(1, settings.tokens // length)
    lengths = torch.full((rows,), length) if layout == "dense" else ragged_lengths(rows, length)
    return bench.measure(lengths, layout == "packed", settings.seconds)


def table_rows(settings: argparse.Namespace) -> list[list[str]]:
    attentions = ["sdpa", *(["flash_attention_2"] if CUDA and is_flash_attn_2_available() else [])]
    bare = {name: product_flops(torch.device(DEVICE), TYPES[name])[0] for name in settings.types}
    rows = [["bare product", name, *[""] * 5, f"{bare[name] / 1e12:.1f}", "1"] for name in settings.types]
    for training in (False, True):
        for name, attention in itertools.product(settings.types, attentions):
            # FlashAttention computes in half precision only, and training in float16 would need a scale of the loss.
            if (name == "float32" and attention != "sdpa") or (training and name == "float16"):
                continue
            for length in settings.lengths:
                for layout in LAYOUTS:
                    row = ["training step" if training else "forward pass", name, attention, f"{length:,}", layout]
                    try:
                        found = measure(settings, training, TYPES[name], attention, length, layout)
                    except (RuntimeError, ValueError) as error:  # Memory that ends, or a kernel that is not there.
                        rows.append([*row, str(error).splitlines()[0][:80], "", "", ""])
                        continue
                    memory = "" if found["memory"] is None else f"{found['memory']:.1f}"
                    flops = [f"{found['flops'] / 1e12:.1f}", f"{found['flops'] / bare[name]:.2f}"]
                    rows.append([*row, f"{found['tokens']:,.0f}", memory, *flops])
                    print(*rows[-1], flush=True)
    return rows


def report(settings: argparse.Namespace, rows: list[list[str]]) -> str:
    device = torch.cuda.get_device_name() if CUDA else f"no GPU: {platform.machine()}, {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
    command = shlex.join(["python", "benchmarks/gpu.py", *settings.args])
    lines = ["# Speed on a GPU", "", f"{date.today()}; {device}; {versions}. Command: `{command}`.", ""]
    return "\n".join([*lines, *markdown_table(HEAD, rows)]) + "\n"


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 4096], help="tokens of the longest rows")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a batch, with its padding")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a measurement, in repeated steps")
    parser.add_argument("--layers", type=int, default=28, help="fewer than published, for a trial")
    parser.add_argument("--width", type=int, default=768, help="smaller than published, for a trial")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu.md")
    settings = parser.parse_args(args)
    settings.args = sys.argv[1:] if args is None else args
    settings.shape = {"num_hidden_layers": settings.layers, "hidden_size": settings.width}
    settings.shape |= {"num_attention_heads": settings.width // 64, "intermediate_size": 4 * settings.width}
    torch.manual_seed(0)
    text = report(settings, table_rows(settings))
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(settings.output, text)
    print(text)


if __name__ == "__main__":
    main()
