"""Everything about speed on a GPU, in one command with a time limit.

    python benchmarks/gpu.py                  # make gpu; on a GPU, nine minutes at most
    python benchmarks/gpu.py --minutes 0      # measures nothing: writes the page again, on any machine

In this order, the most valuable first:

1. the tests for GPUs (`pytest -m gpu`);
2. the parts of a forward pass (gpu_probe.py), then NeoBERT and ModernBERT-base at 512, 4,096 and 8,192 tokens;
3. NeoBERT, eager and compiled, at all lengths, and its training;
4. 32,768 tokens in one sequence, the memory of training with and without checkpointing, the kernels of one block, the
   other encoders;
5. the parts of a backward pass and compiled parts, small batches with and without CUDA graphs, training of the other
   encoders, and the other encoders compiled.

By their longest allowed times, three calls of nine minutes cover 1 and 2, then 3, then 4.

Models are measured as in throughput.py. Batches have 16,384 to 131,072 tokens, and the fastest counts.

Every number goes into `output_dir`/gpu.json at once, so that a killed process loses none. The same command resumes,
also on a new machine: GPU and versions must be those of the file. A measurement that was killed is tried again after
everything else, one that ended with an error only once the code has changed. Last, NeoBERT's numbers from older
versions of the model files are measured again. No measurement begins without enough time left. Writes gpu.md next to
gpu.json: one page, compared with the goals.
"""

import gc
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import transformers
from encoders import ENCODERS, build_config
from forward import CUDA, DEVICE, DTYPE, machine
from gpu_probe import LONGEST, Sizes, probes, profiles, small_batches
from gpu_report import page
from throughput import PAPER_LENGTHS, Cell, Record, ThroughputArguments, measure_cell, plan, start_turn

from neobert_hf.common.atomic_writes import write_text
from neobert_hf.common.results import read_result
from neobert_hf.common.settings import Count, Range, check_ranges, parse_config


ROOT = Path(__file__).parent.parent
NEOBERT, RIVAL = "NeoBERT", "ModernBERT-base"
SECTIONS = ("tests", "numbers", "errors", "begun")
# Numbers that the model's own code makes begin so.
OF_NEOBERT = ("rotation", "swiglu", "forward of", "profile")
# A line of `pytest -v`.
OUTCOME = re.compile(r"^(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)")
# Seconds below which tests are not begun: importing and collecting take so long.
LEAST_FOR_TESTS = 30
Minutes = Annotated[float, Range(0, 60)]


@dataclass
class GpuArguments:
    minutes: Minutes = field(default=9.0, metadata={"help": "for everything, from the first measurement on"})
    test_minutes: Minutes = field(default=2.5, metadata={"help": "of these, for the tests"})
    output_dir: str = field(
        default=str(Path(__file__).parent / "results"), metadata={"help": "of gpu.json, which is continued, and gpu.md"}
    )
    models: list[str] = field(default_factory=lambda: list(ENCODERS), metadata={"help": ", ".join(ENCODERS)})
    first_lengths: list[Count] = field(
        default_factory=lambda: [512, 4096, 8192] if CUDA else [16], metadata={"help": "of the first call"}
    )
    lengths: list[Count] = field(default_factory=lambda: PAPER_LENGTHS if CUDA else [16, 32])
    longest: Count = field(default=LONGEST if CUDA else 64, metadata={"help": "of one sequence"})
    least_tokens: Count = field(default=16_384 if CUDA else 64, metadata={"help": "of a batch, with its padding"})
    most_tokens: Count = field(default=131_072 if CUDA else 64, metadata={"help": "of a batch, with its padding"})
    layers: Count | None = field(default=None, metadata={"help": "fewer than published, for a trial"})

    def __post_init__(self):
        check_ranges(self)


class Job(NamedTuple):
    """One measurement.

    Args:
        section: of the file, `numbers` or `cells`.
        key: in it.
        seconds: that it may take; it is not begun with less left.
        opening: seconds on top, where a model has to be built, and compiled, for it.
        measure: gives the entry of the file.
        cell: None of a number.
    """

    section: str
    key: str
    seconds: float
    opening: float
    measure: Callable[[], dict]
    cell: Cell | None = None

    @property
    def of_neobert(self) -> bool:
        return self.cell.model == NEOBERT if self.cell else self.key.startswith(OF_NEOBERT)


