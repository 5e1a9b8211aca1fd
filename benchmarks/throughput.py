"""How fast NeoBERT and other encoders are, on this machine: Table 10 and Figure 3 of the paper (sections 5.4 and F).

    python benchmarks/throughput.py                                              # CPU: about 25 minutes on 2 cores
    python benchmarks/throughput.py --models NeoBERT ModernBERT-base --lengths 4096 --compile true       # on a GPU

Nine encoders with their published shapes and random weights (benchmarks/encoders.py) are measured. One measurement is
the forward pass of the encoder without a head (on a GPU in bfloat16). The other is a training step: masked language
modelling of 20% of the tokens, backward, AdamW (on a GPU in bfloat16 autocast with float32 weights). NeoBERT and
ModernBERT run the decoder on the labelled tokens only, which their configurations allow; dropout is as published.
Batches are full (every sequence has all tokens) or ragged (lognormal, mean 35% of the longest, at least 8 rows); only
real tokens count. A ragged batch is packed into one row for models that can compute it without padding: NeoBERT always
can, the others if a flash attention is installed. Otherwise the batch is padded, with a mask.

On a GPU the defaults are the paper's: 512 to 8,192 tokens, batches doubled from 1 row to 512 or until memory runs out
(the fastest counts), and the memory that training takes at 4,096 tokens with and without gradient checkpointing. On a
CPU they are 128 and 512 tokens, training at 128, and one batch of at most 1,024 tokens (but 8 rows if ragged), in
float32. On a CPU, the environment of `make bench` is best for all models (benchmarks/forward.py says why). BERT and
RoBERTa have positions for 512 tokens, so longer lengths are left out, as in the paper.

Models take turns, once in each round, and the report gives medians over the rounds. Model FLOP utilisation (MFU) is the
rate of the FLOPs that the task needs (`encoders.forward_flops`; three times as many for training), divided by the FLOP
rate of plain matrix products of the same dtype, which is measured at the beginning of every turn. Finished measurements
are kept in `output_dir`. After an interruption the same command resumes, and with more `rounds` it adds the missing
ones. Writes benchmarks/results/throughput_<device>.md, .csv and .png.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from encoders import ENCODERS, build_config, build_model, forward_flops
from forward import CUDA, DEVICE, DTYPE, machine, ragged_lengths
from throughput_report import write_report
from tqdm import tqdm
from transformers import PretrainedConfig
from transformers.utils import is_flash_attn_2_available
from transformers.utils.generic import is_flash_attention_requested

from neobert_hf.common.files import write_json
from neobert_hf.common.fingerprints import check_same_settings
from neobert_hf.common.settings import nearest, parse_config
from neobert_hf.training.flops import product_flops


LABELLED, RAGGED_ROWS, CHECKPOINTING_LENGTH = 0.2, 8, 4096
PAPER_LENGTHS = [512, 1024, 2048, 4096, 8192]


@dataclass
class ThroughputArguments:
    models: list[str] = field(default_factory=lambda: list(ENCODERS), metadata={"help": ", ".join(ENCODERS)})
    lengths: list[int] = field(
        default_factory=lambda: PAPER_LENGTHS if CUDA else [128, 512], metadata={"help": "of the forward pass"}
    )
    training_lengths: list[int] = field(
        default_factory=lambda: PAPER_LENGTHS if CUDA else [128], metadata={"help": "of the training step"}
    )
    attention: list[str] | None = field(
        default=None,
        metadata={
            "help": "backends to try, the fastest counts; by default sdpa, and on a GPU also flash_attention_2 if it "
            "is installed, or else flex_attention for local attention"
        },
    )
    compile: bool = field(default=False, metadata={"help": "also measure each model compiled, NeoBERT by blocks"})
    rounds: int = field(default=3, metadata={"help": "turns of each model; results are medians over them"})
    seconds: float = field(
        default=0.5 if CUDA else 0.0, metadata={"help": "minimum seconds of a measurement, in repeated steps"}
    )
    max_rows: int = field(default=512, metadata={"help": "of a batch"})
    min_tokens: int | None = field(
        default=None, metadata={"help": "of the smallest batch of the search, with its padding; one row if unset"}
    )
    max_tokens: int | None = field(
        default=None if CUDA else 1024, metadata={"help": "of a batch, with its padding; what fits if unset"}
    )
    layers: int | None = field(default=None, metadata={"help": "fewer layers than published, for a trial"})
    output_dir: str = field(default="runs/throughput", metadata={"help": "finished measurements"})
    results: str = field(default=str(Path(__file__).parent / "results"), metadata={"help": "folder of the report"})

    def __post_init__(self):
        for name in self.models:
            if name not in ENCODERS:
                raise ValueError(f"`models` holds {name!r}{nearest(name, list(ENCODERS))}")
        for name in ("lengths", "training_lengths"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; lengths must be at least 1.")
        for name in ("rounds", "max_rows", "min_tokens", "max_tokens", "layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1.")


class Cell(NamedTuple):
    """What one cell of the report measures."""

    model: str
    attention: str
    compiled: bool
    mode: str  # "forward", "training" or "checkpointing": training with gradient checkpointing
    length: int
    layout: str  # "full" or "ragged"

    @property
    def key(self) -> str:
        return " ".join(map(str, self))


class Record:
    """Finished measurements in one file. The whole file is rewritten after each measurement.

    Args:
        sections: further sections of the file besides the measurements of cells; empty at first.

    Raises:
        SettingsMismatch: if the file comes from a run with other settings.
    """

    def __init__(self, file: Path, settings: dict, sections: tuple[str, ...] = ()):
        self.file, self.content = file, {"settings": settings, "date": None, "ceilings": [], "cells": {}}
        self.content |= {name: {} for name in sections}
        if file.exists():
            self.content = json.loads(file.read_text())
            check_same_settings(file, self.content["settings"], settings, "Use another `output_dir`.")

    def of(self, cell: Cell) -> dict:
        """The number of rows (null if not even the smallest batch fits), the trials that chose it, and the rounds."""
        return self.content["cells"].setdefault(cell.key, {**cell._asdict(), "trials": [], "rounds": []})

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.content["date"] = str(date.today())
        write_json(self.file, self.content)


def backends(config: PretrainedConfig) -> list[str]:
    """Attention implementations that are worth trying on this machine."""
    if not CUDA:
        return ["sdpa"]
    if is_flash_attn_2_available():
        return ["flash_attention_2", "sdpa"]
    # With `sdpa` a local window is a mask over all pairs, which flash kernels do not support.
    local = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    return ["flex_attention", "sdpa"] if local else ["sdpa"]


def takes_packed(cell: Cell) -> bool:
    """Whether documents packed into one row can be kept apart without a mask over the whole row."""
    if is_flash_attention_requested(requested_attention_implementation=cell.attention):
        return True
    return cell.model == "NeoBERT" and cell.attention == "sdpa"


def plan(settings: ThroughputArguments, configs: dict[str, PretrainedConfig]) -> list[list[Cell]]:
    """The turns. Each turn is a list of cells that are measured with one model in memory."""
    turns = []
    for name, config in configs.items():
        longest = ENCODERS[name].longest or math.inf
        for attention in dict.fromkeys(settings.attention or backends(config)):
            for compiled in (False, True) if settings.compile else (False,):
                lengths = {"forward": settings.lengths, "training": settings.training_lengths}
                if CUDA and not compiled:
                    lengths["checkpointing"] = [n for n in settings.training_lengths if n == CHECKPOINTING_LENGTH]
                for mode in lengths:
                    layouts = ("full",) if mode == "checkpointing" else ("full", "ragged")
                    fitting = [length for length in lengths[mode] if length <= longest]
                    cells = [Cell(name, attention, compiled, mode, n, layout) for n in fitting for layout in layouts]
                    turns += [cells] if cells else []
    return turns


def make_batch(config: PretrainedConfig, lengths: torch.Tensor, packed: bool) -> tuple[dict, torch.Tensor]:
    """Arguments of a model with random ids, and labels for a fifth of the ids."""
    rows, longest = len(lengths), int(lengths.max())
    real = torch.arange(longest) < lengths[:, None]
    inputs = {"input_ids": torch.randint(5, config.vocab_size, (rows, longest))}
    if packed:
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        positions = torch.arange(longest).expand(rows, -1)[real]
        # RoBERTa's first position comes after that of padding.
        positions += config.pad_token_id + 1 if config.model_type == "roberta" else 0
        inputs = {"input_ids": inputs["input_ids"][real][None], "position_ids": positions[None]}
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        real = real[real][None]
    elif not real.all():
        inputs["attention_mask"] = real.long()
    labelled = real & (torch.rand(real.shape) < LABELLED)
    labels = inputs["input_ids"].masked_fill(~labelled, -100).to(DEVICE)
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    return inputs | ({"max_length_q": longest, "max_length_k": longest} if packed else {}), labels


class Bench:
    """The model in memory for the cells of one turn, and its steps."""

    def __init__(self, config: PretrainedConfig, cell: Cell):
        self.training = cell.mode != "forward"
        dtype = torch.float32 if self.training else DTYPE
        self.model = build_model(config, cell.attention, DEVICE, dtype).train(self.training)
        if cell.mode == "checkpointing":
            self.model.gradient_checkpointing_enable()
        # What the model learns does not matter, but its weights must stay finite.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        if cell.compiled:
            (self.model if self.training else self.model.base_model).compile(dynamic=True)

    def step(self, inputs: dict, labels: torch.Tensor) -> None:
        if not self.training:
            with torch.inference_mode():
                self.model.base_model(**inputs)
            return
        with torch.autocast(DEVICE, DTYPE, enabled=CUDA):
            loss = self.model(**inputs, labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, cell: Cell, rows: int, seconds: float) -> dict:
        """Rows, real tokens, seconds and FLOPs of a step, and bytes of the device's memory at its peak."""
        lengths = ragged_lengths(rows, cell.length) if cell.layout == "ragged" else torch.full((rows,), cell.length)
        inputs, labels = make_batch(self.model.config, lengths, cell.layout == "ragged" and takes_packed(cell))
        # On a CPU a single row is enough to warm up; on a GPU, kernels are chosen and compiled for each shape.
        whole = CUDA or cell.compiled
        self.step(*((inputs, labels) if whole else make_batch(self.model.config, lengths[:1], False)))
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        duration = time_steps(lambda: self.step(inputs, labels), seconds)
        predicted = int((labels != -100).sum()) if self.training else 0
        return {
            "rows": rows,
            "tokens": int(lengths.sum()),
            "seconds": duration,
            "flops": forward_flops(self.model, lengths, predicted) * (3 if self.training else 1),
            "peak_bytes": torch.cuda.max_memory_allocated() if CUDA else None,
        }

    def free_after_out_of_memory(self) -> None:
        self.optimizer.zero_grad()
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def time_steps(step: Callable[[], None], at_least: float) -> float:
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

    once = run(1)
    return run(math.ceil(at_least / once)) if once < at_least else once


