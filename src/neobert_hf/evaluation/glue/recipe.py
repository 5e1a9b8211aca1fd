"""The GLUE recipe (paper, section 5.1 and appendix C): its settings, its runs, and a run from start to result file.

A run is one training on one task with one seed and one set of hyperparameters. The folder of a model has the result of
each run in `<task>/<run>.json`, written whole when the run is finished, and the model of the best run of each task. A
run with a result is never repeated.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from datasets import DatasetDict, concatenate_datasets
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.run import check_same_identity, identity_of
from neobert_hf.common.settings import read_entry, read_yaml
from neobert_hf.common.tokenizers import length_to_cut_at
from neobert_hf.evaluation.glue.metrics import ScoreMetric
from neobert_hf.evaluation.glue.tasks import GlueTask, load_task
from neobert_hf.evaluation.results import ADVICE
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer, load_for_task
from neobert_hf.training.run import (
    CheckpointError,
    complete_checkpoints,
    delete_checkpoint,
    newest_checkpoint,
)


# What the paper searches (Table 6).
HYPERPARAMETERS = ("batch_size", "learning_rate", "weight_decay")
# Training arguments that belong to a single run, or follow from its batch size.
RUN_ARGUMENTS = {"per_device_train_batch_size", "learning_rate", "weight_decay", "seed", "max_steps"}


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


@dataclass(frozen=True)
class Run:
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

    def arguments(self, shared: GlueArguments, folder: Path, rows: int) -> GlueArguments:
        """The Trainer's arguments of this run with `rows` training rows: steps, evaluations, checkpoints."""
        arguments = replace(
            shared,
            output_dir=str(folder),
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )
        return arguments.planned(rows)


def plan_runs(settings: GlueSettings, arguments: GlueArguments, tasks: dict[str, GlueTask]) -> list[Run]:
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
            runs += [Run(task, seed, *point) for seed in settings.seeds]
    return runs


def read_hyperparameters(path: str) -> dict[str, dict[str, list[float]]]:
    """Read a file such as `configs/glue/table6_4096.yaml`: for each task, one value of each hyperparameter."""
    values = {}
    for task, entry in read_yaml(path, "hyperparameters").items():
        run = read_entry(Run, f"{path}, {task}", entry, task=task, seed=0)
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


