"""The runs of a GLUE evaluation: which there are, in which order, and which of them a process does.

Every process knows its runs from its number alone. So no claim on a run can outlive a killed process, no clocks have to
be compared, and a stopped shard resumes when its own command is repeated. Runs are dealt out in turn, the slowest
first; another split would finish a little sooner.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from itertools import product

import torch
from accelerate.utils import is_cuda_available

from neobert_hf.common.settings import read_yaml
from neobert_hf.evaluation.glue.tasks import GlueTask


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters that the paper searches (Table 6)."""

    batch_size: int
    learning_rate: float
    weight_decay: float

    def __str__(self) -> str:
        return f"bs{self.batch_size}_lr{self.learning_rate:g}_wd{self.weight_decay:g}"


@dataclass(frozen=True)
class Run:
    """One training on one task."""

    task: str
    hyperparameters: Hyperparameters
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.hyperparameters}_seed{self.seed}"


def grid(batch_sizes: list[int], learning_rates: list[float], weight_decays: list[float]) -> list[Hyperparameters]:
    """All combinations, small batches first: they are the slowest."""
    return [Hyperparameters(*values) for values in product(sorted(batch_sizes), learning_rates, weight_decays)]


def read_hyperparameters(path: str) -> dict[str, Hyperparameters]:
    """Read a file such as `configs/glue/table6_4096.yaml`: one set for each task."""
    names = [field.name for field in fields(Hyperparameters)]
    hyperparameters = {}
    for task, entry in read_yaml(path).items():
        if not isinstance(entry, dict) or sorted(entry) != sorted(names):
            raise ValueError(f"{path}, {task}: it must have {', '.join(names)}; found {entry}.")
        if any(isinstance(value, (str, bool)) for value in entry.values()):
            raise ValueError(
                f"{path}, {task}: {entry} must hold numbers (in YAML, 1.0e-5 is a number, but 1e-5 is text)."
            )
        try:
            hyperparameters[task] = Hyperparameters(**entry)
        except ValueError as error:
            raise ValueError(f"{path}, {task}: {error}") from error
    return hyperparameters


def order_tasks(tasks: dict[str, GlueTask], chosen: Iterable[str]) -> list[str]:
    """The names of the chosen tasks, each after the task that it starts from, and otherwise as in the file."""
    chosen = set(chosen)
    sources = {name: {task.transfer_from} & chosen for name, task in tasks.items() if name in chosen}
    try:
        return list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        raise ValueError(f"The tasks {', '.join(error.args[1])} start from each other.") from error


def own_share(shard: str | None, process: int, processes: int) -> tuple[int, int]:
    """Which of how many shares of the runs this process takes, counted from 0.

    Args:
        shard: `k/n`, the k-th of n machines or jobs; all if None.
        process: number of this process on this machine.
        processes: how many processes each machine has; the same on all machines.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard or "1/1")
    number, shards = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= shards:
        raise ValueError(f"`shard` is {shard!r}; it must be k/n with k from 1 to n, such as 3/8.")
    return (number - 1) * processes + process, shards * processes


def separate_processes() -> tuple[int, int]:
    """Make each process that `accelerate launch` starts independent, with its own GPU.

    Each takes runs of its own, since fine-tuning with batches of 2 to 32 gains nothing from data parallelism. Returns
    the number of this process, and how many there are.
    """
    process = int(os.environ.pop("RANK", 0))
    local = int(os.environ.pop("LOCAL_RANK", 0))
    processes = int(os.environ.pop("WORLD_SIZE", 1))
    # `is_cuda_available` asks NVML: once CUDA is initialised, it would not notice the changed variable.
    if processes > 1 and is_cuda_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        if local >= len(devices):
            raise RuntimeError(
                f"Process {local + 1} has no GPU: {len(devices)} are visible. Start one process for each."
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local]
    return process, processes
