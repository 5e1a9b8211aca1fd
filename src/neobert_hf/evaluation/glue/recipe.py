"""The GLUE recipe: one run from its start to its result file, and what the runs of a model share.

Several processes and machines may write the folder of a model. A task that starts from the best model of another task
waits until all runs of that one have a result.
"""

import shutil
import time
from dataclasses import asdict, replace
from functools import partial
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
from neobert_hf.common.fingerprints import check_same_settings, depends_on, fingerprint
from neobert_hf.common.tokenizers import length_to_cut_at
from neobert_hf.evaluation.glue.runs import GlueArguments, GlueSettings, Run, best_first, read_results
from neobert_hf.evaluation.glue.tasks import GlueTask, load_task, report_repeated_rows
from neobert_hf.evaluation.results import ADVICE
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.fine_tuning import (
    FineTuningTrainer,
    StartingPoint,
    build_model,
    newest_checkpoints,
    task_config,
    tokenizer_of,
)
from neobert_hf.training.metrics import ScoreMetric
from neobert_hf.training.run_checkpoints import (
    CheckpointError,
    complete_checkpoints,
    delete_checkpoint,
    newest_checkpoint,
)


# Training arguments that belong to a single run, or follow from its batch size.
RUN_ARGUMENTS = {"per_device_train_batch_size", "learning_rate", "weight_decay", "seed", "max_steps"}


def build_classifier(start: StartingPoint, task: GlueTask, dropout: float) -> PreTrainedModel:
    """Any encoder of Transformers in float32, with a new head for the labels of the task."""
    problem = "single_label_classification" if task.labels is not None else "regression"
    config = task_config(start, task.labels or ["score"], problem, dropout)
    return build_model(start, AutoModelForSequenceClassification, config)


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


def find_start(settings: GlueSettings) -> StartingPoint:
    """The model that the settings name, or the mean of its last checkpoints."""
    model, backbone = settings.model, []
    if settings.average_checkpoints:
        backbone = newest_checkpoints(settings.model, settings.average_checkpoints)
        model = str(backbone[-1])
    name = " + ".join(map(str, backbone)) or model
    return StartingPoint(model, name, backbone, settings.trust_remote_code)


