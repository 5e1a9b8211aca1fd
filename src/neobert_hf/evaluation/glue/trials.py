"""The settings of the GLUE recipe, the trials that follow from them, and the results of those that are finished.

A trial is one training on one task with one seed and one set of hyperparameters.
"""

import json
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from neobert_hf.common.settings import read_entry, read_yaml
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.fine_tuning import FineTuningArguments


# What the paper searches (Table 6).
HYPERPARAMETERS = ("batch_size", "learning_rate", "weight_decay")
# Training arguments that belong to a single run, or follow from its batch size.
TRIAL_ARGUMENTS = {"per_device_train_batch_size", "learning_rate", "weight_decay", "seed", "max_steps"}


@dataclass
class GlueSettings:
    """Which model is trained, on which tasks, with which hyperparameters."""

    model: str = field(metadata={"help": "an encoder: path or Hub id", "path": "or Hub id"})
    task: list[str] = field(metadata={"help": "names from `task_config`, or `all`"})
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
    hyperparameters: str | None = field(
        default=None, metadata={"help": "YAML file with the hyperparameters of each task", "path": True}
    )
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "one run for each seed"})
    grid: bool = field(default=False, metadata={"help": "search the three lists instead of using `hyperparameters`"})
    batch_sizes: list[int] = field(default_factory=list, metadata={"help": "batch sizes of the grid"})
    learning_rates: list[float] = field(default_factory=list, metadata={"help": "learning rates of the grid"})
    weight_decays: list[float] = field(default_factory=list, metadata={"help": "weight decays of the grid"})
    published: str | None = field(default=None, metadata={"help": "YAML file of rows for the report", "path": True})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


@dataclass
class GlueArguments(FineTuningArguments):
    """Batch size, learning rate and weight decay come from `hyperparameters` or the grid, unless given here."""

    per_device_train_batch_size: int | None = field(default=None, metadata={"help": "instead of the task's value"})
    learning_rate: float | None = field(default=None, metadata={"help": "peak; instead of the task's value"})
    weight_decay: float | None = field(default=None, metadata={"help": "instead of the task's value"})
    eval_steps: int | None = field(
        default=None, metadata={"help": "steps between evaluations; min(500, a tenth of an epoch) if unset"}
    )

    def evaluated_every(self, epoch: int) -> int:
        """As in the code of the paper."""
        return max(1, min(500, epoch // 10))


@dataclass(frozen=True)
class Trial:
    """One training on one task."""

    task: str
    seed: int
    batch_size: int
    learning_rate: float
    weight_decay: float

    @property
    def hyperparameters(self) -> str:
        return f"bs{self.batch_size}_lr{self.learning_rate:g}_wd{self.weight_decay:g}"

    @property
    def name(self) -> str:
        return f"{self.task}/{self.hyperparameters}_seed{self.seed}"

    def arguments(self, shared: GlueArguments, folder: Path) -> GlueArguments:
        """The Trainer's arguments of this trial."""
        return replace(
            shared,
            output_dir=str(folder),
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )


def plan_trials(settings: GlueSettings, arguments: GlueArguments, tasks: dict[str, GlueTask]) -> list[Trial]:
    """All runs, in the order of the tasks; small batches first, since they are the slowest.

    Raises:
        ValueError: if hyperparameters are missing, or `seed` is given.
    """
    if not settings.seeds or arguments.seed != GlueArguments.seed:
        raise ValueError(f"`seed` is {arguments.seed} and `seeds` {settings.seeds}: give one or more `seeds` only.")
    # The values of each hyperparameter to try, by task. Those of the command line count for all tasks.
    if settings.grid:
        lists = (sorted(settings.batch_sizes), settings.learning_rates, settings.weight_decays)
        values = dict.fromkeys(tasks, dict(zip(HYPERPARAMETERS, lists)))
    else:
        values = read_hyperparameters(settings.hyperparameters) if settings.hyperparameters else {}
    given = (arguments.per_device_train_batch_size, arguments.learning_rate, arguments.weight_decay)
    given = {name: [value] for name, value in zip(HYPERPARAMETERS, given) if value is not None}
    runs = []
    for task in tasks:
        to_try = values.get(task, {}) | given
        if missing := [name for name in HYPERPARAMETERS if not to_try.get(name)]:
            raise ValueError(f"{task} has no {', '.join(missing)}: add it to `hyperparameters`, or give it.")
        for point in product(*(to_try[name] for name in HYPERPARAMETERS)):
            runs += [Trial(task, seed, *point) for seed in settings.seeds]
    return runs


def read_hyperparameters(path: str) -> dict[str, dict[str, list[float]]]:
    """Read a file such as `configs/glue/table6_4096.yaml`: for each task, one value of each hyperparameter."""
    values = {}
    for task, entry in read_yaml(path, "hyperparameters").items():
        run = read_entry(Trial, f"{path}, {task}", entry, task=task, seed=0)
        # For YAML, 1e-5 is a text.
        point = (run.batch_size, float(run.learning_rate), float(run.weight_decay))
        values[task] = {name: [value] for name, value in zip(HYPERPARAMETERS, point)}
    return values


def read_results(folder: Path, task: str = "*") -> dict[Path, dict]:
    """The results of the finished runs of one model on a task, or on all tasks, by file."""
    files = sorted(folder.glob(f"{task}/*_seed*.json"))
    return {file: json.loads(file.read_text(encoding="utf-8")) for file in files}


def best_first(folder: Path, task: str) -> list[dict]:
    """The results of the finished runs of one model on a task that have a score, the best first."""
    scored = [result for result in read_results(folder, task).values() if result["score"] is not None]
    return sorted(scored, key=lambda result: -result["score"])
