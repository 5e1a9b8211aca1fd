"""How close the model comes to its own matrix products, on this machine.

    python benchmarks/forward.py            # make bench; 12 minutes on 2 CPU cores

glibc gives large blocks back to the kernel, which then has to provide each one again, 4 KB at a time. With
MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=-1 and GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment, as in
`make bench`, glibc keeps the blocks and asks for huge pages.

Three questions, each answered by a ratio of medians measured interleaved in one run, because machines are noisy:

1. full batches: time of the bare matrix products (every linear layer and both attention products, same shapes, same
   weights) over time of the forward pass. The place of a process's memory changes it by up to 3%, so several
   processes measure, and the one with the median counts;
2. ragged batches: speed-up from stripping the padding instead of computing it, as a share of the ideal
   1 / (share of real tokens);
3. training step: sparse prediction (decoder on the 20% labelled positions) against dense logits.

Writes benchmarks/results/forward_<device>.md and .json; the device is CUDA if available.
"""

import argparse
import datetime
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers
from circumstances import processor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.common.files import write_json, write_text


# `sdpa` strips padding; under another name, the same kernel computes it, too.
AttentionInterface.register("padded_sdpa", sdpa_attention_forward)
AttentionMaskInterface.register("padded_sdpa", sdpa_mask)

ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def medians(candidates: dict, repeats: int, pause: float = 0.0) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a slow moment hits all alike, `pause` seconds apart."""
    times = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, function in candidates.items():
            time.sleep(pause)
            start = time.perf_counter()
            function()
            if CUDA:
                torch.cuda.synchronize()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def bare_products(model: NeoBERTModel, batch: int, length: int) -> dict:
    """Functions that compute the forward pass's matrix products and nothing else."""
    config, tokens = model.config, batch * length
    heads, width = config.num_attention_heads, config.head_dim
    x, g = torch.randn(tokens, config.hidden_size), torch.randn(tokens, model.transformer_encoder[0].ffn.w3.in_features)
    q, k, v = torch.randn(3, batch, heads, length, width).unbind(0)
    x, g, q, k, v = (tensor.to(DEVICE, DTYPE) for tensor in (x, g, q, k, v))

    def linear_layers():
        for block in model.transformer_encoder:
            for layer, inputs in ((block.qkv, x), (block.wo, x), (block.ffn.w12, x), (block.ffn.w3, g)):
                F.linear(inputs, layer.weight)

    def attention_products():
        for _ in model.transformer_encoder:
            (q @ k.transpose(-1, -2)) @ v

    def fused_attention():
        for _ in model.transformer_encoder:
            F.scaled_dot_product_attention(q, k, v)

    return {"linear": linear_layers, "products": attention_products, "fused": fused_attention}


def build(layers: int) -> NeoBERTModel:
    torch.manual_seed(0)
    return NeoBERTModel(NeoBERTConfig(num_hidden_layers=layers)).to(DEVICE, DTYPE).eval()


def in_processes(processes: int, share: str, measure: Callable[..., list[dict]], *arguments) -> list[dict]:
    """For every row of `measure`, the result of the process with the median `share`, with the shares of all."""
    # One new process after the other.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as executor:
        runs = [executor.submit(measure, *arguments).result() for _ in range(processes)]
    return middle_rows(share, runs)


