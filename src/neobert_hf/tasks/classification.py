"""Text classification: one class per row, several, or a number. Columns are guessed, and the guesses printed."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.metrics import classification_report, f1_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import LinearSVC
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from neobert_hf.data.tables import Row, list_as_text
from neobert_hf.tasks.recipe import Task, TaskSettings
from neobert_hf.tasks.rows import Splits, choose_column, count_labels, parse_splits
from neobert_hf.training.metrics import ScoreMetric


# Usual names of columns, the likelier first. If a dataset has both label names and label numbers, the names are used.
LABELS = "label_text label_name labels_text label labels category class target section topic sentiment intent score"
LABELS = (*LABELS.split(), "rating", "y")
TEXTS = ("text", "sentence", "content", "review", "document", "comment", "description", "title", "body", "question")
PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"))
SINGLE, SEVERAL, NUMBER = "single_label_classification", "multi_label_classification", "regression"
# The values in lists that hold one flag for each class.
FLAGS = {"0", "1", "0.0", "1.0", "False", "True"}


@dataclass
class ClassificationSettings(TaskSettings):
    """Which columns are used, and which kind of labels they hold."""

    text_columns: list[str] = field(default_factory=list, metadata={"help": "one or two columns; guessed if empty"})
    label_column: str | None = field(default=None, metadata={"help": "guessed if unset"})
    problem: Literal["single_label_classification", "multi_label_classification", "regression"] | None = field(
        default=None, metadata={"help": "guessed if unset"}
    )
    label_separator: str | None = field(
        default=None, metadata={"help": "separator between the labels of a row that has several"}
    )
    class_weights: bool = field(
        default=False, metadata={"help": "weight classes so that rare ones count as much as common ones"}
    )
    pooling: Literal["cls", "mean"] | None = field(
        default=None, metadata={"help": "hidden states for the head; as in the model's config if unset"}
    )

    def choose_columns(self, cells: dict[str, Any]) -> tuple[list[str], str]:
        """The one or two text columns, and the label column.

        Args:
            cells: of the first row, by column.
        """
        if len(self.text_columns) > 2:
            raise ValueError(f"`text_columns` names {len(self.text_columns)} columns; it must name one or two.")
        label = choose_column(list(cells), self.label_column, LABELS, "label_column")
        if self.text_columns:
            texts = [choose_column(list(cells), name, (), "text_columns") for name in self.text_columns]
        else:
            texts = guess_text_columns({name: cell for name, cell in cells.items() if name != label})
        if label in texts:
            raise ValueError(f"`label_column` is {label!r}, which is also a text column: name another one.")
        return texts, label


def guess_text_columns(cells: dict[str, Any]) -> list[str]:
    """Two columns with the usual names of a pair, one with a usual name, or else the only one that holds text."""
    for pair in PAIRS:
        if set(pair) <= cells.keys():
            return list(pair)
    strings = [name.lower() for name, cell in cells.items() if isinstance(cell, str)]
    guesses = (*TEXTS, *strings) if len(strings) == 1 else TEXTS
    return [choose_column(list(cells), None, guesses, "text_columns")]


def guess_problem(rows: list[Row], column: str, separator: str | None = None) -> str:
    """Lists mean several classes, numbers that are not all integers a regression, anything else one class.

    Raises:
        ValueError: if the labels are lists that were written as text.
    """
    cells = [row.cells.get(column) for row in rows]
    if example := list_as_text(cells):
        raise ValueError(
            f"The labels are lists that were written as text, such as {example!r:.60}. Write JSON lines or Parquet, "
            "where a cell can hold a list, or separate the labels of a cell and set `label_separator`."
        )
    if separator is not None or any(isinstance(cell, list) for cell in cells):
        return SEVERAL
    try:
        numbers = [float(cell) for cell in cells]
    except (TypeError, ValueError):
        return SINGLE
    return SINGLE if all(number.is_integer() for number in numbers) else NUMBER


class Classification(Task):
    """See `Task`. The columns are `text`, `text_pair` if there are two, and `label`: names of classes, or a number."""

    kind = "text-classification"
    auto_class = AutoModelForSequenceClassification
    baseline_name = "TF-IDF and a linear model"

    def __init__(self, settings: ClassificationSettings, splits: Splits):
        self.settings, self.pooling = settings, settings.pooling
        texts, label = settings.choose_columns(splits["train"][0].cells)
        self.problem = settings.problem or guess_problem(splits["train"], label, settings.label_separator)
        print(f"columns: text {' and '.join(texts)}, label {label}; {self.problem} (settings can name others)")
        self.texts = ["text", "text_pair"][: len(texts)]

        def parse(row: Row) -> dict[str, Any]:
            cells = {name: row.text(column) for name, column in zip(self.texts, texts)}
            if self.problem == NUMBER:
                return cells | {"label": row.number(label)}
            if self.problem == SEVERAL:
                return cells | {"label": row.labels(label, settings.label_separator)}
            return cells | {"label": [row.label(label)]}

        classes = None if self.problem == NUMBER else "label"
        self.tables = parse_splits(splits, parse, settings.validation_share, self.texts, self.texts, classes)
        self.labels = count_labels(self.tables, "label", "label") if classes else ["score"]
        if self.problem == SEVERAL:
            _refuse_multi_hot(self.tables["train"]["label"][:])
        # Of each row of a split: the right class (rows,), flags of all classes (rows, classes), or the number (rows,).
        self.right = {split: self._as_predicted(table["label"][:]) for split, table in self.tables.items()}
        if settings.class_weights:
            self.weights, self.loss = self._class_weights(), self._weighted_loss

    def _as_predicted(self, labels: list) -> np.ndarray:
        if self.problem == NUMBER:
            return np.array(labels)
        if self.problem == SINGLE:
            classes = {name: number for number, name in enumerate(self.labels)}
            return np.array([classes[name] for (name,) in labels])
        return np.array([[name in names for name in self.labels] for names in labels], dtype=float)

    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        def ids(batch: dict[str, list]) -> dict[str, list]:
            return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

        names = self.tables["train"].column_names
        self.encoded = self.tables.map(ids, batched=True, remove_columns=names, desc="tokenizing")
        for split, table in self.encoded.items():
            self.encoded[split] = table.add_column("label", self.right[split].tolist())

    def predict(self, split: str, logits: np.ndarray) -> np.ndarray:
        """In the form of `right`."""
        if self.problem == NUMBER:
            return logits[:, 0]
        return (logits > 0).astype(float) if self.problem == SEVERAL else logits.argmax(-1)

    def baseline(self, split: str) -> np.ndarray:
        return self._linear_model.predict(self._joined(split))

    def metrics(self, split: str, found: np.ndarray) -> dict[str, float]:
        right = self.right[split]
        if self.problem == NUMBER:
            return ScoreMetric(["pearson", "spearmanr"]).compute(predictions=found, references=right)
        if self.problem == SEVERAL:
            averages = ("macro", "micro") if self.settings.class_weights else ("micro", "macro")
            return {f"{name}_f1": float(f1_score(right, found, average=name, zero_division=0)) for name in averages}
        names = ["macro_f1", "accuracy"] if self.settings.class_weights else ["accuracy", "macro_f1"]
        return ScoreMetric(names).compute(predictions=found, references=right)

    def label_report(self, split: str, found: np.ndarray) -> str:
        if self.problem == NUMBER:
            return ""
        options = {"labels": range(len(self.labels)), "target_names": self.labels, "digits": 3, "zero_division": 0}
        return classification_report(self.right[split], found, **options)

    def errors(self, split: str, found: np.ndarray, logits: np.ndarray) -> list[tuple[float, str, str, str]]:
        """How far a number is off, or how sure the model is of what is wrong."""
        right = self.right[split]
        if self.problem == NUMBER:
            sizes = np.abs(found - right)
        elif self.problem == SEVERAL:
            sizes = np.where(found != right, np.abs(logits), 0).max(-1)
        else:
            sizes = logits.max(-1) - logits[np.arange(len(right)), right]
        return list(zip(sizes, map(self._shown, right), map(self._shown, found), self._joined(split)))

    def _shown(self, label: Any) -> str:
        """A number, the name of a class, or the names of the classes whose flags are 1."""
        if self.problem == NUMBER:
            return f"{label:.3f}"
        if self.problem == SINGLE:
            return self.labels[label]
        return ", ".join(name for name, flag in zip(self.labels, label) if flag) or "none"

    def _joined(self, split: str) -> list[str]:
        return [" ".join(texts) for texts in zip(*(self.tables[split][name][:] for name in self.texts))]

    @cached_property
    def _linear_model(self) -> Pipeline:
        """A linear model on the words of the training texts."""
        classifier = LinearSVC(class_weight="balanced" if self.settings.class_weights else None, random_state=0)
        models = {SINGLE: classifier, SEVERAL: OneVsRestClassifier(classifier), NUMBER: Ridge()}
        # Every text has a word of this kind; scikit-learn's own pattern drops single letters and signs.
        words = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True)
        return make_pipeline(words, models[self.problem]).fit(self._joined("train"), self.right["train"])

    def _class_weights(self) -> torch.Tensor:
        """As scikit-learn's `balanced`: rows / (classes * rows of the class); several labels: negatives / positives."""
        if self.problem == NUMBER:
            raise ValueError("`class_weights` is true, but the labels are numbers: leave it out.")
        right = self.right["train"]
        if self.problem == SEVERAL:
            return torch.tensor((len(right) - right.sum(0)) / right.sum(0)).float()
        return torch.tensor(compute_class_weight("balanced", classes=np.unique(right), y=right)).float()

    def _weighted_loss(self, outputs: Any, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        logits = outputs["logits"].float()
        weights = self.weights.to(logits.device)
        if self.problem == SEVERAL:
            return F.binary_cross_entropy_with_logits(logits, labels.float(), pos_weight=weights)
        return F.cross_entropy(logits, labels, weight=weights)


def _refuse_multi_hot(rows: list[list[str]]) -> None:
    """Refuse flags for each class, such as `[1.0, 0.0, 0.0]`: they would pass for two classes named 0.0 and 1.0."""
    lengths = {len(row) for row in rows}
    if len(lengths) == 1 and max(lengths) > 1 and {name for row in rows for name in row} <= FLAGS:
        raise ValueError(
            f"The labels are lists of {max(lengths)} numbers 0 and 1, one for each class. They must be lists of the "
            "names of the classes that a row has."
        )
