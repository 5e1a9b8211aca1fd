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
from dataclasses import asdict, dataclass, fields
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path

import torch
import yaml
from accelerate.utils import is_cuda_available

from neobert_hf.common.results import check_same_settings, read_result
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints, delete_checkpoint


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

# Settings in which the runs of a task differ by design: they stand in the file's name, follow from it, or, as `start`,
# name the best run of the moment. In all others they must be the same.
OF_ONE_RUN = set("per_device_train_batch_size learning_rate weight_decay seed max_steps eval_steps start".split())


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
    # Asked for through NVML: CUDA, once it runs, does not see that the variable has changed.
    if processes > 1 and is_cuda_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
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
        """All runs of a task that have a score, the best first.

        Raises:
            ResultError: as `check_task`.
        """
        return sorted(
            (result for result in self.check_task(task) if result["score"] is not None),
            key=lambda result: -result["score"],
        )

    def diverged(self, task: str) -> list[str]:
        """The names of the runs that ended without a score."""
        return [result["run"] for result in self.check_task(task) if result["score"] is None]

    def check_task(self, task: str, settings: dict | None = None) -> list[dict]:
        """Read all results of a task.

        Args:
            task: its name.
            settings: that all must have, besides those of one run; if None, those of the first.

        Raises:
            ResultError: if a file is something else, or of other settings.
        """
        results = {file: read_result(file, KEYS) for file in sorted((self.folder / task).glob("bs*_seed*.json"))}
        for file, result in results.items():
            stored = {name: value for name, value in result["settings"].items() if name not in OF_ONE_RUN}
            settings = stored if settings is None else settings
            check_same_settings(file, stored, settings)
        return list(results.values())

    def find(self, run: Run) -> dict | None:
        """The result of a run, if it is finished.

        Raises:
            ResultError: if it is that of other hyperparameters, which names show with six digits.
        """
        if not self.file(run).is_file():
            return None
        result = read_result(self.file(run), KEYS)
        check_same_settings(self.file(run), result["hyperparameters"], asdict(run.hyperparameters))
        return result

    def tidy(self, run: Run) -> None:
        """Delete the checkpoints of a finished run, and every model of the task that a better one has replaced."""
        for checkpoint in complete_checkpoints(self.run_folder(run)):
            delete_checkpoint(checkpoint)
        # Only what a finished run has beaten: no other process waits for it, and none deletes the best.
        for result in self.of_task(run.task)[1:]:
            shutil.rmtree(self.folder / result["run"] / "model", ignore_errors=True)

    def best_model(self, task: str, weights: str) -> tuple[str, Path]:
        """The name of the best run of a task, and the folder of its model.

        Args:
            task: its name.
            weights: the fingerprint of those that it was trained from.

        Raises:
            CheckpointError: if there is none.
            ResultError: if it was trained from other weights.
        """
        results = self.of_task(task)
        if not results or not (model := self.folder / results[0]["run"] / "model").is_dir():
            found = f"{len(results)} results and no model of the best" if results else "no result with a score"
            raise CheckpointError(
                f"{self.folder / task} holds {found}, and another task starts from its best model: run `--task {task}` "
                "first, or set `transfer` to false."
            )
        name = results[0]["run"]
        found = results[0]["settings"].get("weights")
        check_same_settings(self.folder / f"{name}.json", {"weights": found}, {"weights": weights})
        return name, model

    def wait_for(self, runs: list[Run], seconds: float = 10, report: Callable[[str], None] = print) -> None:
        """Return when all of these runs, also those of other processes and machines, have a result."""
        waited = 0.0
        while missing := [run.name for run in runs if not self.file(run).is_file()]:
            if waited % 600 == 0:
                report(
                    f"waiting for {len(missing)} runs of other processes or shards: {', '.join(missing[:5])}"
                    f"{', ...' if len(missing) > 5 else ''}. If nothing runs them, start their shard, or the same "
                    "command without `--shard`."
                )
            time.sleep(seconds)
            waited += seconds
