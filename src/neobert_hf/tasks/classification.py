"""Text classification: one class per row, several, or a number. Columns are guessed, and the guesses printed."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerBase

from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import nearest
from neobert_hf.data.tables import Row, list_as_text
from neobert_hf.tasks.plots import plot_confusion
from neobert_hf.tasks.recipe import Task, TaskSettings
from neobert_hf.tasks.rows import Splits, checking, choose_column, count_labels
from neobert_hf.training.metrics import ScoreMetric


# Usual names of columns, the likelier first. If a dataset has both label names and label numbers, the names are used.
LABELS = "label_text label_name labels_text label labels category class target section topic sentiment intent score"
LABELS = (*LABELS.split(), "rating", "y")
TEXTS = ("text", "sentence", "content", "review", "document", "comment", "description", "title", "body", "question")
PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"))
PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
# The values in lists that hold one flag for each class.
FLAGS = {"0", "1", "0.0", "1.0", "False", "True"}
WORST = 10


@dataclass
class ClassificationSettings(TaskSettings):
    """Which columns are used, and which kind of labels they hold."""

    text_columns: list[str] = field(default_factory=list, metadata={"help": "one or two columns; guessed if empty"})
    label_column: str | None = field(default=None, metadata={"help": "guessed if unset"})
    problem: str | None = field(default=None, metadata={"help": f"{', '.join(PROBLEMS)}; guessed if unset"})
    label_separator: str | None = field(
        default=None, metadata={"help": "separator between the labels of a row that has several"}
    )
    class_weights: bool = field(
        default=False, metadata={"help": "weight classes so that rare ones count as much as common ones"}
    )
    pooling: str | None = field(
        default=None, metadata={"help": "hidden states for the head: cls or mean; as in the model's config if unset"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.pooling not in (None, "cls", "mean"):
            raise ValueError(f"`pooling` is {self.pooling!r}; it must be cls or mean.")
        if self.problem not in (None, *PROBLEMS):
            raise ValueError(f"`problem` is {self.problem!r}{nearest(self.problem, list(PROBLEMS))}")
        if len(self.text_columns) > 2:
            raise ValueError(f"`text_columns` names {len(self.text_columns)} columns; it must name one or two.")

    def columns_read(self, rows: list[Row]) -> list[str]:
        return self.choose_columns(rows)[0]

    def labels_of_rows(self, rows: list[Row]) -> list[set[str]]:
        _, label = self.choose_columns(rows)
        problem = self.problem or guess_problem(rows, label, self.label_separator)
        if problem == "regression":
            return super().labels_of_rows(rows)
        return [set(labels_of(row, label, problem, self.label_separator)) for row in rows]

    def choose_columns(self, rows: list[Row]) -> tuple[list[str], str]:
        """The one or two text columns, and the label column."""
        label = choose_column(rows, self.label_column, LABELS, "label_column")
        if self.text_columns:
            texts = [choose_column(rows, name, (), "text_columns") for name in self.text_columns]
        else:
            left = {name: cell for name, cell in rows[0].cells.items() if name != label}
            pair = next((list(pair) for pair in PAIRS if set(pair) <= left.keys()), None)
            strings = [name for name, cell in left.items() if isinstance(cell, str)]
            guesses = TEXTS if len(strings) != 1 else (*TEXTS, strings[0].lower())
            first = [Row(rows[0].source, rows[0].index, left)]
            texts = pair or [choose_column(first, None, guesses, "text_columns")]
        if label in texts:
            raise ValueError(f"`label_column` is {label!r}, which is also a text column: name another one.")
        return texts, label


class Classification(Task):
    """See `Task`. The columns are `text`, `text_pair` if there are two, and `label`."""

    kind = "text-classification"
    auto_class = AutoModelForSequenceClassification

    def __init__(self, settings: ClassificationSettings, splits: Splits, smoothing: float = 0.0):
        self.settings = settings
        if settings.pooling is not None:
            self.config = {"classifier_pooling": settings.pooling}
        texts, label = settings.choose_columns(splits["train"])
        self.problem = settings.problem or guess_problem(splits["train"], label, settings.label_separator)
        print(f"columns: text {' and '.join(texts)}, label {label}; {self.problem} (settings can name others)")
        self.rows = splits
        columns = {}
        for split, rows in splits.items():
            with checking(split):
                found = {name: [row.text(text) for row in rows] for name, text in zip(("text", "text_pair"), texts)}
            columns[split] = found
        numbers = self._number_labels(splits, label)
        self.splits = DatasetDict(
            {split: Dataset.from_dict(found | {"label": numbers[split]}) for split, found in columns.items()}
        )
        if settings.class_weights:
            self.loss = partial(weighted_loss, weights=self._weights(numbers["train"]), problem=self.problem)
        if smoothing and (self.problem != PROBLEMS[0] or settings.class_weights):
            raise ValueError(
                f"`label_smoothing_factor` is {smoothing}; it needs one class per row and no `class_weights`."
            )

    def _number_labels(self, splits: Splits, column: str) -> dict[str, list]:
        """The labels of each row as the model needs them."""
        if self.problem == "regression":
            self.labels = ["score"]
            return {split: _scores(split, rows, column) for split, rows in splits.items()}
        several = self.problem == "multi_label_classification"
        names = {}
        for split, rows in splits.items():
            with checking(split):
                names[split] = [labels_of(row, column, self.problem, self.settings.label_separator) for row in rows]
        counts = count_labels(names, splits, "label")
        if several:
            _refuse_multi_hot(names["train"])
        self.labels = sorted(
            counts, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
        )
        ids = {name: number for number, name in enumerate(self.labels)}
        if several:
            return {
                split: [[float(name in of_row) for name in self.labels] for of_row in part]
                for split, part in names.items()
            }
        return {split: [ids[name] for (name,) in part] for split, part in names.items()}

    def _weights(self, labels: list) -> torch.Tensor:
        """As scikit-learn's `balanced`: rows / (classes * rows of the class); several labels: negatives / positives."""
        if self.problem == "regression":
            raise ValueError("`class_weights` is true, but the labels are numbers: leave it out.")
        rows = np.array(labels)
        if self.problem == "multi_label_classification":
            return torch.tensor((len(rows) - rows.sum(0)) / np.maximum(rows.sum(0), 1)).float()
        counts = np.bincount(rows, minlength=len(self.labels))
        return torch.tensor(len(rows) / (len(counts) * counts)).float()

    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
        def ids(batch: dict[str, list]) -> dict[str, list]:
            return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

        texts = [name for name in self.splits["train"].column_names if name != "label"]
        return self.splits.map(ids, batched=True, remove_columns=texts, desc="tokenizing")

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> DataCollatorWithPadding:
        return DataCollatorWithPadding(tokenizer)

    def score(self, split: str, encoded: Dataset, logits: np.ndarray) -> dict[str, float]:
        labels = np.array(self.splits[split]["label"][:])
        if self.problem == "multi_label_classification":
            found = (logits > 0).astype(int)
            names = ("micro", "macro")
            values = {f"{name}_f1": float(f1_score(labels, found, average=name, zero_division=0)) for name in names}
        elif self.problem == "regression":
            if np.ptp(labels) == 0:
                # Possible in a test split. Correlation with equal labels is undefined, and JSON has no NaN.
                return {}
            values = ScoreMetric(["pearson", "spearmanr"]).compute(predictions=logits[:, 0], references=labels)
        else:
            metric = ScoreMetric(["accuracy", "macro_f1"])
            values = metric.compute(predictions=logits.argmax(-1), references=labels)
        if self.settings.class_weights:
            values = dict(reversed(values.items()))
        return values | {"score": next(iter(values.values()))}

    def describe(self, split: str, encoded: Dataset, logits: np.ndarray, folder: Path) -> list[str]:
        rows = self.splits[split].add_column("row", [row.index for row in self.rows[split]])
        labels = np.array(rows["label"][:])
        if self.problem == "regression":
            errors, found = np.abs(logits[:, 0] - labels), logits[:, 0].round(3)
            return worst_rows(rows, errors, found, labels, "distance")
        several = self.problem == "multi_label_classification"
        found = (logits > 0).astype(int) if several else logits.argmax(-1)
        counted = precision_recall_fscore_support(
            labels, found, labels=range(len(self.labels)), average=None, zero_division=0
        )
        table = [
            [name, *(f"{100 * part:.1f}" for part in parts[:3]), parts[3]]
            for name, *parts in zip(self.labels, *counted)
        ]
        lines = [*markdown_table(["Label", "Precision", "Recall", "F1", "Rows"], table), ""]
        if several:
            # The most confident of the wrong decisions of a row.
            errors = np.where(found != labels, np.abs(logits), 0).max(-1)
            names = lambda flags: ", ".join(np.array(self.labels)[flags == 1]) or "none"  # noqa: E731
            return lines + worst_rows(
                rows, errors, [names(row) for row in found], [names(row) for row in labels], "logit"
            )
        counts = confusion_matrix(labels, found, labels=range(len(self.labels)))
        lines += plot_confusion(folder / f"confusion_{split}.png", counts, self.labels)
        # The negative log-probability of the right label.
        losses = np.logaddexp.reduce(logits, axis=-1) - logits[np.arange(len(labels)), labels]
        errors = np.where(found != labels, losses, 0)
        names = np.array(self.labels)
        return lines + worst_rows(rows, errors, names[found], names[labels], "loss")