def middle_rows(share: str, runs: list[list[dict]]) -> list[dict]:
    middle = []
    for rows in zip(*runs):
        rows = sorted(rows, key=lambda row: row[share])
        shares = [f"{row[share]:.3f}" for row in rows]
        middle.append(rows[len(rows) // 2] | {"share_by_process": ", ".join(shares)})
    return middle


@torch.inference_mode()
def full_batches(layers: int, shapes, repeats: int) -> list[dict]:
    model, rows = build(layers), []
    for batch, length in shapes:
        ids = torch.randint(5, model.config.vocab_size, (batch, length), device=DEVICE)
        parts = bare_products(model, batch, length)
        seconds = medians({"model": lambda ids=ids: model(ids), **parts}, repeats)
        bound = seconds["linear"] + seconds["products"]
        # If the fused kernel beats the plain products (it skips the score matrix), the fair bound is the lower one.
        strict = seconds["linear"] + min(seconds["products"], seconds["fused"])
        rows.append(
            {
                "batch": f"{batch} x {length}",
                "forward_s": seconds["model"],
                "products_s": bound,
                "share_of_bound": bound / seconds["model"],
                "share_of_strict_bound": strict / seconds["model"],
                "tokens_per_s": batch * length / seconds["model"],
            }
        )
    return rows


def ragged_lengths(batch: int, longest: int) -> torch.Tensor:
    """Lognormal lengths with a mean of about 35% of the longest; one row has the longest length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(batch).log_normal_(0.0, 0.6, generator=generator)
    lengths = (lengths / lengths.mean() * 0.35 * longest).round().clamp(3, longest).long()
    lengths[0] = longest
    return lengths


@torch.inference_mode()
def ragged_batches(model: NeoBERTModel, shapes, repeats: int) -> list[dict]:
    rows = []
    for batch, longest in shapes:
        lengths = ragged_lengths(batch, longest)
        mask = (torch.arange(longest) < lengths[:, None]).long().to(DEVICE)
        ids = torch.randint(5, model.config.vocab_size, (batch, longest), device=DEVICE)

        def run(implementation, ids=ids, mask=mask):
            model.config._attn_implementation = implementation
            model(ids, attention_mask=mask)

        seconds = medians({name: lambda n=name: run(n) for name in ("sdpa", "padded_sdpa")}, repeats)
        model.config._attn_implementation = "sdpa"
        share = lengths.sum().item() / (batch * longest)
        gain = seconds["padded_sdpa"] / seconds["sdpa"]
        rows.append(
            {
                "batch": f"{batch} x {longest}",
                "real_tokens": share,
                "padded_s": seconds["padded_sdpa"],
                "unpadded_s": seconds["sdpa"],
                "gain": gain,
                "share_of_ideal_gain": gain * share,
            }
        )
    return rows


def training_steps(layer_counts, batch: int, length: int, repeats: int) -> list[dict]:
    rows = []
    for layers in layer_counts:
        model = NeoBERTForMaskedLM(NeoBERTConfig(num_hidden_layers=layers)).to(DEVICE).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(5, model.config.vocab_size, (batch, length), device=DEVICE)
        labels = ids.masked_fill(torch.rand(ids.shape, device=DEVICE) > 0.2, -100)

        def step(sparse, model=model, optimizer=optimizer, ids=ids, labels=labels):
            model.config.sparse_prediction = sparse
            with torch.autocast(DEVICE, DTYPE, enabled=CUDA):
                loss = model(ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = medians({"dense": lambda s=step: s(False), "sparse": lambda s=step: s(True)}, repeats)
        rows.append({"layers": layers, "batch": f"{batch} x {length}", "dense_s": seconds["dense"]})
        rows[-1] |= {"sparse_s": seconds["sparse"], "speed_up": seconds["dense"] / seconds["sparse"]}
    return rows


def table(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    for row in rows:
        cells = (
            f"{value:.3g}"
            if isinstance(value, float) and value < 100
            else f"{value:,.0f}"
            if isinstance(value, float)
            else str(value)
            for value in row.values()
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    if CUDA:
        return torch.cuda.get_device_name()
    allocator = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in ALLOCATOR]
    return ", ".join([processor(), f"{torch.get_num_threads()} threads", *allocator])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds; the median of them counts")
    parser.add_argument("--processes", type=int, default=3, help="that measure full batches, an odd number")
    parser.add_argument("--layers", type=int, default=28, help="28 is the published model; fewer to try things out")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the tables")
    arguments = parser.parse_args()

    if arguments.processes < 1 or arguments.processes % 2 == 0:
        parser.error(f"--processes is {arguments.processes}; it must be odd, so that one is in the middle.")

    scale = 16 if CUDA else 1
    shapes = [(8 * scale, 128), (4 * scale, 512)]
    measured = (full_batches, arguments.layers, shapes, arguments.repeats)
    full = in_processes(arguments.processes, "share_of_bound", *measured)
    model = build(arguments.layers)
    results = {
        "Full batches": full,
        "Ragged batches": ragged_batches(model, [(32 * scale, 128), (8 * scale, 512)], arguments.repeats),
        "Training step": training_steps(
            sorted({arguments.layers, 12, 6, 2} & set(range(arguments.layers + 1)), reverse=True),
            8 * scale,
            128,
            max(3, arguments.repeats // 2),
        ),
    }
    command = (
        f"python benchmarks/forward.py --repeats {arguments.repeats} --processes {arguments.processes} "
        f"--layers {arguments.layers}"
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    setting = f"{machine()}, {DTYPE}, {versions}, {datetime.date.today()}, `{command}`"
    text = f"# Forward pass and training step\n\n{setting}\n"
    for title, rows in results.items():
        text += f"\n## {title}\n\n{table(rows)}\n"
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output / f"forward_{DEVICE}.md", text)
    write_json(arguments.output / f"forward_{DEVICE}.json", {"setting": setting, **results})


if __name__ == "__main__":
    main()
