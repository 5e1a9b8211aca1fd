"""The runs of a grid over GLUE tasks: which there are, whose they are, and their results in one folder.

A result file is written whole when its run is finished, which is never repeated. Every process knows its runs from its
number alone: no claims that outlive a killed process, no clocks to compare, and a shard that stops goes on when its own
command is repeated. Another split would finish a little sooner; runs are dealt out in turn, the slowest first.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path

import torch
import yaml

from neobert_hf.checkpoints import CheckpointError, complete_checkpoints, delete_checkpoint
from neobert_hf.glue_tasks import GlueTask
from neobert_hf.result_files import check_same_settings, read_result


@dataclass(frozen=True)
class Hyperparameters:
    """What the paper searches (Table 6)."""

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


# Of a result file.
KEYS = {"run", "task", "score", "metrics", "hyperparameters", "settings"}


def grid(batch_sizes: list[int], learning_rates: list[float], weight_decays: list[float]) -> list[Hyperparameters]:
    """All combinations, small batches first: they are the slowest."""
    return [Hyperparameters(*values) for values in product(sorted(batch_sizes), learning_rates, weight_decays)]


def read_hyperparameters(path: str) -> dict[str, Hyperparameters]:
    """Read a file such as `configs/glue/table6_4096.yaml`: one set for each task.

    Raises:
        ValueError: if an entry has other keys or values.
    """
    names, found = [one.name for one in fields(Hyperparameters)], {}
    for task, entry in (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}).items():
        if not isinstance(entry, dict) or sorted(entry) != sorted(names):
            raise ValueError(f"{path}, {task}: it must have {', '.join(names)}; found {entry}.")
        if any(isinstance(value, (str, bool)) for value in entry.values()):
            raise ValueError(f"{path}, {task}: {entry} must hold numbers (YAML takes 1.0e-5 for one, 1e-5 for a text).")
        found[task] = Hyperparameters(**entry)
    return found


def order_tasks(tasks: dict[str, GlueTask], chosen: list[str]) -> list[str]:
    """The chosen tasks, each after the one that it starts from, and otherwise as in the file.

    Raises:
        ValueError: if tasks start from each other.
    """
    sources = {name: {tasks[name].transfer_from} & set(chosen) for name in tasks if name in chosen}
    try:
        return list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        raise ValueError(f"The tasks {', '.join(error.args[1])} start from each other.") from error


def own_share(shard: str | None, process: int, processes: int) -> tuple[int, int]:
    """Which of how many shares of the runs this process takes, counted from 0.

    Args:
        shard: `k/n`, the k-th of n machines or jobs; all if None.
        process: of this machine.
        processes: of this machine, the same number on all.

    Raises:
        ValueError: if the shard is not of that form.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard or "1/1")
    number, shards = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= shards:
        raise ValueError(f"`shard` is {shard!r}; it must be k/n with k from 1 to n, such as 3/8.")
    return (number - 1) * processes + process, shards * processes


def leave_process_group() -> tuple[int, int]:
    """Make each process that `accelerate launch` starts a single one with its own GPU.

    Each takes runs of its own: fine-tuning with batches of 2 to 32 gains nothing from data parallelism.

    Returns:
        The number of this process, and how many there are.

    Raises:
        RuntimeError: if there are fewer GPUs than processes.
    """
    process, local = (int(os.environ.pop(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    processes = int(os.environ.pop("WORLD_SIZE", 1))
    if processes > 1 and torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        if local >= len(devices):
            raise RuntimeError(f"Process {local + 1} has no GPU: {len(devices)} are visible. Start one for each.")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local]
    return process, processes


class Results:
    """The results of one model: `<task>/<run>.json`, and beside it a folder of the run.

    Args:
        folder: of this model, which several machines may share.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, run: Run) -> Path:
        return self.folder / f"{run.name}.json"

    def run_folder(self, run: Run) -> Path:
        return self.folder / run.name

    def of_task(self, task: str) -> list[dict]:
        """All finished runs of a task, the best first.

        Raises:
            ResultError: if a file is something else.
        """
        results = [read_result(file, KEYS) for file in sorted((self.folder / task).glob("bs*_seed*.json"))]
        return sorted(results, key=lambda result: -result["score"])

    def check(self, run: Run, settings: dict) -> bool:
        """Whether the run is finished.

        Raises:
            ResultError: if it was with other settings.
        """
        if not self.file(run).is_file():
            return False
        check_same_settings(self.file(run), read_result(self.file(run), KEYS)["settings"], settings)
        return True

    def tidy(self, run: Run) -> None:
        """Delete the checkpoints of a finished run, and every model of the task that a better one has replaced."""
        for checkpoint in complete_checkpoints(self.run_folder(run)):
            delete_checkpoint(checkpoint)
        # Only what a finished run has beaten: no other process waits for it, and none deletes the best.
        for result in self.of_task(run.task)[1:]:
            shutil.rmtree(self.folder / result["run"] / "model", ignore_errors=True)

    def best_model(self, task: str) -> tuple[str, Path]:
        """The name of the best run of a task, and the folder of its model.

        Raises:
            CheckpointError: if there is none.
        """
        results = self.of_task(task)
        if not results or not (model := self.folder / results[0]["run"] / "model").is_dir():
            found = f"{len(results)} results and no model of the best" if results else "no result"
            raise CheckpointError(
                f"{self.folder / task} holds {found}, and another task starts from its best model: run `--task {task}` "
                "first, or set `transfer` to false."
            )
        return results[0]["run"], model

    def wait_for(self, runs: list[Run], seconds: float = 10, report: Callable[[str], None] = print) -> None:
        """Return when all of these runs, also those of other processes and machines, have a result."""
        waited = 0.0
        while missing := [run.name for run in runs if not self.file(run).is_file()]:
            if waited % 600 == 0:
                report(f"waiting for {len(missing)} runs of other processes or shards, such as {missing[0]}")
            time.sleep(seconds)
            waited += seconds
