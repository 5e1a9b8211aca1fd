"""The GLUE recipe: its settings, the plan of all runs, and one run from its start to its result file."""

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from transformers import set_seed

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.fingerprints import depends_on, fingerprint
from neobert_hf.common.results import ResultError
from neobert_hf.common.settings import nearest
from neobert_hf.common.tokenizers import length_to_cut_at
from neobert_hf.evaluation.glue.models import build_classifier
from neobert_hf.evaluation.glue.results import RUN_ARGUMENTS, Results
from neobert_hf.evaluation.glue.runs import Hyperparameters, Run, grid, order_tasks, read_hyperparameters
from neobert_hf.evaluation.glue.tasks import GlueTask, load_task, read_tasks, report_repeated_rows
from neobert_hf.evaluation.glue.trainer import GlueArguments, GlueTrainer, TaskData
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.run_checkpoints import newest_checkpoint
from neobert_hf.training.starting_points import StartingPoint, newest_checkpoints, tokenizer_of
from neobert_hf.training.trainer import Diverged


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
        default=None, metadata={"help": "name of the model in the report; made from `model` if unset"}
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "folder with the tasks as TSV, Parquet or JSON lines, instead of the Hub", "path": True},
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


def choose_tasks(settings: GlueSettings) -> dict[str, GlueTask]:
    """The tasks by name, in the order in which they run."""
    tasks = read_tasks(settings.task_config)
    for name in settings.task:
        if name not in tasks and name != "all":
            raise ValueError(f"{settings.task_config} has no task {name!r}{nearest(name, ['all', *tasks])}")
    chosen = {name for name in settings.task if name != "all"}
    if "all" in settings.task:
        chosen |= {name for name, task in tasks.items() if not task.only_named}
    return {name: tasks[name] for name in order_tasks(tasks, chosen)}