def load_classifier(
    settings: GlueSettings, task: GlueTask, backbone: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with a new head for the labels of the task, or the backbone of another task's model with one."""
    return load_for_task(
        settings.model,
        AutoModelForSequenceClassification,
        labels=task.labels or ["score"],
        problem="single_label_classification" if task.labels is not None else "regression",
        dropout=settings.classifier_dropout,
        backbone=backbone,
        trust_remote_code=settings.trust_remote_code,
    )


def tokenize(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """Replace texts by at most `max_length` ids; of a pair, the longer text is cut first."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

    columns = next(iter(splits.values())).column_names
    texts = [name for name in columns if name != "label"]
    return splits.map(encode, batched=True, remove_columns=texts, desc="tokenizing")


def score_splits(prediction: EvalPrediction, task: GlueTask, rows: dict[str, int]) -> dict[str, float]:
    """Metrics on each validation split, and their mean as `score`.

    Args:
        prediction: predictions and labels of all splits, one split after the other.
        rows: number of rows of each split.
    """
    logits, labels = prediction.predictions, prediction.label_ids
    # `argmax` would turn NaN into label 0.
    if not np.isfinite(logits).all():
        raise FloatingPointError("The model gives scores that are not finite. Train with a smaller `learning_rate`.")
    predictions = logits.argmax(-1) if task.labels is not None else logits[:, 0]
    metric = ScoreMetric(task.metrics)
    values, start = {}, 0
    for split, number in rows.items():
        part = slice(start, start + number)
        computed = metric.compute(predictions=predictions[part], references=labels[part])
        values |= {name if len(rows) == 1 else f"{split}_{name}": value for name, value in computed.items()}
        start += number
    return values | {"score": sum(values.values()) / len(values)}


class GlueEvaluation:
    """The runs of one model on all chosen tasks.

    Args:
        folder: the folder of this model.
        tasks: the chosen tasks, each after the task that it starts from.
        runs: what `plan_runs` returned.

    Raises:
        SettingsMismatch: if a result in the folder is of other weights, settings or data.
        CheckpointError: if a task starts from one that is neither finished nor chosen.
    """

    def __init__(
        self,
        settings: GlueSettings,
        arguments: GlueArguments,
        folder: Path,
        tasks: dict[str, GlueTask],
        runs: list[Run],
    ):
        self.settings = settings
        self.arguments = arguments
        self.folder = folder
        self.tasks = tasks
        # All data and earlier results are checked before anything is trained.
        self.weights = model_fingerprint(settings.model)
        self.data = {name: load_task(task, settings.data_dir) for name, task in tasks.items()}
        self.shared = {name: self._depends_on(task) for name, task in tasks.items()}
        for file, result in read_results(folder).items():
            # A row of the report is one model, also on the tasks that are not chosen now.
            stored, now = result["settings"], self.shared.get(result["task"])
            if now is None:
                stored, now = {"model": stored["model"]}, {"model": self.weights}
            check_same_identity(file, stored, now, ADVICE)
        for run in runs:
            if (source := self._source_of(run)) not in (None, *tasks) and not self._file(run).exists():
                self._best_model(source)

    def _depends_on(self, task: GlueTask) -> dict:
        """What the results of all runs of a task depend on. Data are compared by their content, not by their place."""
        return identity_of(
            result_settings(self.arguments, leave_out=RUN_ARGUMENTS | {"num_train_epochs"}),
            model=self.weights,
            transfer=self.settings.transfer and task.transfer_from is not None,
            max_length=self.settings.max_length,
            classifier_dropout=self.settings.classifier_dropout,
            early_stopping_patience=self.arguments.early_stopping_patience,
            task={name: value for name, value in asdict(task).items() if name not in ("source", "subset")},
            data={split: fingerprint(rows) for split, rows in self.data[task.name].items()},
            # As the user gave them; those of a run follow from its batch size.
            schedule={name: getattr(self.arguments, name) for name in ("num_train_epochs", "max_steps", "eval_steps")},
        )

    def _file(self, run: Run) -> Path:
        return self.folder / f"{run.name}.json"

    def _source_of(self, run: Run) -> str | None:
        """The task whose best model a run starts from."""
        return self.tasks[run.task].transfer_from if self.settings.transfer else None

    def _best_model(self, task: str) -> tuple[str, Path]:
        """The name of the best run of a task, and the folder of its model."""
        finished = best_first(self.folder, task)
        if not finished:
            raise CheckpointError(
                f"{self.folder / task} has no score of {task}, from whose best model another task starts: run "
                f"`--task {task}` first, or set `transfer` to false."
            )
        return finished[0]["run"], self.folder / finished[0]["run"] / "model"

    def complete(self, run: Run) -> None:
        """Do what is left of a run: everything, or only tidy up if it already has a result."""
        # Another command may do other tasks or seeds in the same folder.
        with folder_lock(self.folder / run.name):
            if not self._file(run).exists():
                self._fine_tune(run)
            for checkpoint in complete_checkpoints(self.folder / run.name):
                delete_checkpoint(checkpoint)
            # Only models of finished runs that a better one has beaten.
            for result in best_first(self.folder, run.task)[1:]:
                shutil.rmtree(self.folder / result["run"] / "model", ignore_errors=True)

    def _fine_tune(self, run: Run) -> None:
        """Training, the best model, the result.

        A run whose loss, weights or predictions become infinite ends there, and the other runs go on: its result is
        that of its best evaluation until then, as of any other run, or None if there is none.
        """
        trainer, resume = self._build_trainer(run)
        steps = f"{trainer.args.max_steps:,} steps on {trainer.args.device}, evaluated every {trainer.args.eval_steps}"
        print(f"{run.name}: {steps}{f', from {resume}' if resume else ''}", flush=True)
        diverged = None
        try:
            trainer.train_to_the_end(resume)
        except FloatingPointError as error:
            diverged = trainer.state.global_step
            # The rest of the message is about resuming.
            print(f"{run.name} diverged at step {diverged:,}: {str(error).partition('. ')[0]}", flush=True)
        evaluations = trainer.evaluations()
        best = next((each for each in evaluations if each["step"] == trainer.state.best_global_step), {})
        if best:
            trainer.save_best(self.folder / run.name / "model")
        result = asdict(run) | {
            "run": run.name,
            "hyperparameters": run.hyperparameters,
            "score": best.get("score"),
            "metrics": {name: best[name] for name in best if name not in ("step", "epoch", "loss", "score")},
            "best_step": best.get("step"),
            "diverged": diverged,
            "start": trainer.run_settings["start"],
            "settings": self.shared[run.task],
            "evaluations": evaluations,
        }
        # Written last: it marks the run as finished.
        write_json(self._file(run), result)
        if best:
            print(f"{run.name}: {100 * best['score']:.2f} at step {best['step']:,}", flush=True)

    def _build_trainer(self, run: Run) -> tuple[FineTuningTrainer, Path | None]:
        """The trainer of a run, and the checkpoint to resume from, if there is one."""
        task, splits, folder = self.tasks[run.task], self.data[run.task], self.folder / run.name
        start, backbone = self.weights, None
        if (source := self._source_of(run)) is not None:
            start, backbone = self._best_model(source)
        arguments = run.arguments(self.arguments, folder, len(splits[task.train]))
        settings = self.shared[run.task] | asdict(run) | {"start": start}
        set_seed(run.seed)
        resume = newest_checkpoint(folder, settings)
        classifier, tokenizer = load_classifier(self.settings, task, backbone)
        rows = tokenize(splits, tokenizer, length_to_cut_at(classifier, tokenizer, self.settings.max_length))
        held_out = {name: len(rows[name]) for name in task.validation}
        trainer = FineTuningTrainer(
            classifier,
            arguments,
            train_dataset=rows[task.train],
            eval_dataset=concatenate_datasets([rows[name] for name in held_out]),
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=partial(score_splits, task=task, rows=held_out),
            settings=settings,
        )
        return trainer, resume
