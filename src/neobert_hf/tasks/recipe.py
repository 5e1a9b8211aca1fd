"""The steps that the recipes for tasks share, GLUE among them: training, and for your own tasks the report."""

from pathlib import Path
from typing import Any

from datasets import DatasetDict
from transformers import set_seed

from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.paths import check_complete
from neobert_hf.common.recipe import Result
from neobert_hf.common.tokenizers import length_to_cut_at
from neobert_hf.tasks.report import write_report
from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.task import OwnTask, Task, TaskSettings
from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer, load_for_task
from neobert_hf.training.run import Run, check_alone


def train_on_task(
    recipe: str, task_class: type[OwnTask], settings: TaskSettings, arguments: FineTuningArguments
) -> Result:
    """The steps of all recipes for your own tasks.

    Args:
        recipe: its name.
        task_class: called with the settings and what `read_splits` returns.
    """
    check_alone(arguments)
    inputs = {name: getattr(settings, name) for name in ("model", "data", "validation_data", "test_data")}
    # `max_steps` follows from the rows, and `max_length` from the model.
    leave_out = ("subset", "score_test", "max_steps", "max_length")
    folder = {"inputs": inputs, "writes": ("report.md", "report.json"), "leave_out": leave_out}
    with Run.start(recipe, arguments, settings, **folder) as run:
        check_complete(settings.model, "model")

        # 1. The rows of all splits, checked
        task = task_class(settings, read_splits(settings, task_class.readers))

        # 2. Training to the end, or from the run's checkpoint to the end
        trainer, inputs = build_trainer(task, settings, arguments, run)
        rows = ", ".join(f"{len(table):,} {split}" for split, table in task.tables.items())
        print(f"{rows} rows; {trainer.plan()}, from {run.checkpoint or settings.model}", flush=True)
        trainer.train_to_the_end()
        trainer.load_best()

        # 3. Scores on all held-out rows beside those of a baseline; `model/`, and its card
        return write_report(task, settings, trainer, inputs)


def build_trainer(
    task: Task, settings: Any, arguments: FineTuningArguments, run: Run, backbone: Path | None = None
) -> tuple[FineTuningTrainer, DatasetDict]:
    """The trainer of a model with a new head, before its training.

    Args:
        settings: has `model`, `max_length`, `classifier_dropout` and `trust_remote_code`.
        run: gets all that the weights depend on.
        backbone: see `load_for_task`.

    Returns:
        The trainer, and the model's inputs of every split of the task.
    """
    set_seed(arguments.seed)
    model, tokenizer = load_for_task(
        settings.model,
        task.auto_class,
        task.labels,
        task.problem,
        settings.classifier_dropout,
        task.pooling,
        backbone,
        settings.trust_remote_code,
    )
    pairs = "text_pair" in task.tables["train"].column_names
    length = length_to_cut_at(model, tokenizer, settings.max_length, pairs)
    inputs = DatasetDict({split: task.encode(rows, tokenizer, length) for split, rows in task.tables.items()})
    arguments = arguments.planned(len(inputs["train"]))
    run.identify(
        model=model_fingerprint(settings.model),
        max_length=length,
        labels=task.labels,
        max_steps=arguments.max_steps,
        eval_steps=arguments.eval_steps,
        early_stopping_patience=arguments.early_stopping_patience,
        data={split: content_of(task.tables[split]) for split in ("train", "validation")},
    )

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        rows = task.tables["validation"]
        metrics = task.metrics(rows, task.predict(rows, inputs["validation"], evaluated.predictions))
        return metrics | {"score": task.score(metrics)}

    trainer = FineTuningTrainer(
        model,
        arguments,
        run=run,
        train_dataset=inputs["train"],
        eval_dataset=inputs["validation"],
        data_collator=task.collator_class(tokenizer),
        processing_class=tokenizer,
        preprocess_logits_for_metrics=task.reduce_logits,
        compute_metrics=compute_metrics,
        compute_loss_func=task.loss,
    )
    return trainer, inputs


def content_of(rows: Any) -> str:
    """The fingerprint of rows, wherever they stand."""
    return fingerprint(rows.select_columns([name for name in rows.column_names if name != "place"]))