def plan_runs(settings: GlueSettings, arguments: GlueArguments, tasks: dict[str, GlueTask]) -> list[Run]:
    """All runs of all processes and shards, in order."""
    if not settings.seeds:
        raise ValueError("`seeds` is empty: give one or more.")
    if arguments.seed != GlueArguments.seed:
        raise ValueError(
            f"`seed` is {arguments.seed}, but runs take theirs from `seeds`: use --seeds {arguments.seed}."
        )
    numbers = [name for name, task in tasks.items() if task.labels is None]
    if arguments.label_smoothing_factor and numbers:
        raise ValueError(
            f"`label_smoothing_factor` is {arguments.label_smoothing_factor}, but the labels of {numbers[0]} are "
            "numbers: leave out the setting, or the task."
        )
    given = {
        "batch_size": arguments.per_device_train_batch_size,
        "learning_rate": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if settings.grid:
        lists = (settings.batch_sizes, settings.learning_rates, settings.weight_decays)
        if given or not all(lists):
            found = f"{min(given)!r} is set" if given else "one of them is empty"
            raise ValueError(f"`grid` searches `batch_sizes`, `learning_rates` and `weight_decays`, but {found}.")
        return [Run(name, point, seed) for name in tasks for point in grid(*lists) for seed in settings.seeds]
    best = read_hyperparameters(settings.hyperparameters) if settings.hyperparameters else {}
    runs = []
    for name in tasks:
        values = (asdict(best[name]) if name in best else {}) | given
        if len(values) < 3:
            raise ValueError(
                f"There are no hyperparameters for {name} in {settings.hyperparameters}: add them, or give "
                "`per_device_train_batch_size`, `learning_rate` and `weight_decay`."
            )
        runs += [Run(name, Hyperparameters(**values), seed) for seed in settings.seeds]
    return runs


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

    Attributes:
        arguments: the Trainer's arguments, before a run sets its own.
        start: the starting point of runs that do not start from another task's model.
        weights: the fingerprint of `start`.
        data: the rows of each task.
        shared_settings: for each task, the settings that the weights depend on and that all its runs share.
    """

    def __init__(self, settings: GlueSettings, arguments: GlueArguments, runs: list[Run], results: Results):
        self.settings = settings
        self.arguments = arguments
        self.runs = runs
        self.results = results
        self.start = find_start(settings)
        self.weights = self.start.fingerprint()
        self.data: dict[str, TaskData] = {}
        self.shared_settings: dict[str, dict] = {}

    def prepare(self, tasks: dict[str, GlueTask]) -> None:
        """Load the data of all tasks, and check them and earlier results before anything is trained."""
        self.results.check_model(self.weights)
        self.data = {name: TaskData(task, load_task(task, self.settings.data_dir)) for name, task in tasks.items()}
        for name, task in tasks.items():
            report_repeated_rows(task, self.data[name].splits)
            self.shared_settings[name] = self._settings_of(self.data[name])
            self.results.of_task(name, self.shared_settings[name])
            source = self._source_of(task)
            unfinished = [run for run in self.runs if run.task == name and self.results.find(run) is None]
            if source is not None and source not in tasks and unfinished:
                self.results.best_model(source, self.weights)

    def _settings_of(self, data: TaskData) -> dict:
        """What the weights of all runs of a task depend on."""
        settings, arguments = self.settings, self.arguments
        # Data are compared by their content, not by their place.
        incidental = ("source", "subset", "tsv", "only_named", "empty_texts")
        return depends_on(
            result_settings(arguments, leave_out=RUN_ARGUMENTS | {"num_train_epochs"}),
            model=self.weights,
            transfer=self._source_of(data.task) is not None,
            max_length=settings.max_length,
            classifier_dropout=settings.classifier_dropout,
            early_stopping_patience=arguments.early_stopping_patience,
            task={name: value for name, value in asdict(data.task).items() if name not in incidental},
            rows={split: len(part) for split, part in data.splits.items()},
            data={split: fingerprint(part) for split, part in data.splits.items()},
            # The values as the user gave them; those of a run follow from its batch size.
            schedule={name: getattr(arguments, name) for name in ("num_train_epochs", "max_steps", "eval_steps")},
        )

    def _source_of(self, task: GlueTask) -> str | None:
        """The task whose best model a task starts from."""
        return task.transfer_from if self.settings.transfer else None

    def complete(self, run: Run) -> None:
        """Do what is left of a run: everything, or only tidy up if it already has a result."""
        with folder_lock(self.results.run_folder(run)):
            result = self.results.find(run)
            if result is None:
                self.fine_tune(run)
            elif result["score"] is None and not self.settings.grid:
                file = self.results.file(run)
                raise ResultError(f"{file}: this run diverged in a grid. Delete the file to repeat it.")
            self.results.delete_leftovers(run)

    def fine_tune(self, run: Run) -> None:
        """Do one run that has no result yet: training, the best model, the result."""
        began = time.monotonic()
        source = self._source_of(self.data[run.task].task)
        self.results.wait_for([other for other in self.runs if other.task == source])
        trainer, resume = self._build_trainer(run)
        error = None
        try:
            trainer.train_to_the_end(resume)
        except Diverged as diverged:
            # Some points of a grid diverge. That is their result, and the other points do not depend on them.
            if not self.settings.grid:
                raise
            error = str(diverged.__cause__)
        # The result is written last: it marks the run as finished.
        if error is None:
            trainer.save_best(self.results.run_folder(run) / "model")
        result = describe_result(run, trainer, time.monotonic() - began, error)
        write_json(self.results.file(run), result)
        score = f"diverged. {error}" if error else f"{100 * result['score']:.2f} at step {result['best_step']:,}"
        print(f"{run.name}: {score}", flush=True)

    def _build_trainer(self, run: Run) -> tuple[GlueTrainer, Path | None]:
        """The trainer of a run, and the checkpoint to resume from, if there is one."""
        data, folder = self.data[run.task], self.results.run_folder(run)
        start = self._start_of(data.task)
        arguments = self.arguments.for_run(run, folder, rows=len(data.splits[data.task.train]))
        settings = self.shared_settings[run.task] | {name: getattr(arguments, name) for name in sorted(RUN_ARGUMENTS)}
        settings["start"] = self.weights if start is self.start else start.name
        set_seed(run.seed)
        resume, _ = newest_checkpoint(folder, settings)
        classifier = build_classifier(start, data.task, self.settings.classifier_dropout)
        tokenizer = tokenizer_of(start)
        length = length_to_cut_at(classifier, tokenizer, self.settings.max_length)
        trainer = GlueTrainer(classifier, arguments, data.tokenize(tokenizer, length), tokenizer, settings)
        print(
            f"{run.name}: {arguments.max_steps:,} steps on {arguments.device}, evaluated every {arguments.eval_steps} "
            f"steps on {sum(data.validation_rows.values()):,} rows; "
            f"{f'resuming from {resume}' if resume else f'starting from {start.name}'}",
            flush=True,
        )
        return trainer, resume

    def _start_of(self, task: GlueTask) -> StartingPoint:
        source = self._source_of(task)
        if source is None:
            return self.start
        name, model = self.results.best_model(source, self.weights)
        return replace(self.start, name=name, backbone=[model])


def describe_result(run: Run, trainer: GlueTrainer, seconds: float, error: str | None) -> dict:
    """The content of a result file: the best evaluation, or the error of a run that diverged."""
    evaluations = trainer.evaluations()
    best = {"score": None, "step": None}
    if error is None:
        best = next(entry for entry in evaluations if entry["step"] == trainer.state.best_global_step)
    return {
        "run": run.name,
        "task": run.task,
        "score": best["score"],
        "error": error,
        "metrics": {key: value for key, value in best.items() if key not in ("step", "epoch", "loss", "score")},
        "hyperparameters": asdict(run.hyperparameters),
        "seed": run.seed,
        "best_step": best["step"],
        "last_step": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "settings": trainer.run_settings,
        "evaluations": evaluations,
    }