def row_counts(settings: ThroughputArguments, cell: Cell) -> list[int]:
    """Numbers of rows to try: powers of two within the limits, but at least the smallest, which is 1 (8 if ragged)."""
    smallest = RAGGED_ROWS if cell.layout == "ragged" else 1
    limit = min(settings.max_rows, (settings.max_tokens or math.inf) // cell.length)
    wanted = max(1, min(limit, (settings.min_tokens or 1) // cell.length))
    smallest = max(smallest, 2 ** (wanted.bit_length() - 1))
    return [2**power for power in range(32) if smallest <= 2**power <= max(limit, smallest)]


def double_until_out_of_memory(measure: Callable[[int], dict], counts: list[int]) -> list[dict]:
    """Measurements of growing batches until the first that does not fit."""
    trials = []
    for rows in counts:
        try:
            trials.append(measure(rows))
        except torch.OutOfMemoryError:
            break
    return trials


def start_turn(config: PretrainedConfig, cell: Cell, record: Record) -> Bench:
    """Load the model of a turn, after measuring the rate of matrix products on this machine at that moment."""
    torch.compiler.reset()
    peak, record.content["ceiling_shape"] = product_flops(torch.device(DEVICE), DTYPE)
    record.content["ceilings"].append(peak)
    return Bench(config, cell)


def measure_cell(settings: ThroughputArguments, bench: Bench, cell: Cell, entry: dict) -> None:
    """Measure a cell for another round. Before its first round on a GPU, find its fastest batch.

    Args:
        entry: the entry of the cell in the record.
    """
    counts = row_counts(settings, cell)
    if "rows" not in entry and CUDA:
        entry["trials"] = double_until_out_of_memory(partial(bench.measure, cell, seconds=0.0), counts)
        bench.free_after_out_of_memory()
        fastest = max(entry["trials"], key=lambda trial: trial["tokens"] / trial["seconds"], default=None)
        entry["rows"] = fastest and fastest["rows"]
    elif "rows" not in entry:
        entry["rows"] = counts[-1]
    entry["rounds"].append(entry["rows"] and bench.measure(cell, entry["rows"], settings.seconds))


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(ThroughputArguments, args=args)
    torch.manual_seed(0)

    # 1. Models that the installed Transformers has, and the measurements that exist already
    configs, failures = {}, {}
    for name in settings.models:
        try:
            configs[name] = build_config(name, **({"num_hidden_layers": settings.layers} if settings.layers else {}))
        except ImportError as error:
            failures[name] = str(error)
    limits = {name: getattr(settings, name) for name in ("layers", "seconds", "max_rows", "min_tokens", "max_tokens")}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    fixed = {"machine": machine(), "dtype": str(DTYPE).removeprefix("torch."), **versions, **limits}
    record = Record(Path(settings.output_dir) / f"{DEVICE}.json", fixed)

    # 2. Rounds, in which all models take turns
    turns = plan(settings, configs)
    steps = [(number, cells) for number in range(settings.rounds) for cells in turns]
    for number, cells in (progress := tqdm(steps, desc="turns")):
        progress.set_postfix_str(f"{cells[0].model}, {cells[0].mode}")
        pending = [cell for cell in cells if len(record.of(cell)["rounds"]) <= number]
        name = f"{cells[0].model}, {cells[0].attention}{', compiled' if cells[0].compiled else ''}, {cells[0].mode}"
        if not pending or name in failures:
            continue
        try:
            bench = start_turn(configs[cells[0].model], cells[0], record)
            for cell in pending:
                measure_cell(settings, bench, cell, record.of(cell))
                record.save()
        except (ImportError, ValueError, RuntimeError) as error:
            # A missing attention, or a kernel that does not support this model, must not stop the others.
            failures[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            print(f"{name}: {failures[name]}", file=sys.stderr)
        bench = None
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()

    # 3. Report
    entries = [record.of(cell) for cells in turns for cell in cells]
    if not (measured := [entry for entry in entries if entry["rounds"]]):
        raise SystemExit(f"Nothing could be measured: {failures or 'no length fits a model'}.")
    write_report(record.content, measured, configs, failures, Path(settings.results) / f"throughput_{DEVICE}")


if __name__ == "__main__":
    main()
