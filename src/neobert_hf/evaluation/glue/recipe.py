"""The GLUE recipe (paper, section 5.1 and appendix C): many trials of the fine-tuning of `neobert_hf.tasks`.

The folder of a model has the result of each trial in `<task>/<trial>.json`, written whole when the trial is finished,
and the model of the best trial of each task. A trial with a result is never repeated.
"""

import shutil
import statistics
from dataclasses import asdict
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.paths import check_complete, name_of_model
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import check_inputs, check_same_identity, identity_of, mark_folder
from neobert_hf.evaluation.glue.metrics import ScoreMetric
from neobert_hf.evaluation.glue.report import best_trials, read_published, write_report
from neobert_hf.evaluation.glue.tasks import GlueTask, choose_tasks, load_task
from neobert_hf.evaluation.glue.trials import (
    TRIAL_ARGUMENTS,
    GlueArguments,
    GlueSettings,
    Trial,
    best_first,
    plan_trials,
    read_results,
)
from neobert_hf.evaluation.results import ADVICE
from neobert_hf.tasks.recipe import build_trainer
from neobert_hf.tasks.texts import TextTask
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.run import (
    CheckpointError,
    Run,
    check_alone,
    complete_checkpoints,
    delete_checkpoint,
    newest_checkpoint,
)


@recipe
def run_glue(settings: GlueSettings, arguments: GlueArguments) -> Result:
    """Fine-tune and evaluate any encoder on GLUE as the paper does (section 5.1, appendix C), or on your own task.

    Without `grid` each task gets the hyperparameters of Table 6. RTE, STS-B, MRPC and QNLI start from the best MNLI
    model. Called again after an interruption, it does not repeat finished trials, and goes on with the interrupted one,
    on a CPU bit for bit. Several processes with other tasks may write to the same folder. `output_dir` gets a folder
    for each model, with a JSON file for each trial and the best model of each task, and a report on all models.

    Returns:
        `scores`: by task the mean score and metrics over seeds of the best hyperparameters; `output`, the report.
    """
    # 1. Settings and all trials
    check_alone(arguments)
    tasks = choose_tasks(settings.task_config, settings.task)
    trials = plan_trials(settings, arguments, tasks)
    published = read_published(settings.published) if settings.published else None
    output, name = Path(arguments.output_dir), name_of_model(settings.name, settings.model)
    inputs = ("model", "task_config", "data_dir", "hyperparameters", "published")
    check_inputs(output, (name, "report.md"), {each: getattr(settings, each) for each in inputs})
    check_complete(settings.model, "model")

    # 2. The weights, data and earlier results of all tasks are checked before anything is trained
    evaluation = GlueEvaluation(settings, arguments, output / name, tasks, trials)
    # Results say themselves whose they are, so that several commands may write the folder; each locks its trial's.
    mark_folder(output, "run_glue", ("report.md",))

    # 3. Fine-tuning, trial by trial
    print(f"{name}: {len(trials)} trials on {len(tasks)} tasks", flush=True)
    for trial in trials:
        evaluation.complete(trial)

    # 4. Report on all models in the folder
    print(write_report(output, published), f"{output / 'report.md'}; the models are in {output / name}", flush=True)
    best = {task: best_trials(list(read_results(output / name, task).values())) for task in tasks}
    scores = {task: mean_metrics(results) for task, results in best.items() if results}
    return Result(scores=scores, output=output / "report.md")


def mean_metrics(results: list[dict]) -> dict[str, float]:
    """The score and the metrics, as means over results."""
    found = [{"score": result["score"], **result["metrics"]} for result in results]
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


class GlueTexts(TextTask):
    """The rows of a task of GLUE. Those of several validation splits stand one after the other, and have one score."""

    def __init__(self, task: GlueTask, splits: DatasetDict):
        self.regression = task.labels is None
        self.labels = task.labels or ["score"]
        self.problem = "regression" if self.regression else "single_label_classification"
        self.metric = ScoreMetric(task.metrics)
        self.sizes = {name: len(splits[name]) for name in task.validation}
        held_out = concatenate_datasets([splits[name] for name in task.validation])
        self.tables = DatasetDict(train=splits[task.train], validation=held_out)

    def predict(self, rows: Dataset, inputs: Dataset, logits: np.ndarray) -> np.ndarray:
        # `argmax` would turn NaN into label 0.
        if not np.isfinite(logits).all():
            raise FloatingPointError(
                "The model gives scores that are not finite. Train with a smaller `learning_rate`."
            )
        return logits[:, 0] if self.regression else logits.argmax(-1)

    def metrics(self, rows: Dataset, found: np.ndarray) -> dict[str, float]:
        """Those of each validation split, with its name if there are several."""
        values, right, start = {}, np.array(rows["label"][:]), 0
        for split, size in self.sizes.items():
            part = slice(start, start + size)
            computed = self.metric.compute(predictions=found[part], references=right[part])
            values |= {name if len(self.sizes) == 1 else f"{split}_{name}": value for name, value in computed.items()}
            start += size
        return values

    def score(self, metrics: dict[str, float]) -> float:
        return sum(metrics.values()) / len(metrics)


