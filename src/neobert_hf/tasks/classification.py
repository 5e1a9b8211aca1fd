"""Text classification: each row has one class, or a list of several. Columns are guessed, and the guesses printed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, classification_report, f1_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import LinearSVC
from torch.nn import functional

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.data.rows import Row, list_as_text
from neobert_hf.tasks.recipe import train_on_task
from neobert_hf.tasks.rows import Splits, count_labels, parse_splits, spelled_alike
from neobert_hf.tasks.task import OwnTask, shortened
from neobert_hf.tasks.texts import TextSettings, TextTask, bag_of_words, joined, texts_of
from neobert_hf.training.fine_tuning import FineTuningArguments


@dataclass
class ClassificationSettings(TextSettings):
    """Which columns are used, what the head reads, and what classes count."""

    label_columns: list[str] = field(
        default_factory=list,
        metadata={"help": "columns that hold 1 if a row has their class, and else 0, in place of `label_column`"},
    )
    label_separator: str | None = field(
        default=None, metadata={"help": "separator between the labels of a row that has several"}
    )
    class_weights: Literal["balanced"] | None = field(
        default=None,
        metadata={"help": "balanced: rare classes count as much as common ones, and macro F1 chooses the checkpoint"},
    )

    def choose_columns(self, splits: Splits) -> tuple[list[str], str]:
        """See `TextSettings`; names the columns that may be `label_columns`, if there is no other."""
        try:
            return super().choose_columns(splits)
        except ValueError as error:
            cells = splits["train"][0].cells
            flags = [name for name, cell in cells.items() if str(cell) in ("0", "1", "0.0", "1.0", "False", "True")]
            if len(flags) < 2:
                raise
            raise ValueError(
                f"{error} Or set `label_columns` to those of {', '.join(flags)} that are classes."
            ) from error


def holds_lists(rows: Iterable[Row], column: str) -> bool:
    """Whether the labels of rows are lists.

    Raises:
        ValueError: if the labels are lists that were written as text.
    """
    cells = [row.cells.get(column) for row in rows]
    if example := list_as_text(cells):
        raise ValueError(
            f"The labels are lists that were written as text, such as {example!r:.60}. Write JSON lines or Parquet, "
            "where a cell can hold a list, or separate the labels of a cell and set `label_separator`."
        )
    return any(isinstance(cell, list) for cell in cells)


def with_labels(row: Row, columns: Sequence[str]) -> Row:
    """A row with the list of those columns in `labels` that hold 1 in it, and not 0."""
    flags = [row.number(column) for column in columns]
    if wrong := set(flags) - {0, 1}:
        raise ValueError(f"{row.place} has {wrong.pop():g} in a column of `label_columns`; they must hold 0 or 1.")
    labels = [column for column, flag in zip(columns, flags) if flag]
    return Row(row.source, row.index, row.cells | {"labels": labels})


def check_not_numbers(rows: Sequence[Row], column: str) -> None:
    """Refuse labels that are quantities, not classes: numbers with decimals, or that rarely repeat."""
    try:
        numbers = [float(row.cells[column]) for row in rows]
    except (KeyError, TypeError, ValueError):  # They are names or lists.
        return
    decimals = [number for number in numbers if math.isfinite(number) and number % 1]
    if decimals or len(set(numbers)) > max(20, len(numbers) / 2):
        raise ValueError(
            f"{column!r} holds numbers such as {(decimals or numbers)[0]:g}, and each would be a class. To learn "
            "numbers, use `regress`; if they are classes, give them names."
        )


@recipe
def classify(settings: ClassificationSettings, arguments: FineTuningArguments) -> Result:
    """Fine-tune any encoder to classify texts: your own CSV, TSV, JSON lines or Parquet, a table, or a Hub dataset.

    The columns are guessed, and whether a row has one class or several; the guesses are printed, and settings can name
    others. Bad rows are errors before training. Called again after an interruption, it goes on from the newest complete
    checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best of all evaluations, with a card), and a
    report with the scores, each label and the worst errors, beside the scores of a bag of words.

    Returns:
        The model's folder; `scores` and those of the `baseline`, by split and metric.
    """
    return train_on_task("classify", Classification, settings, arguments)


class Classification(TextTask, OwnTask):
    """See `Task`. The columns are `text`, `text_pair` if there are two, and `label`: a list of names of classes."""

    kind = "text-classification"
    title = "A classifier of texts"
    baseline_name = "TF-IDF and a linear model"

    def __init__(self, settings: ClassificationSettings, splits: Splits):
        self.pooling = settings.pooling
        if names := settings.label_columns:
            splits = {split: [with_labels(row, names) for row in rows] for split, rows in splits.items()}
            settings = replace(settings, label_column="labels")
        texts, label = settings.choose_columns(splits)
        check_not_numbers(splits["train"], label)
        lists, separator = holds_lists(splits["train"], label), settings.label_separator
        self.several = separator is not None or lists
        if lists and all(len(row.labels(label, separator)) == 1 for row in chain(*splits.values())):
            print(f"the lists in {label!r} have one label each: it is trained as the only one that a text can have")
            self.several = False
        self.problem = "multi_label_classification" if self.several else "single_label_classification"
        found = f"texts in {' and '.join(map(repr, texts))}, labels in {label!r}"
        print(f"columns: {found}; {self.problem} (settings can name others)")

        def parse(row: Row) -> dict[str, Any]:
            labels = row.labels(label, separator) if self.several or lists else [row.label(label)]
            return texts_of(row, texts) | {"label": labels}

        inputs = ["text", "text_pair"][: len(texts)]
        self.tables = parse_splits(splits, parse, settings.validation_share, inputs, inputs, "label")
        self.tables = spelled_alike(self.tables, "label", "label")
        self.labels = count_labels(self.tables, "label", "label")
        if self.several and set(self.labels) <= {"0", "1", "0.0", "1.0", "False", "True"}:
            raise ValueError(
                f"The labels are lists of {' and '.join(self.labels)}, a flag for each class. They must be lists of "
                "the names of the classes that a row has."
            )
        self.weights = None
        if settings.class_weights is not None:
            if self.several:
                raise ValueError("`class_weights` is for rows with one class, and these have lists: leave it out.")
            counts = np.bincount(self.right(self.tables["train"]))
            # The mean weight of a row is 1.
            self.weights = torch.tensor(counts.sum() / (len(counts) * counts), dtype=torch.float32)
            self.loss = self.weighted_loss

    def purpose(self) -> str:
        which = "which of" if self.several else "which one of"
        return f"This model says {which} {len(self.labels):,} classes a text has: {shortened(self.labels)}."

    def weighted_loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        # PyTorch's own mean divides by the weights of the batch, so that accumulated batches would count otherwise.
        weights = self.weights.to(labels.device)
        return functional.cross_entropy(outputs.logits.float(), labels, weights, reduction="none").mean()

    def right(self, rows: Dataset) -> np.ndarray:
        """Of each row the number of its class (rows,), or flags of all classes (rows, classes)."""
        if self.several:
            return np.array([[name in names for name in self.labels] for names in rows["label"][:]], dtype=float)
        classes = {name: number for number, name in enumerate(self.labels)}
        return np.array([classes[name] for (name,) in rows["label"][:]])

    def targets(self, rows: Dataset) -> list:
        return self.right(rows).tolist()

    def predict(self, rows: Dataset, inputs: Dataset, logits: np.ndarray) -> np.ndarray:
        """In the form of `right`."""
        return (logits > 0).astype(float) if self.several else logits.argmax(-1)

    @cached_property
    def linear_model(self) -> Pipeline:
        """Fitted on the words of the training texts."""
        classifier = LinearSVC(random_state=0)
        classifier = OneVsRestClassifier(classifier) if self.several else classifier
        train = self.tables["train"]
        return make_pipeline(bag_of_words(len(self.labels)), classifier).fit(joined(train), self.right(train))

    def baseline(self, rows: Dataset) -> np.ndarray:
        return self.linear_model.predict(joined(rows))

    def metrics(self, rows: Dataset, found: np.ndarray) -> dict[str, float]:
        right = self.right(rows)
        macro = {"macro_f1": float(f1_score(right, found, average="macro", zero_division=0))}
        if self.several:
            return {"micro_f1": float(f1_score(right, found, average="micro", zero_division=0))} | macro
        accuracy = {"accuracy": float(accuracy_score(right, found))}
        return accuracy | macro if self.weights is None else macro | accuracy

    def label_report(self, rows: Dataset, found: np.ndarray) -> str:
        options = {"labels": range(len(self.labels)), "target_names": self.labels, "digits": 3, "zero_division": 0}
        return classification_report(self.right(rows), found, **options)

    def errors(self, rows: Dataset, found: np.ndarray, logits: np.ndarray) -> list[tuple[float, str, str, str]]:
        """How sure the model is of what is wrong."""
        right = self.right(rows)
        if self.several:
            sizes = np.where(found != right, np.abs(logits), 0).max(-1)
        else:
            sizes = logits.max(-1) - logits[np.arange(len(right)), right]
        return list(zip(sizes, map(self._names, right), map(self._names, found), joined(rows)))

    def _names(self, found: np.ndarray) -> str:
        if not self.several:
            return self.labels[found]
        return ", ".join(name for name, flag in zip(self.labels, found) if flag) or "none"
