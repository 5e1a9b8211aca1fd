"""How fast NeoBERT's published shape (222M parameters) is on this machine's GPU, beside other encoders.

    python benchmarks/gpu.py        # make gpu

Measured are the forward pass of the encoder and a training step: masked language modelling of 20% of the tokens,
backward pass and AdamW, with float32 weights and products in the type of the row. Both run on three batches of the same
number of rows:

- dense: every row has all tokens;
- padded: rows have 35% of the tokens on average, the rest is padding under a mask;
- packed: the same texts one after the other in a single row, without padding.

With `--steps 100` the protocol of the paper's section 5.4 comes first: rows of the longest length, batches of 1, 2, 4
and up to 512 rows until memory ends or two doublings gained nothing, 100 forward passes of each, and the largest
throughput, in bfloat16. This takes about an hour; ten steps of each, minutes.

Only real tokens count. The last column is the rate of the model's matrix products in operations per second, divided by
that of one large matrix product of the same type, which is measured first. Weights are random. The other encoders read
the padded batch in bfloat16, if they have positions for it.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from accelerate.utils import compile_regions
from encoders import ENCODERS, build_model, make_batch, ragged_lengths
from runner import Settings, run_benchmark, table
from transformers.utils import is_flash_attn_2_available

from neobert_hf.pretraining.flops import training_flops


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEAD = ["", "model", "type", "attention", "tokens a row", "batch", "tokens/s", "GiB", "TFLOP/s", "of a bare product"]
LAYOUTS = ("dense", "padded", "packed")
TYPES, LENGTHS = ("float32", "bfloat16"), (512, 4096)
# The paper's protocol: models, lengths, and rows of a batch.
LARGEST = "largest throughput"
STUDIED, STUDY_LENGTHS = (
    ("NeoBERT", "BERT-base", "BERT-large", "NomicBERT", "ModernBERT-base"),
    (512, 1024, 2048, 4096, 8192),
)
ROWS = [2**power for power in range(10)]
# Table 10: thousands of tokens a second on an A100 with the best batch.
TABLE_10 = {
    "BERT-base": ["27.6", "-", "-", "-", "-"],
    "ModernBERT-base": ["25.4", "22.6", "17.2", "11.7", "6.8"],
    "NeoBERT": ["24.5", "22.2", "20.5", "17.2", "13.0"],
    "BERT-large": ["19.5", "-", "-", "-", "-"],
}
# NeoBERT is also measured in blocks that are compiled one by one, as configs/accelerate has it for GPUs.
COMPILED, BACKEND = " compiled", "inductor"
# Tokens of a batch, with its padding, and the least seconds of a measurement, in repeated steps.
TOKENS, SECONDS = 32_768, 0.3


@dataclass(kw_only=True)
class GPUSettings(Settings):
    steps: int = field(
        default=0, metadata={"help": "forward passes of each batch in the paper's protocol; 0 leaves the protocol out"}
    )


def time_steps(step: Callable[[], None], steps: int | None = None) -> float:
    """Seconds of a step. Repeated steps are queued without waiting for each one, as in real use.

    Args:
        steps: how many; if None, as many as take `SECONDS`.
    """

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
    if steps is not None:
        return run(steps)
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
    model = build_model(name, DEVICE, torch.float32 if training else dtype, attention.removesuffix(COMPILED))
    if attention.endswith(COMPILED):
        model = compile_regions(model, backend=BACKEND, dynamic=True)
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


def largest_throughput(name: str, length: int, steps: int) -> tuple[float, int]:
    """Tokens a second with the best number of rows, and that number."""
    model = build_model(name, DEVICE, torch.bfloat16).eval()
    found = []
    for rows in ROWS:
        inputs, _ = make_batch(model.config, torch.full((rows,), length))
        ids = inputs["input_ids"].to(DEVICE)
        try:
            with torch.inference_mode():
                seconds = time_steps(lambda ids=ids: model.base_model(input_ids=ids), steps)
        except torch.OutOfMemoryError:
            break
        found.append((rows * length / seconds, rows))
        if max(found) not in found[-2:]:  # Two doublings that gained nothing.
            break
    return max(found)


def study(steps: int) -> list[list[str]]:
    """The rows of the paper's study, for models that have positions for the length; NeoBERT's have no end."""
    rows = []
    for name, length in itertools.product(STUDIED, STUDY_LENGTHS):
        kind, values = ENCODERS[name]
        if name == "NeoBERT" or kind(**values).max_position_embeddings >= length:
            speed, batch = largest_throughput(name, length, steps)
            row = [LARGEST, name, TYPES[-1], "sdpa", f"{length:,}", f"{batch} rows, {steps} steps", f"{speed:,.0f}"]
            rows.append([*row, "", "", ""])
            print(*row, flush=True)
    return rows


def ways() -> Iterator[tuple[bool, str, str, str, int, str]]:
    """The arguments of `measure_batch`."""
    attentions = ["sdpa", *(["flash_attention_2"] if CUDA and is_flash_attn_2_available() else [])]
    ours = [*attentions, f"sdpa{COMPILED}"]
    for way in itertools.product((False, True), ["NeoBERT"], TYPES, ours, LENGTHS, LAYOUTS):
        _, _, type_name, attention, _, _ = way
        # FlashAttention computes in half precision only.
        if type_name != "float32" or attention.startswith("sdpa"):
            yield way
    for name, attention, length in itertools.product(ENCODERS, attentions, LENGTHS):
        kind, values = ENCODERS[name]
        if name != "NeoBERT" and kind(**values).max_position_embeddings >= length:
            yield (False, name, TYPES[-1], attention, length, "padded")


def measure(settings: GPUSettings) -> list[list[str]]:
    """The rows of the table."""
    torch.manual_seed(0)
    bare = {name: product_flops(getattr(torch, name)) for name in TYPES}
    rows = [["bare product", "", name, *[""] * 5, f"{bare[name] / 1e12:.1f}", "1"] for name in TYPES]
    rows += study(settings.steps) if settings.steps else []
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


def study_table(found: list[list[str]]) -> str:
    """Thousands of tokens a second with the best batch, here and in the paper."""
    speeds: dict[str, dict[str, str]] = {}
    for step, model, _, _, length, batch, tokens, *_ in found:
        if step == LARGEST:
            thousands = int(tokens.replace(",", "")) / 1000
            speeds.setdefault(model, {})[length] = f"{thousands:,.1f} ({batch.split(',')[0]})"
    lengths = [f"{length:,}" for length in STUDY_LENGTHS]
    rows = [[model, *(row.get(length, "-") for length in lengths)] for model, row in speeds.items()]
    rows += [[f"{model}, paper, A100", *values] for model, values in TABLE_10.items()]
    return table(["", *(f"{length} tokens" for length in lengths)], rows)


def study_of_the_page(found: list[list[str]]) -> list[str]:
    """The paper's protocol, if it was run."""
    steps = [row[5].split(", ")[1] for row in found if row[0] == LARGEST]
    if not steps:
        return []
    text = "Thousands of tokens a second as in Table 10 of the paper: rows of the longest length, the best batch, "
    return [f"{text}{steps[0]} of the forward pass in bfloat16.", study_table(found)]


def page(found: list[list[str]]) -> list[str]:
    return [
        "# Speed on a GPU",
        *study_of_the_page(found),
        "Real tokens a second of the forward pass in bfloat16, published shapes with random weights. Rows have 35% of "
        "the tokens of the longest on average; the rest is padding under a mask.",
        encoder_table(found),
        "NeoBERT in all ways that the top of `benchmarks/gpu.py` describes:",
        table(HEAD, [row for row in found if row[1] in ("", "NeoBERT") and row[0] != LARGEST]),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("gpu", measure, page, kind=GPUSettings, args=args)


if __name__ == "__main__":
    main()