class GlueEvaluation:
    """The trials of one model on all chosen tasks.

    Args:
        folder: the folder of this model.
        tasks: the chosen tasks, each after the task that it starts from.
        trials: what `plan_trials` returned.

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
        trials: list[Trial],
    ):
        self.settings = settings
        self.arguments = arguments
        self.folder = folder
        self.tasks = tasks
        # All data and earlier results are checked before anything is trained.
        self.weights = model_fingerprint(settings.model)
        self.data = {name: load_task(task, settings.data_dir) for name, task in tasks.items()}
        self.identities = {name: self._identity(task) for name, task in tasks.items()}
        for file, result in read_results(folder).items():
            # A row of the report is one model, also on the tasks that are not chosen now.
            stored, now = result["identity"], self.identities.get(result["task"])
            if now is None:
                stored, now = {"model": stored["model"]}, {"model": self.weights}
            check_same_identity(file, stored, now, ADVICE)
        for trial in trials:
            if (source := self._source_of(trial)) not in (None, *tasks) and not self._file(trial).exists():
                self._best_model(source)

    def _identity(self, task: GlueTask) -> dict:
        """What the results of all trials of a task depend on. Data are compared by their content."""
        return identity_of(
            result_settings(self.arguments, leave_out=TRIAL_ARGUMENTS | {"num_train_epochs"}),
            model=self.weights,
            transfer=self.settings.transfer and task.transfer_from is not None,
            max_length=self.settings.max_length,
            classifier_dropout=self.settings.classifier_dropout,
            early_stopping_patience=self.arguments.early_stopping_patience,
            task={name: value for name, value in asdict(task).items() if name not in ("source", "subset")},
            data={split: fingerprint(rows) for split, rows in self.data[task.name].items()},
            # As the user gave them; those of a trial follow from its batch size.
            schedule={name: getattr(self.arguments, name) for name in ("num_train_epochs", "max_steps", "eval_steps")},
        )

    def _file(self, trial: Trial) -> Path:
        return self.folder / f"{trial.name}.json"

    def _source_of(self, trial: Trial) -> str | None:
        """The task whose best model a trial starts from."""
        return self.tasks[trial.task].transfer_from if self.settings.transfer else None

    def _best_model(self, task: str) -> tuple[str, Path]:
        """The name of the best trial of a task, and the folder of its model."""
        finished = best_first(self.folder, task)
        if not finished:
            raise CheckpointError(
                f"{self.folder / task} has no score of {task}, from whose best model another task starts: run "
                f"`--task {task}` first, or set `transfer` to false."
            )
        return finished[0]["run"], self.folder / finished[0]["run"] / "model"

    def complete(self, trial: Trial) -> None:
        """Do what is left of a trial: everything, or only tidy up if it already has a result."""
        # Another command may do other tasks or seeds in the same folder.
        with folder_lock(self.folder / trial.name):
            if not self._file(trial).exists():
                self._fine_tune(trial)
            for checkpoint in complete_checkpoints(self.folder / trial.name):
                delete_checkpoint(checkpoint)
            # Only models of finished trials that a better one has beaten.
            for result in best_first(self.folder, trial.task)[1:]:
                shutil.rmtree(self.folder / result["run"] / "model", ignore_errors=True)

    def _fine_tune(self, trial: Trial) -> None:
        """Training, the best model, the result.

        A trial whose loss, weights or predictions become infinite ends there, and the other trials go on: its result is
        that of its best evaluation until then, as of any other trial, or None if there is none.
        """
        folder, start, backbone = self.folder / trial.name, self.weights, None
        if (source := self._source_of(trial)) is not None:
            start, backbone = self._best_model(source)
        run = Run(folder, self.identities[trial.task] | asdict(trial) | {"start": start}, newest_checkpoint(folder))
        task, arguments = (
            GlueTexts(self.tasks[trial.task], self.data[trial.task]),
            trial.arguments(self.arguments, folder),
        )
        trainer, _ = build_trainer(task, self.settings, arguments, run, backbone)
        print(f"{trial.name}: {trainer.plan()}{f', from {run.checkpoint}' if run.checkpoint else ''}", flush=True)
        diverged = None
        try:
            trainer.train_to_the_end()
        except FloatingPointError as error:
            diverged = trainer.state.global_step
            # The rest of the message is about resuming.
            print(f"{trial.name} diverged at step {diverged:,}: {str(error).partition('. ')[0]}", flush=True)
        evaluations = trainer.evaluations()
        best = next((each for each in evaluations if each["step"] == trainer.state.best_global_step), {})
        if best:
            trainer.load_best()
            trainer.save_whole(folder / "model")
        result = asdict(trial) | {
            "run": trial.name,
            "hyperparameters": trial.hyperparameters,
            "score": best.get("score"),
            "metrics": {name: best[name] for name in best if name not in ("step", "epoch", "loss", "score")},
            "best_step": best.get("step"),
            "diverged": diverged,
            "start": start,
            "identity": self.identities[trial.task],
            "evaluations": evaluations,
        }
        # Written last: it marks the trial as finished.
        write_json(self._file(trial), result)
        if best:
            print(f"{trial.name}: {100 * best['score']:.2f} at step {best['step']:,}", flush=True)
