"""The settings of a GLUE evaluation, the runs that follow from them, and their results, a JSON file for each run.

Every process knows its runs from its number alone. So no claim on a run can outlive a killed process, and a stopped
shard resumes when its own command is repeated.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

from neobert_hf.common.settings import read_yaml
from neobert_hf.data.entries import read_entry
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.fine_tuning import FineTuningArguments


@dataclass
class GlueSettings:
    """Which model is trained, on which tasks, with which hyperparameters."""

    model: str = field(
        metadata={
            "help": "an encoder: path or Hub id; with `average_checkpoints` the folder of a run",
            "path": "or Hub id",
        }
    )
    task: list[str] = field(
        metadata={"help": "names from `task_config`, or `all` except those that it marks as `only_named`"}
    )
    task_config: str = field(metadata={"help": "YAML file of tasks", "path": True})
    name: str | None = field(
        default=None, metadata={"help": "name of the model in the report; the last part of `model` if unset"}
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "folder with the tasks as Parquet, JSON lines or CSV, instead of the Hub", "path": True},
    )
    max_length: int = field(default=1024, metadata={"help": "tokens; the longer text of a pair is cut first"})
    classifier_dropout: float = field(default=0.1, metadata={"help": "dropout before the classifier"})
    transfer: bool = field(
        default=True, metadata={"help": "start a task from the best model of another task, as `task_config` says"}
    )
    average_checkpoints: int = field(
        default=0, metadata={"help": "start from the mean of the last n checkpoints of the run `model`"}
    )
    hyperparameters: str | None = field(
        default=None, metadata={"help": "YAML file with the hyperparameters of each task", "path": True}
    )
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "one run for each seed"})
    grid: bool = field(default=False, metadata={"help": "search the three lists instead of using `hyperparameters`"})
    batch_sizes: list[int] = field(default_factory=list, metadata={"help": "batch sizes of the grid"})
    learning_rates: list[float] = field(default_factory=list, metadata={"help": "learning rates of the grid"})
    weight_decays: list[float] = field(default_factory=list, metadata={"help": "weight decays of the grid"})
    shard: str | None = field(default=None, metadata={"help": "k/n: do the share of the k-th of n machines or jobs"})
    published: str | None = field(default=None, metadata={"help": "YAML file of rows for the report", "path": True})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


@dataclass
class GlueArguments(FineTuningArguments):
    """Batch size, learning rate and weight decay come from `hyperparameters` or the grid, unless given here."""

    per_device_train_batch_size: int | None = field(default=None, metadata={"help": "instead of the task's value"})
    learning_rate: float | None = field(default=None, metadata={"help": "peak; instead of the task's value"})
    weight_decay: float | None = field(default=None, metadata={"help": "instead of the task's value"})


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
    """One training on one task. The folder of a model has its result in `<name>.json` and its best model in `<name>/`.

    A result file is written, whole, when its run is finished. A run with a result is never repeated.
    """

    task: str
    hyperparameters: Hyperparameters
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.hyperparameters}_seed{self.seed}"

    def arguments(self, shared: GlueArguments, folder: Path, rows: int) -> GlueArguments:
        """The Trainer's arguments of this run with `rows` training rows: steps, evaluations, checkpoints."""
        arguments = replace(
            shared,
            output_dir=str(folder),
            per_device_train_batch_size=self.hyperparameters.batch_size,
            learning_rate=self.hyperparameters.learning_rate,
            weight_decay=self.hyperparameters.weight_decay,
            seed=self.seed,
        )
        return arguments.planned(rows)


def read_results(folder: Path, task: str = "*") -> dict[Path, dict]:
    """The results of the finished runs of one model on a task, or on all tasks, by file."""
    files = sorted(folder.glob(f"{task}/*_seed*.json"))
    return {file: json.loads(file.read_text(encoding="utf-8")) for file in files}


def best_first(folder: Path, task: str) -> list[dict]:
    """The results of a task that have a score; a run that diverged has none."""
    scored = [result for result in read_results(folder, task).values() if result["score"] is not None]
    return sorted(scored, key=lambda result: -result["score"])


def grid(settings: GlueSettings) -> list[Hyperparameters]:
    """All combinations, small batches first: they are the slowest."""
    lists = sorted(settings.batch_sizes), settings.learning_rates, settings.weight_decays
    if not all(lists):
        raise ValueError("`grid` needs `batch_sizes`, `learning_rates` and `weight_decays`, but one of them is empty.")
    return [Hyperparameters(*values) for values in product(*lists)]


def read_hyperparameters(path: str) -> dict[str, Hyperparameters]:
    """Read a file such as `configs/glue/table6_4096.yaml`: one set for each task."""
    found = {}
    for task, entry in read_yaml(path).items():
        found[task] = read_entry(Hyperparameters, f"{path}, {task}", entry)
        if text := [value for value in entry.values() if isinstance(value, str)]:
            raise ValueError(f"{path}, {task}: {text[0]!r} is text; in YAML, 1.0e-5 is a number, and 1e-5 is text.")
    return found


def plan_runs(settings: GlueSettings, arguments: GlueArguments, tasks: dict[str, GlueTask]) -> list[Run]:
    """All runs of all processes and shards, in order."""
    if not settings.seeds or arguments.seed != GlueArguments.seed:
        raise ValueError(f"`seed` is {arguments.seed} and `seeds` {settings.seeds}: give one or more `seeds` only.")
    numbers = [name for name, task in tasks.items() if task.labels is None]
    if arguments.label_smoothing_factor and numbers:
        raise ValueError(f"`label_smoothing_factor` is for classes, but the labels of {numbers[0]} are numbers.")
    given = {
        "batch_size": arguments.per_device_train_batch_size,
        "learning_rate": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if settings.grid and given:
        raise ValueError(f"`grid` searches batch sizes, learning rates and weight decays, but {min(given)!r} is set.")
    best = read_hyperparameters(settings.hyperparameters) if settings.hyperparameters else {}
    runs = []
    for name in tasks:
        values = (asdict(best[name]) if name in best else {}) | given
        if len(values) < 3 and not settings.grid:
            raise ValueError(
                f"There are no hyperparameters for {name} in {settings.hyperparameters}: add them, or give "
                "`per_device_train_batch_size`, `learning_rate` and `weight_decay`."
            )
        points = grid(settings) if settings.grid else [Hyperparameters(**values)]
        runs += [Run(name, point, seed) for point in points for seed in settings.seeds]
    return runs


def own_share(shard: str | None, process: int, processes: int) -> tuple[int, int]:
    """Which of how many shares of the runs this process takes, counted from 0. Runs are dealt out in turn.

    Args:
        shard: `k/n`, the k-th of n machines or jobs; all if None.
        process: number of this process on this machine.
        processes: how many processes each machine has; the same on all machines.
    """
    number, _, shards = (shard or "1/1").partition("/")
    if not (number.isdecimal() and shards.isdecimal() and 1 <= int(number) <= int(shards)):
        raise ValueError(f"`shard` is {shard!r}; it must be k/n with k from 1 to n, such as 3/8.")
    return (int(number) - 1) * processes + process, int(shards) * processes


def separate_processes() -> tuple[int, int]:
    """Make each process that `accelerate launch` starts independent, with its own GPU.

    Each takes runs of its own, since fine-tuning with batches of 2 to 32 gains nothing from data parallelism. To be
    called before anything asks for the GPUs.

    Returns:
        The number of this process, and how many there are.
    """
    process, local, processes = (
        int(os.environ.pop(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    if processes > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if visible else str(local)
    return process, processes