def fingerprint(*patterns: str) -> str:
    """A hash of these files of the repository."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in patterns for file in ROOT.glob(pattern)):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def is_late(key: str) -> bool:
    """Whether a part of the model is measured behind whole models."""
    return key.endswith("compiled") or key.startswith("attention with gradients")


def part_seconds(key: str) -> tuple[float, float]:
    """Seconds that a number may take, and those on top to build a model and compile for it."""
    compiled = 40 if "compiled" in key else 0
    if key.startswith(("forward of", "profile")):
        return 5, 5 + compiled
    return 3, compiled / 2


class Study:
    """The measurements, their file, and the time that is left."""

    def __init__(self, settings: GpuArguments):
        self.settings, self.end = settings, time.monotonic() + 60 * settings.minutes
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
        fixed = {"machine": machine(), "dtype": str(DTYPE).removeprefix("torch."), **versions}
        fixed |= {name: getattr(settings, name) for name in ("layers", "least_tokens", "most_tokens")}
        self.record = Record(Path(settings.output_dir) / "gpu.json", fixed, SECTIONS)
        self.content = self.record.content
        self.model_code = fingerprint("src/neobert_hf/*.py")
        self.code = fingerprint("src/neobert_hf/*.py", "benchmarks/*.py")
        self.tests_code = fingerprint("src/neobert_hf/*.py", "tests/gpu/*.py", "tests/model/*.py", "tests/helpers/*.py")
        self.bench, self.turn, self.tests = None, None, None

    def left(self) -> float:
        return self.end - time.monotonic()

    # What there is to do

    def jobs(self) -> Iterator[Job]:
        """All of them in the order of worth; some come twice."""
        settings = self.settings
        sizes = Sizes(lengths=(*settings.lengths, settings.longest))
        first, every, long = settings.first_lengths, settings.lengths, [settings.longest]
        others = [name for name in settings.models if name != NEOBERT]
        parts = [Job("numbers", key, *part_seconds(key), measure) for key, measure in probes(sizes).items()]
        yield from (job for job in parts if not is_late(job.key))
        yield from self.cells([NEOBERT], first, [])
        yield from self.cells([name for name in others if name == RIVAL], first, [])
        yield from self.cells([NEOBERT], first, [], compile=True)
        yield from self.cells([NEOBERT], every, [], compile=True)
        training = self.cells([NEOBERT], [], every, compile=True)
        yield from (job for job in training if job.cell.mode == "training")
        yield from self.cells([NEOBERT], long, [], compile=True)
        yield from (job for job in training if job.cell.mode == "checkpointing")
        found = profiles(sizes).items()
        yield from (Job("numbers", key, *part_seconds(key), measure) for key, measure in found)
        yield from self.cells(others, every, [])
        yield from parts
        found = small_batches(sizes).items()
        yield from (Job("numbers", key, *part_seconds(key), measure) for key, measure in found)
        yield from self.cells(others, [], first)
        yield from self.cells(others, every, [], compile=True)

    def cells(self, models: list[str], lengths: list[int], training: list[int], compile: bool = False) -> list[Job]:
        changes = {"num_hidden_layers": self.settings.layers} if self.settings.layers else {}
        arguments = ThroughputArguments(
            models=models,
            lengths=lengths,
            training_lengths=training,
            compile=compile,
            min_tokens=self.settings.least_tokens,
            max_tokens=self.settings.most_tokens,
            layers=self.settings.layers,
        )
        configs = {}
        for name in models:
            try:
                configs[name] = build_config(name, **changes)
            except ImportError as error:
                self.content["errors"][name] = {"error": str(error), "code": self.code}
        found = []
        for cell in (cell for turn in plan(arguments, configs) for cell in turn):
            seconds, opening = (5, 5) if cell.mode == "forward" else (10, 5)
            if cell.compiled:
                opening = 60 if cell.mode == "forward" else 120
            if cell.attention == "flex_attention":  # It is compiled, for whole rows and for ragged ones.
                seconds, opening = seconds + 5, opening + 40
            measure = partial(self.measure_cell, arguments, configs[cell.model], cell)
            found.append(Job("cells", cell.key, seconds, opening, measure, cell))
        return found

    def pending(self) -> list[Job]:
        """What was never begun, then what a kill or an error ended, then what other code was measured with."""
        unique, ranked = {}, {0: [], 1: [], 2: []}
        for job in self.jobs():
            unique.setdefault(job.key, job)
        for key, job in unique.items():
            stored, failed = self.content[job.section].get(key), self.content["errors"].get(key)
            if failed:
                rank = 1 if failed["code"] != self.code else None
            elif stored:
                rank = 2 if job.of_neobert and stored["code"] != self.model_code else None
            else:
                rank = 1 if key in self.content["begun"] else 0
            if rank is not None:
                ranked[rank].append(job)
        return [job for jobs in ranked.values() for job in jobs]

    # How it is done

    def run(self, jobs: list[Job]) -> None:
        left_out = 0
        for job in jobs:
            opening = 0 if job.cell and job.cell[:4] == self.turn else job.opening
            if self.left() < job.seconds + opening:
                left_out += 1
                continue
            self.content["begun"][job.key] = self.code
            self.record.save()
            self.content["errors"].pop(job.key, None)
            start, failure = time.monotonic(), None
            try:
                found = job.measure()
            except Exception as error:  # Whatever a kernel says of itself: the others go on.
                failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
            if failure:  # Only here, where the error holds no tensors any more.
                self.fail(job, failure)
                continue
            took = round(time.monotonic() - start, 1)
            self.content[job.section][job.key] = found | {"code": self.model_code, "took": took}
            del self.content["begun"][job.key]
            self.record.save()
            print(f"{job.key}: {took} s", flush=True)
        self.close()
        print(f"{left_out} measurements are left for the next call.", flush=True)

    def measure_cell(self, arguments: ThroughputArguments, config, cell: Cell) -> dict:
        if cell[:4] != self.turn:
            self.close()
            self.bench, self.turn = start_turn(config, cell, self.record), cell[:4]
        entry = {**cell._asdict(), "trials": [], "rounds": []}
        measure_cell(arguments, self.bench, cell, entry)
        return entry

    def close(self) -> None:
        """Free the memory of the last model."""
        self.bench = self.turn = None
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()

    def fail(self, job: Job, message: str) -> None:
        self.content["errors"][job.key] = {"error": message, "code": self.code}
        self.content["begun"].pop(job.key, None)
        self.record.save()
        print(f"{job.key}: {message}", file=sys.stderr, flush=True)
        try:
            self.close()
            torch.zeros(1, device=DEVICE).item()
        except RuntimeError:
            # After some errors of a kernel a process can use the GPU no more. A new one goes on.
            os.execv(sys.executable, [sys.executable, *sys.argv, "--minutes", f"{max(0.0, self.left()) / 60:.3f}"])

    def run_tests(self) -> None:
        """Each outcome goes into the file when it is known; what passed with this code does not run again."""
        tests = self.content["tests"]
        if tests.get("code") != self.tests_code:
            tests.clear()
            tests |= {"code": self.tests_code, "outcomes": {}, "output": "", "finished": False}
        seconds = min(60 * self.settings.test_minutes, self.left() - 5)
        if tests["finished"] or seconds < LEAST_FOR_TESTS:
            return
        passed = [name for name, outcome in tests["outcomes"].items() if outcome == "passed"]
        # The time of pytest-timeout, if that is there: a kernel that hangs must not take the time of the others.
        options = "-v --tb=short -p no:cacheprovider -o timeout=60".split()
        command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", *options]
        command += [f"--deselect={name}" for name in passed]
        self.tests = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        limit = threading.Timer(seconds, self.tests.kill)
        limit.start()
        output = []
        for line in self.tests.stdout:
            print(line, end="", flush=True)
            output.append(line)
            if found := OUTCOME.match(line):
                tests["outcomes"][found[1]] = found[2].lower()
                self.record.save()
        limit.cancel()
        # 5: all were run before.
        tests["finished"] = self.tests.wait() in (0, 1, 5)
        tests["output"] = "".join(output)[-6000:]
        self.record.save()


def write_page(folder: Path) -> None:
    """Write the page of what the file holds, which is always whole; without it, of nothing."""
    file, content = folder / "gpu.json", dict.fromkeys(("settings", "cells", "ceilings", *SECTIONS), {})
    text = page(read_result(file, set(content)) if file.exists() else content)
    write_text(folder / "gpu.md", text)
    print(text, flush=True)


def stop_at_the_end(study: Study) -> threading.Timer:
    """Where something takes longer than expected, the process ends with the page written."""

    def stop() -> None:
        if study.tests is not None:
            study.tests.kill()
        try:
            write_page(Path(study.settings.output_dir))
        finally:
            os._exit(0)

    timer = threading.Timer(study.left(), stop)
    timer.daemon = True
    timer.start()
    return timer


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(GpuArguments, args=args)
    torch.manual_seed(0)
    if settings.minutes:
        study = Study(settings)
        study.record.save()
        timer = stop_at_the_end(study)
        study.run_tests()
        study.run(study.pending())
        timer.cancel()
    write_page(Path(settings.output_dir))


if __name__ == "__main__":
    main()