def labels_of(row: Row, column: str, problem: str, separator: str | None) -> list[str]:
    """The names of the classes of a row: one, or several if the problem is that."""
    if problem == "multi_label_classification":
        return row.labels(column, separator)
    if isinstance(row.cell(column), list):
        raise ValueError(f"{row.place}: the label is {row.cells[column]!r:.60}; it must be one label.")
    return [row.label(column)]


def _refuse_multi_hot(rows: list[list[str]]) -> None:
    """Refuse flags for each class, such as `[1.0, 0.0, 0.0]`: they would pass for two classes named 0.0 and 1.0."""
    lengths = {len(row) for row in rows}
    if len(lengths) == 1 and max(lengths) > 1 and {name for row in rows for name in row} <= FLAGS:
        raise ValueError(
            f"The labels are lists of {max(lengths)} numbers 0 and 1, one for each class. They must be lists of the "
            "names of the classes that a row has."
        )


def guess_problem(rows: list[Row], column: str, separator: str | None = None) -> str:
    """Lists mean several classes, numbers that are not all integers a regression, anything else one class.

    Raises:
        ValueError: if the labels are lists that were written as text, or lists although a separator is given.
    """
    cells = [row.cells.get(column) for row in rows]
    lists = any(isinstance(cell, list) for cell in cells)
    if example := list_as_text(cells):
        raise ValueError(
            f"The labels are lists that were written as text, such as {example!r:.60}. Write JSON lines or Parquet, "
            "where a cell can hold a list, or separate the labels of a cell and set `label_separator`."
        )
    if lists and separator is not None:
        raise ValueError(f"`label_separator` is {separator!r}, but {column!r} holds lists of labels: leave it out.")
    if lists or separator is not None:
        return PROBLEMS[1]
    try:
        numbers = [float(cell) for cell in cells]
    except (TypeError, ValueError):
        return PROBLEMS[0]
    return PROBLEMS[0] if all(number.is_integer() for number in numbers) else PROBLEMS[2]


