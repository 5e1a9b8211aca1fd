"""Shared by the recipes for your own tasks: settings, rows, training, the report and the model card."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase, set_seed

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.fingerprints import depends_on, fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import parse_config
from neobert_hf.common.tokenizers import length_to_cut_at
from neobert_hf.data.tables import READERS, Reader, Row
from neobert_hf.tasks.rows import Splits, read_splits
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer
from neobert_hf.training.launching import check_alone, training_folder
from neobert_hf.training.run_checkpoints import newest_checkpoint
from neobert_hf.training.starting_points import StartingPoint, build_model, task_config, tokenizer_of


# What is written to `output_dir` besides checkpoints and model.
WRITES = ("report.md", "report.json", "confusion_*.png", "f1_by_length_*.png", "answers_*.json")


@dataclass
class TaskSettings:
    """Which model is trained, and on which rows."""

    model: str = field(metadata={"help": "an encoder: path or Hub id", "path": "or Hub id"})
    data: str = field(
        metadata={
            "help": "a Hub dataset, a folder with train.*, validation.* and test.*, or the training file",
            "path": "or Hub id",
        }
    )
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    validation_data: str | None = field(
        default=None, metadata={"help": "validation file, in place of that split of `data`", "path": True}
    )
    test_data: str | None = field(
        default=None, metadata={"help": "test file, in place of that split of `data`", "path": True}
    )
    validation_share: float = field(
        default=0.1, metadata={"help": "share of the training rows to hold out if there are no validation rows"}
    )
    score_test: bool = field(default=True, metadata={"help": "score the best model on the test split, if there is one"})
    max_length: int = field(default=512, metadata={"help": "most tokens of an input"})
    classifier_dropout: float = field(default=0.1, metadata={"help": "dropout before the head"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        if not 0 < self.validation_share < 1:
            raise ValueError(f"`validation_share` is {self.validation_share}; it is a share above 0 and below 1.")

    def columns_read(self, rows: list[Row]) -> list[str]:
        """The columns of the model's input, or the part that rows may share: such rows are held out together."""
        raise NotImplementedError

    def labels_of_rows(self, rows: list[Row]) -> list[set[str]]:
        """The labels of each row, if it has any: rows are held out so that every label stays in training."""
        return [set() for _ in rows]

    def columns_compared(self, rows: list[Row]) -> list[str]:
        """All columns of the model's input."""
        return self.columns_read(rows)