class GlueEvaluation:
    """The runs of one model on all chosen tasks, including those of other processes and shards.

    Args:
        folder: the folder of this model.
        tasks: the chosen tasks.
        runs: all runs, of which other processes may do a part.
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
        self.runs = runs
        self.start = find_start(settings)
        self.weights = self.start.fingerprint()
        # The rows of each task, and everything that the results of all its runs depend on.
        self.data: dict[str, DatasetDict] = {}
        self.shared: dict[str, dict] = {}

    def prepare(self) -> None:
        """Load the data of all tasks, and check them and earlier results before anything is trained.

        Raises:
            SettingsMismatch: if a result in the folder is of other weights, settings or data.
        """
        for name, task in self.tasks.items():
            self.data[name] = load_task(task, self.settings.data_dir)
            report_repeated_rows(task, self.data[name])
            self.shared[name] = self._depends_on(task)
        for file, result in read_results(self.folder).items():
            # A row of the report is one model, also on the tasks that are not chosen now.
            stored, now = result["settings"], self.shared.get(result["task"])
            if now is None:
                stored, now = {"model": stored["model"]}, {"model": self.weights}
            check_same_settings(file, stored, now, ADVICE)
        for name, task in self.tasks.items():
            unfinished = any(run.task == name and not self._file(run).exists() for run in self.runs)
            if unfinished and (source := self._source_of(task)) is not None and source not in self.tasks:
                self._best_model(source)

    def _depends_on(self, task: GlueTask) -> dict:
        """What the results of all runs of a task depend on. Data are compared by their content, not by their place."""
        incidental = ("source", "subset", "only_named", "empty_texts")
        return depends_on(
            result_settings(self.arguments, leave_out=RUN_ARGUMENTS | {"num_train_epochs"}),
            model=self.weights,
            transfer=self._source_of(task) is not None,
            max_length=self.settings.max_length,
            classifier_dropout=self.settings.classifier_dropout,
            early_stopping_patience=self.arguments.early_stopping_patience,
            task={name: value for name, value in asdict(task).items() if name not in incidental},
            data={split: fingerprint(rows) for split, rows in self.data[task.name].items()},
            # As the user gave them; those of a run follow from its batch size.
            schedule={name: getattr(self.arguments, name) for name in ("num_train_epochs", "max_steps", "eval_steps")},
        )

    def _file(self, run: Run) -> Path:
        return self.folder / f"{run.name}.json"

    def _source_of(self, task: GlueTask) -> str | None:
        """The task whose best model a task starts from."""
        return task.transfer_from if self.settings.transfer else None

    def _best_model(self, task: str) -> tuple[str, Path]:
        """The name of the best run of a task, and the folder of its model."""
        for result in best_first(self.folder, task)[:1]:
            if (model := self.folder / result["run"] / "model").is_dir():
                return result["run"], model
        raise CheckpointError(
            f"{self.folder / task} does not hold the best model of {task}, from which another task starts: run "
            f"`--task {task}` first, or set `transfer` to false."
        )

    def complete(self, run: Run) -> None:
        """Do what is left of a run: everything, or only tidy up if it already has a result."""
        with folder_lock(self.folder / run.name):
            if not self._file(run).exists():
                self._fine_tune(run)
            for checkpoint in complete_checkpoints(self.folder / run.name):
                delete_checkpoint(checkpoint)
            # Only models of finished runs that a better one has beaten: no process waits for them.
            for result in best_first(self.folder, run.task)[1:]:
                shutil.rmtree(self.folder / result["run"] / "model", ignore_errors=True)

    def _fine_tune(self, run: Run) -> None:
        """Training, the best model, the result."""
        began, error = time.monotonic(), None
        self._wait_for(self._source_of(self.tasks[run.task]))
        trainer, start, resume = self._build_trainer(run)
        steps = f"{trainer.args.max_steps:,} steps on {trainer.args.device}, evaluated every {trainer.args.eval_steps}"
        print(f"{run.name}: {steps}, from {resume or start.name}", flush=True)
        try:
            trainer.train_to_the_end(resume)
            trainer.save_best(self.folder / run.name / "model")
        except FloatingPointError as diverged:
            # Some points of a grid diverge. That is their result, and the other points do not depend on them.
            if not self.settings.grid:
                raise
            error = str(diverged)
        evaluations = trainer.evaluations()
        best = next((each for each in evaluations if each["step"] == trainer.state.best_global_step and not error), {})
        result = asdict(run) | {
            "run": run.name,
            "score": best.get("score"),
            "error": error,
            "metrics": {name: best[name] for name in best if name not in ("step", "epoch", "loss", "score")},
            "best_step": best.get("step"),
            "last_step": trainer.state.global_step,
            "start": trainer.run_settings["start"],
            "seconds": round(time.monotonic() - began, 1),
            "settings": self.shared[run.task],
            "evaluations": evaluations,
        }
        # Written last: it marks the run as finished.
        write_json(self._file(run), result)
        score = f"diverged. {error}" if error else f"{100 * best['score']:.2f} at step {best['step']:,}"
        print(f"{run.name}: {score}", flush=True)

    def _build_trainer(self, run: Run) -> tuple[FineTuningTrainer, StartingPoint, Path | None]:
        """The trainer of a run, where it starts, and the checkpoint to resume from, if there is one."""
        task, splits, folder = self.tasks[run.task], self.data[run.task], self.folder / run.name
        start, identity = self.start, self.weights
        if (source := self._source_of(task)) is not None:
            identity, model = self._best_model(source)
            start = replace(start, name=identity, backbone=[model])
        arguments = run.arguments(self.arguments, folder, len(splits[task.train]))
        settings = self.shared[run.task] | asdict(run) | {"start": identity}
        set_seed(run.seed)
        resume, _ = newest_checkpoint(folder, settings)
        classifier = build_classifier(start, task, self.settings.classifier_dropout)
        tokenizer = tokenizer_of(start)
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
        return trainer, start, resume

    def _wait_for(self, task: str | None) -> None:
        """Wait until all runs of a task have a result, including those of other processes and machines."""
        said = None
        while missing := [run.name for run in self.runs if run.task == task and not self._file(run).exists()]:
            if missing != said:
                print(f"waiting for {', '.join(missing)}, the runs of other processes or shards", flush=True)
            said = missing
            time.sleep(10)
