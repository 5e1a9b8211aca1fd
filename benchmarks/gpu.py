"""How fast NeoBERT's published shape (222M parameters) is on this machine's GPU, beside other encoders.

    python benchmarks/gpu.py        # make gpu

Measured are the forward pass of the encoder and a training step: masked language modelling of 20% of the tokens,
backward pass and AdamW, with float32 weights and products in the type of the row. Both run on three batches of the same
number of rows:

- dense: every row has all tokens;
- padded: rows have 35% of the tokens on average, the rest is padding under a mask;
- packed: the same texts one after the other in a single row, without padding.

Only real tokens count. The last column is the rate of the model's matrix products in operations per second, divided by
that of one large matrix product of the same type, which is measured first. Weights are random. The other encoders read
the padded batch in bfloat16, if they have positions for it.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch
from encoders import ENCODERS, build_model, make_batch, ragged_lengths
from runner import Settings, run_benchmark, table
from transformers.utils import is_flash_attn_2_available

from neobert_hf.pretraining.flops import training_flops


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEAD = ["", "model", "type", "attention", "tokens a row", "batch", "tokens/s", "GiB", "TFLOP/s", "of a bare product"]
LAYOUTS = ("dense", "padded", "packed")
TYPES, LENGTHS = ("float32", "bfloat16"), (512, 4096)
# Tokens of a batch, with its padding, and the least seconds of a measurement, in repeated steps.
TOKENS, SECONDS = 32_768, 0.3


def time_steps(step: Callable[[], None]) -> float:
    """Seconds of a step. Repeated steps are queued without waiting for each one, as in real use."""

    def run(count: int) -> float:
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        if CUDA:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    run(1)  # The first step chooses kernels.
    once = run(1)
    return run(math.ceil(SECONDS / once)) if once < SECONDS else once


def product_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    size = 8192 if CUDA else 1024
    factors = torch.randn(2, size, size, device=DEVICE, dtype=dtype)
    return 2 * size**3 / time_steps(lambda: factors[0] @ factors[1])


def measure_batch(
    training: bool, name: str, type_name: str, attention: str, length: int, layout: str
) -> dict[str, float]:
    """Real tokens and operations per second of one batch, and GiB of the GPU's memory at the peak."""
    dtype = getattr(torch, type_name)
    model = build_model(name, DEVICE, torch.float32 if training else dtype, attention)
    model.train(training)
    rows = max(1, TOKENS // length)
    lengths = torch.full((rows,), length) if layout == "dense" else ragged_lengths(rows, length)
    inputs, labels = make_batch(model.config, lengths, layout == "packed")
    inputs = {key: value.to(DEVICE) if torch.is_tensor(value) else value for key, value in inputs.items()}
    labels = labels.to(DEVICE)
    # What the model learns does not matter, but its weights must stay finite.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    @torch.inference_mode()
    def forward() -> None:
        model.base_model(**inputs)

    def train() -> None:
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = time_steps(train if training else forward)
    tokens, pairs, predicted = int(lengths.sum()), int((lengths**2).sum()), int((labels != -100).sum())
    memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    found = {"tokens": tokens / seconds, "memory": memory}
    if name == "NeoBERT":
        # A forward pass of the encoder is a third of a training step that predicts nothing.
        flops = training_flops(model.config, tokens, pairs, predicted if training else 0) / (1 if training else 3)
        found["flops"] = flops / seconds
    return found


def ways() -> Iterator[tuple[bool, str, str, str, int, str]]:
    """The arguments of `measure_batch`."""
    attentions = ["sdpa", *(["flash_attention_2"] if CUDA and is_flash_attn_2_available() else [])]
    for way in itertools.product((False, True), ["NeoBERT"], TYPES, attentions, LENGTHS, LAYOUTS):
        _, _, type_name, attention, _, _ = way
        # FlashAttention computes in half precision only.
        if type_name != "float32" or attention == "sdpa":
            yield way
    for name, attention, length in itertools.product(ENCODERS, attentions, LENGTHS):
        kind, values = ENCODERS[name]
        if name != "NeoBERT" and kind(**values).max_position_embeddings >= length:
            yield (False, name, TYPES[-1], attention, length, "padded")


def measure(settings: Settings) -> list[list[str]]:
    """The rows of the table."""
    torch.manual_seed(0)
    bare = {name: product_flops(getattr(torch, name)) for name in TYPES}
    rows = [["bare product", "", name, *[""] * 5, f"{bare[name] / 1e12:.1f}", "1"] for name in TYPES]
    for way in ways():
        training, model, name, attention, length, layout = way
        row = ["training step" if training else "forward pass", model, name, attention, f"{length:,}", layout]
        try:
            found = measure_batch(*way)
        except (RuntimeError, ValueError) as error:  # Memory that ends, or a kernel that is not there.
            rows.append([*row, str(error).splitlines()[0][:80], "", "", ""])
            continue
        rows.append([*row, f"{found['tokens']:,.0f}", f"{found['memory']:.1f}", "", ""])
        if "flops" in found:
            rows[-1][-2:] = f"{found['flops'] / 1e12:.1f}", f"{found['flops'] / bare[name]:.2f}"
        print(*rows[-1], flush=True)
    return rows


def encoder_table(found: list[list[str]]) -> str:
    """Real tokens a second of each encoder in bfloat16, a column for each length."""
    speeds: dict[tuple[str, str], dict[str, str]] = {}
    for step, model, name, attention, length, layout, tokens, *_ in found:
        # Where a kernel is missing, its message stands in place of the speed.
        if (step, name, layout) == ("forward pass", TYPES[-1], "padded") and tokens.replace(",", "").isdigit():
            speeds.setdefault((model, attention), {})[length] = tokens
    lengths = list(dict.fromkeys(length for row in speeds.values() for length in row))
    rows = [[*names, *(row.get(length, "-") for length in lengths)] for names, row in speeds.items()]
    return table(["", "attention", *(f"up to {length} tokens" for length in lengths)], rows)


def page(found: list[list[str]]) -> list[str]:
    return [
        "# Speed on a GPU",
        "Real tokens a second of the forward pass in bfloat16, published shapes with random weights. Rows have 35% of "
        "the tokens of the longest on average; the rest is padding under a mask.",
        encoder_table(found),
        "NeoBERT in all ways that the top of `benchmarks/gpu.py` describes:",
        table(HEAD, [row for row in found if row[1] in ("", "NeoBERT")]),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("gpu", measure, page, args=args)


if __name__ == "__main__":
    main()
