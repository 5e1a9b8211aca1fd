"""Fine-tune and evaluate any encoder on GLUE as the paper does (section 5.1, appendix C), or on your own task.

    python examples/run_glue.py --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/run_glue.py \\
        --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all --grid true --shard 3/8

Without `--grid` each task gets the hyperparameters of Table 6. RTE, STS-B, MRPC and QNLI start from the best MNLI
model. Each process of `accelerate launch` takes runs of its own, on its own GPU; each shard takes its part of them in a
folder that all share. Run the same command again after an interruption: finished runs are not repeated, and one that
was interrupted resumes, to the bit on a CPU. `output_dir` gets a folder for each model, with a JSON file for each run
and the best model of each task, and a report on all of them: `report.md`, `report.json`.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from datasets import DatasetDict
from transformers import AutoTokenizer, set_seed

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.atomic_writes import write_json
from neobert_hf.common.fingerprints import checkpoint_fingerprint, data_fingerprint
from neobert_hf.common.results import ResultError, folder_of_results
from neobert_hf.common.settings import nearest, parse_config
from neobert_hf.common.token_limits import tokens_read
from neobert_hf.evaluation.glue.report import read_published, write_report
from neobert_hf.evaluation.glue.runs import (
    OF_ONE_RUN,
    Hyperparameters,
    Results,
    Run,
    grid,
    leave_process_group,
    order_tasks,
    own_share,
    read_hyperparameters,
)
from neobert_hf.evaluation.glue.tasks import GlueTask, load_task, read_tasks
from neobert_hf.evaluation.glue.trainer import GlueArguments, GlueTrainer, build_classifier, last_checkpoints, tokenize
from neobert_hf.training.run_checkpoints import CheckpointError, newest_checkpoint
from neobert_hf.training.trainer import Diverged


# Of the training arguments, those that change the trained weights; the others may differ when a run is resumed.
RESULT_SETTINGS = (
    "optim lr_scheduler_type lr_scheduler_kwargs warmup_steps adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 "
    "fp16"
).split()


@dataclass
class GlueSettings:
    """What is trained, on which tasks, with which hyperparameters."""

    model: str = field(metadata={"help": "an encoder: path or Hub id; with `average_checkpoints` the folder of a run"})
    task: list[str] = field(metadata={"help": "names from `task_config`, or `all`"})
    task_config: str = field(metadata={"help": "YAML file of tasks"})
    name: str | None = field(default=None, metadata={"help": "of the model in the report; made from `model` if unset"})
    data_dir: str | None = field(
        default=None, metadata={"help": "folder with the tasks as TSV, Parquet or JSON lines, instead of the Hub"}
    )
    max_length: int = field(default=1024, metadata={"help": "tokens; the longer text of a pair is cut first"})
    classifier_dropout: float = field(default=0.1, metadata={"help": "before the classifier"})
    early_stopping_patience: int = field(default=15, metadata={"help": "evaluations without a better score"})
    transfer: bool = field(default=True, metadata={"help": "start tasks from others' best model, as the file says"})
    average_checkpoints: int = field(
        default=0, metadata={"help": "start from the mean of the last so many checkpoints of the run `model`"}
    )
    hyperparameters: str | None = field(default=None, metadata={"help": "YAML file with those of each task"})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "one run each"})
    grid: bool = field(default=False, metadata={"help": "search the three lists instead of using `hyperparameters`"})
    batch_sizes: list[int] = field(default_factory=list, metadata={"help": "of the grid"})
    learning_rates: list[float] = field(default_factory=list, metadata={"help": "of the grid"})
    weight_decays: list[float] = field(default_factory=list, metadata={"help": "of the grid"})
    shard: str | None = field(default=None, metadata={"help": "k/n: the k-th of n machines or jobs"})
    published: str | None = field(default=None, metadata={"help": "YAML file of rows for the report"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


def choose_tasks(settings: GlueSettings) -> list[GlueTask]:
    """The tasks in the order in which they run.

    Raises:
        ValueError: if a name is unknown.
    """
    tasks = read_tasks(settings.task_config)
    for name in settings.task:
        if name not in tasks and name != "all":
            raise ValueError(f"{settings.task_config} has no task {name!r}{nearest(name, ['all', *tasks])}")
    chosen = list(tasks) if "all" in settings.task else settings.task
    return [tasks[name] for name in order_tasks(tasks, chosen)]


def plan(settings: GlueSettings, arguments: GlueArguments, tasks: list[GlueTask]) -> list[Run]:
    """All runs of all processes and shards, in order.

    Raises:
        ValueError: if hyperparameters are missing.
    """
    given = {
        "batch_size": arguments.per_device_train_batch_size,
        "learning_rate": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not settings.seeds:
        raise ValueError("`seeds` is empty: give one or more.")
    if settings.grid:
        lists = (settings.batch_sizes, settings.learning_rates, settings.weight_decays)
        if given or not all(lists):
            found = f"{min(given)!r} is set" if given else "one of them is empty"
            raise ValueError(f"`grid` searches `batch_sizes`, `learning_rates` and `weight_decays`, and {found}.")
        return [Run(task.name, point, seed) for task in tasks for point in grid(*lists) for seed in settings.seeds]
    best = read_hyperparameters(settings.hyperparameters) if settings.hyperparameters else {}
    runs = []
    for task in tasks:
        values = (asdict(best[task.name]) if task.name in best else {}) | given
        if len(values) < 3:
            raise ValueError(
                f"There are no hyperparameters for {task.name} in {settings.hyperparameters}: add them, or give "
                "`per_device_train_batch_size`, `learning_rate` and `weight_decay`."
            )
        runs += [Run(task.name, Hyperparameters(**values), seed) for seed in settings.seeds]
    return runs


def task_settings(
    settings: GlueSettings, arguments: GlueArguments, task: GlueTask, data: DatasetDict, weights: str
) -> dict:
    """All settings that the weights of all runs of a task depend on, as JSON gives them back."""
    names = "model max_length classifier_dropout early_stopping_patience average_checkpoints".split()
    values = {name: getattr(settings, name) for name in names}
    values |= {name: getattr(arguments, name) for name in RESULT_SETTINGS}
    # What the file says counts, not where the data lie.
    described = {key: value for key, value in asdict(task).items() if key not in ("source", "subset", "tsv")}
    values |= {
        "weights": weights,
        "transfer": settings.transfer and task.transfer_from is not None,
        "task": described,
        "rows": {split: len(part) for split, part in data.items()},
        "data": {split: data_fingerprint(part) for split, part in data.items()},
        # As given: a run's own follow from its batch size.
        "schedule": {name: getattr(arguments, name) for name in ("num_train_epochs", "max_steps", "eval_steps")},
    }
    return json.loads(json.dumps(values, default=str))


def fingerprint_weights(settings: GlueSettings) -> str:
    """What tells the weights of `model` from others that lay there.

    Raises:
        CheckpointError: if there are not enough checkpoints to average.
    """
    checkpoints = [settings.model]
    if settings.average_checkpoints:
        checkpoints = last_checkpoints(settings.model, settings.average_checkpoints)
    return " + ".join(checkpoint_fingerprint(str(checkpoint)) for checkpoint in checkpoints)


def starting_point(
    task: GlueTask, settings: GlueSettings, results: Results, weights: str
) -> tuple[str, list[Path], str]:
    """What a run starts from.

    Returns:
        Path or Hub id of configuration and tokenizer; the checkpoints with the backbone, none for its own weights; and
        the name of it all.

    Raises:
        CheckpointError: if there are not enough checkpoints, or no model of the task to start from.
    """
    model, start, backbone = settings.model, settings.model, []
    if settings.average_checkpoints:
        backbone = last_checkpoints(settings.model, settings.average_checkpoints)
        model, start = str(backbone[-1]), " + ".join(map(str, backbone))
    if settings.transfer and task.transfer_from is not None:
        start, source = results.best_model(task.transfer_from, weights)
        backbone = [source]
    return model, backbone, start


def result_of(run: Run, trainer: GlueTrainer, seconds: float, error: str | None = None) -> dict:
    """What a result file holds: the best evaluation, or the error of a run that diverged."""
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


def fine_tune(
    run: Run,
    task: GlueTask,
    data: DatasetDict,
    settings: GlueSettings,
    arguments: GlueArguments,
    shared: dict,
    results: Results,
) -> None:
    """One run that has no result yet: training, the best model, the result.

    Raises:
        CheckpointError: if checkpoints are of other settings.
        ValueError: if the model does not fit.
    """
    # 1. What it starts from
    began, folder = time.monotonic(), results.run_folder(run)
    model, backbone, start = starting_point(task, settings, results, shared["weights"])
    values = shared | {name: getattr(arguments, name) for name in sorted(OF_ONE_RUN - {"start"})} | {"start": start}

    # 2. Model and data
    set_seed(run.seed)
    resume, _ = newest_checkpoint(folder, values)
    classifier = build_classifier(model, task, settings.classifier_dropout, backbone, settings.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    positions = getattr(classifier.config, "max_position_embeddings", None)
    length = tokens_read(classifier, settings.max_length, tokenizer.model_max_length, positions)
    encoded = tokenize(data, tokenizer, length)

    # 3. Training
    trainer = GlueTrainer(classifier, arguments, task, encoded, tokenizer, settings.early_stopping_patience, values)
    print(
        f"{run.name}: {arguments.max_steps:,} steps on {arguments.device}, evaluated every {arguments.eval_steps} steps"
        f" on {sum(len(data[part]) for part in task.validation):,} rows; "
        + (f"resuming from {resume}" if resume else f"starting from {start}"),
        flush=True,
    )
    error = None
    try:
        trainer.train_to_the_end(resume)
    except Diverged as diverged:
        # Some points of a grid do, and the others do not depend on them.
        if not settings.grid:
            raise
        error = str(diverged.__cause__)

    # 4. Best model, then the result, then room for others
    if error is None:
        trainer.save_best(folder / "model")
    result = result_of(run, trainer, time.monotonic() - began, error)
    write_json(results.file(run), result)
    results.tidy(run)
    trainer.accelerator.free_memory()
    scored = f"{100 * result['score']:.2f} at step {result['best_step']:,}" if error is None else f"diverged. {error}"
    print(f"{run.name}: {scored}", flush=True)


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and this process's share of the runs
    process, processes = leave_process_group()
    settings, arguments = parse_config(GlueSettings, GlueArguments, args=args)
    share, shares = own_share(settings.shard, process, processes)
    tasks = {task.name: task for task in choose_tasks(settings)}
    runs = plan(settings, arguments, list(tasks.values()))
    published = read_published(settings.published) if settings.published else None
    output, name = Path(arguments.output_dir), folder_of_results(settings.name, settings.model)
    results = Results(output / name)

    # 2. Weights, data and earlier results of all tasks, checked before anything is trained
    weights = fingerprint_weights(settings)
    data = {task.name: load_task(task, settings.data_dir) for task in tasks.values()}
    shared = {task.name: task_settings(settings, arguments, task, data[task.name], weights) for task in tasks.values()}
    for task in tasks.values():
        results.check_task(task.name, shared[task.name])
        unfinished = [run for run in runs if run.task == task.name and not results.find(run)]
        if settings.transfer and task.transfer_from not in (None, *tasks) and unfinished:
            results.best_model(task.transfer_from, weights)

    # 3. Fine-tuning, run by run
    output.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {len(runs)} runs on {len(tasks)} tasks; share {share + 1} of {shares}", flush=True)
    for run in runs[share::shares]:
        task = tasks[run.task]
        if (finished := results.find(run)) is not None:
            if finished["score"] is None and not settings.grid:
                raise ResultError(f"{results.file(run)}: this run diverged in a grid. Delete the file to repeat it.")
            results.tidy(run)
            continue
        if settings.transfer and task.transfer_from is not None:
            results.wait_for([other for other in runs if other.task == task.transfer_from])
        chosen = arguments.of_run(
            results.run_folder(run),
            len(data[run.task][task.train]),
            per_device_train_batch_size=run.hyperparameters.batch_size,
            learning_rate=run.hyperparameters.learning_rate,
            weight_decay=run.hyperparameters.weight_decay,
            seed=run.seed,
        )
        fine_tune(run, task, data[run.task], settings, chosen, shared[run.task], results)

    # 4. Report on all models in the folder, with what other shards have finished so far
    print(write_report(output, name, published), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (CheckpointError, ResultError) as error:
        sys.exit(str(error))