def _scores(split: str, rows: list[Row], column: str) -> list[float]:
    with checking(split):
        scores = [row.number(column) for row in rows]
    if len(set(scores)) == 1 and split != "test":
        reason = "there is nothing to learn" if split == "train" else "no correlation with them is defined"
        raise ValueError(
            f"All rows of the split {split} have the label {scores[0]}: {reason}. Add rows with other labels."
        )
    return scores


def weighted_loss(
    outputs: Any, labels: torch.Tensor, weights: torch.Tensor, problem: str, **kwargs: Any
) -> torch.Tensor:
    """The loss of the model, with class weights."""
    logits, weights = outputs["logits"].float(), weights.to(outputs["logits"].device)
    if problem == "multi_label_classification":
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float(), pos_weight=weights)
    return torch.nn.functional.cross_entropy(logits, labels, weight=weights)


def worst_rows(rows: Dataset, errors: np.ndarray, found: Any, right: Any, measure: str) -> list[str]:
    """A table of the rows with the largest errors, with their row numbers in the file or split."""
    order = [int(number) for number in np.argsort(-errors, kind="stable")[:WORST] if errors[number] > 0]
    if not order:
        return ["No row is wrong."]
    columns = [name for name in ("text", "text_pair") if name in rows.column_names]
    table = []
    for number in order:
        text = " / ".join(rows[number][name] for name in columns)
        shown = " ".join(text.split())[:160].replace("|", "\\|")
        table.append([rows[number]["row"], right[number], found[number], f"{errors[number]:.2f}", shown])
    return [f"The {len(order)} worst errors:", "", *markdown_table(["Row", "Right", "Found", measure, "Text"], table)]