class Task(ABC):
    """A kind of task, with its checked rows.

    Attributes:
        kind: the Hub's name of the task.
        auto_class: the Auto class of the model.
        splits: the checked rows, in the columns of this kind of task.
        labels: names of the model's outputs; None if the head has two outputs of its own.
        problem: `problem_type` of Transformers.
        config: values that the model's config gets.
        loss: replaces the model's own loss.
        reduce_logits: reduces the logits that an evaluation keeps.
    """

    kind: str
    auto_class: Any
    splits: DatasetDict
    labels: list[str] | None = None
    problem: str | None = None
    config: Mapping[str, Any] = MappingProxyType({})
    loss: Any = None
    reduce_logits: Any = None

    @abstractmethod
    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
        """The model's inputs of every split."""

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The collator that makes a batch of the inputs."""

    @abstractmethod
    def score(self, split: str, encoded: Dataset, logits: Any) -> dict[str, float]:
        """The metrics, and `score`, by which the best checkpoint is chosen."""

    @abstractmethod
    def describe(self, split: str, encoded: Dataset, logits: Any, folder: Path) -> list[str]:
        """Markdown about single labels and rows. Pictures and predictions are written to the folder."""


@dataclass
class TaskRun:
    """A run of a recipe: its settings, and its rows as they were read."""

    settings: TaskSettings
    arguments: FineTuningArguments
    splits: Splits

    def train(self, task: Task) -> tuple[FineTuningTrainer, DatasetDict]:
        """Fine-tune to the end, from the newest checkpoint if there is one, and load the weights of the best one.

        Returns:
            The trainer, and the model's inputs of every split.
        """
        settings = self.settings
        start = StartingPoint(settings.model, settings.model, trust_remote_code=settings.trust_remote_code)
        tokenizer = tokenizer_of(start)
        set_seed(self.arguments.seed)
        config = task_config(start, task.labels, task.problem, settings.classifier_dropout)
        for name, value in task.config.items():
            if not hasattr(config, name):
                raise ValueError(
                    f"The config of {settings.model} has no `{name}`, so it cannot be {value!r}: leave it out."
                )
            setattr(config, name, value)
        model = build_model(start, task.auto_class, config)
        length = length_to_cut_at(model, tokenizer, settings.max_length)
        encoded = task.encode(tokenizer, length)
        arguments = self.arguments.planned(len(encoded["train"]))
        values = self._values(task, arguments, start.fingerprint(), length)
        checkpoint, _ = newest_checkpoint(Path(arguments.output_dir), values)
        trainer = FineTuningTrainer(
            model,
            arguments,
            train_dataset=encoded["train"],
            eval_dataset=encoded["validation"],
            data_collator=task.collator(tokenizer),
            processing_class=tokenizer,
            compute_loss_func=task.loss,
            preprocess_logits_for_metrics=task.reduce_logits,
            compute_metrics=lambda found: task.score("validation", encoded["validation"], finite(found.predictions)),
            settings=values,
        )
        print(
            f"{', '.join(f'{len(rows):,} {split}' for split, rows in task.splits.items())} rows; "
            f"{arguments.max_steps:,} steps on {arguments.device}, evaluated every {arguments.eval_steps} steps; "
            f"{f'resuming from {checkpoint}' if checkpoint else f'starting from {settings.model}'}",
            flush=True,
        )
        trainer.train_to_the_end(checkpoint)
        trainer.load_best()
        return trainer, encoded

    def _values(self, task: Task, arguments: FineTuningArguments, model: str, max_length: int) -> dict:
        """All that the weights depend on.

        Args:
            model: the fingerprint of the model that training starts from.
        """
        return depends_on(
            self.settings,
            result_settings(arguments),
            leave_out=("subset", "score_test"),
            model=model,
            max_length=max_length,
            labels=task.labels,
            eval_steps=arguments.eval_steps,
            early_stopping_patience=arguments.early_stopping_patience,
            data={split: fingerprint(task.splits[split]) for split in ("train", "validation")},
        )

    def report(self, task: Task, trainer: FineTuningTrainer, encoded: DatasetDict) -> str:
        """Score the best model on all held-out rows, save it with its card, and write `report.md`, `report.json`.

        Returns:
            The Markdown.
        """
        folder, scores, details = Path(trainer.args.output_dir), {}, []
        trainer.compute_metrics = None
        # Save before scoring: `bf16_full_eval` rounds the weights in memory, and saving merges adapters into those.
        trainer.save_best(folder / "model")
        for split in [split for split in encoded if split != "train"]:
            logits = finite(trainer.predict(encoded[split]).predictions)
            scores[split] = task.score(split, encoded[split], logits)
            details += ["", f"## {split.capitalize()}", "", *task.describe(split, encoded[split], logits, folder)]
        # Some splits have more metrics: F1 of questions with and without an answer exists only if a split has both.
        names = [name for name in dict.fromkeys(chain(*scores.values())) if name != "score"]
        rows = [
            [
                split,
                f"{len(task.splits[split]):,}",
                *(f"{100 * values[name]:.2f}" if name in values else "-" for name in names),
            ]
            for split, values in scores.items()
        ]
        table = markdown_table(["Split", "Rows", *names], rows)
        lines = [
            f"# {task.kind}",
            "",
            f"{self.settings.model} on {self.settings.data}: {len(task.splits['train']):,} training rows; the best of "
            f"{len(trainer.evaluations())} evaluations, at step {trainer.state.best_global_step:,}. Metrics in "
            "percent; the step was chosen on validation, so the metrics on validation are a little too good.",
            "",
            *table,
            *details,
        ]
        text = "\n".join(lines) + "\n"
        # The card may be published, so it names no path of this machine.
        card = self._card(task, scores, "\n".join([f"# {task.kind}", "", *table]))
        evaluations = trainer.evaluations()
        content = {"scores": scores, "evaluations": evaluations, "settings": trainer.run_settings}
        write_json(folder / "report.json", content | {"best_step": trainer.state.best_global_step})
        write_text(folder / "report.md", text)
        write_text(folder / "model" / "README.md", str(card))
        return text

    def _card(self, task: Task, scores: dict[str, dict[str, float]], text: str) -> ModelCard:
        """The card that the Hub shows, and from which `neobert-hf publish` reads the results."""
        name = Path(self.settings.data).name or "data"
        results = [
            EvalResult(
                task_type=task.kind,
                dataset_type=name,
                dataset_name=name,
                dataset_split=split,
                metric_type=metric,
                metric_value=value,
            )
            for split, values in scores.items()
            for metric, value in values.items()
            if metric != "score"
        ]
        data = ModelCardData(
            library_name="transformers",
            pipeline_tag=task.kind,
            model_name=name,
            eval_results=results,
            tags=["neobert_hf"],
        )
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


@contextmanager
def open_run(
    settings_class: type[TaskSettings],
    args: list[str] | None = None,
    readers: Mapping[str, Reader] = READERS,
) -> Iterator[TaskRun]:
    """Read settings and rows. `output_dir` is locked while the block runs."""
    settings, arguments = parse_config(settings_class, FineTuningArguments, args=args)
    check_alone(arguments)
    inputs = {name: getattr(settings, name) for name in ("model", "data", "validation_data", "test_data")}
    with training_folder(arguments, "task training", WRITES, inputs):
        check_model_exists(settings.model, "model")
        yield TaskRun(settings, arguments, read_splits(settings, readers))


def finite(logits: Any) -> Any:
    """The logits as they are.

    Raises:
        FloatingPointError: if one is not finite, because the largest one would then be meaningless.
    """
    for part in logits if isinstance(logits, tuple) else (logits,):
        if not np.isfinite(part).all():
            raise FloatingPointError("The model gives scores that are not finite. Train with a smaller rate.")
    return logits
