"""Text classification: each row has one class, or a list of several. Columns are guessed, and the guesses printed."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import accuracy_score, classification_report, f1_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.data.rows import Row, list_as_text
from neobert_hf.tasks.recipe import Task, TaskSettings, train_on_task
from neobert_hf.tasks.rows import Splits, choose_column, count_labels, parse_splits, read_splits
from neobert_hf.training.fine_tuning import FineTuningArguments


# Usual names of columns, the likelier first. If a dataset has both label names and label numbers, the names are used.
LABELS = "label_text label_name labels_text label labels category class target section topic sentiment intent score"
LABELS = (*LABELS.split(), "rating", "y")
TEXTS = ("text", "sentence", "content", "review", "document", "comment", "description", "title", "body", "question")
PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"))


@dataclass
class ClassificationSettings(TaskSettings):
    """Which columns are used, and what the head reads."""

    text_columns: list[str] = field(default_factory=list, metadata={"help": "one or two columns; guessed if empty"})
    label_column: str | None = field(default=None, metadata={"help": "guessed if unset"})
    label_separator: str | None = field(
        default=None, metadata={"help": "separator between the labels of a row that has several"}
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


def are_several(rows: list[Row], column: str, separator: str | None) -> bool:
    """Whether rows have several classes: their labels are lists, or texts in which a separator stands between labels.

    Raises:
        ValueError: if the labels are lists that were written as text.
    """
    cells = [row.cells.get(column) for row in rows]
    if example := list_as_text(cells):
        raise ValueError(
            f"The labels are lists that were written as text, such as {example!r:.60}. Write JSON lines or Parquet, "
            "where a cell can hold a list, or separate the labels of a cell and set `label_separator`."
        )
    return separator is not None or any(isinstance(cell, list) for cell in cells)


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
    return train_on_task(lambda: Classification(settings, read_splits(settings)), "classify", settings, arguments)


class Classification(Task):
    """See `Task`. The columns are `text`, `text_pair` if there are two, and `label`: a list of names of classes."""

    kind = "text-classification"
    auto_class = AutoModelForSequenceClassification
    baseline_name = "TF-IDF and a linear model"

    def __init__(self, settings: ClassificationSettings, splits: Splits):
        self.pooling = settings.pooling
        texts, label = settings.choose_columns(splits["train"][0].cells)
        self.several = are_several(splits["train"], label, settings.label_separator)
        self.problem = "multi_label_classification" if self.several else "single_label_classification"
        found = f"texts in {' and '.join(map(repr, texts))}, labels in {label!r}"
        print(f"columns: {found}; {self.problem} (settings can name others)")
        self.texts = ["text", "text_pair"][: len(texts)]

        def parse(row: Row) -> dict[str, Any]:
            cells = {name: row.text(column) for name, column in zip(self.texts, texts)}
            labels = row.labels(label, settings.label_separator) if self.several else [row.label(label)]
            return cells | {"label": labels}

        self.tables = parse_splits(splits, parse, settings.validation_share, self.texts, self.texts, "label")
        self.labels = count_labels(self.tables, "label", "label")
        if self.several and set(self.labels) <= {"0", "1", "0.0", "1.0", "False", "True"}:
            raise ValueError(
                f"The labels are lists of {' and '.join(self.labels)}, a flag for each class. They must be lists of "
                "the names of the classes that a row has."
            )
        # Of each row of a split: the number of its class (rows,), or flags of all classes (rows, classes).
        self.right = {split: self._numbers(table["label"][:]) for split, table in self.tables.items()}

    def _numbers(self, labels: list[list[str]]) -> np.ndarray:
        if self.several:
            return np.array([[name in names for name in self.labels] for names in labels], dtype=float)
        classes = {name: number for number, name in enumerate(self.labels)}
        return np.array([classes[name] for (name,) in labels])

    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        def ids(batch: dict[str, list]) -> dict[str, list]:
            return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

        names = self.tables["train"].column_names
        self.encoded = self.tables.map(ids, batched=True, remove_columns=names, desc="tokenizing")
        for split, table in self.encoded.items():
            self.encoded[split] = table.add_column("label", self.right[split].tolist())

    def predict(self, split: str, logits: np.ndarray) -> np.ndarray:
        """In the form of `right`."""
        return (logits > 0).astype(float) if self.several else logits.argmax(-1)

    def baseline(self, split: str) -> np.ndarray:
        """Of a linear model on the words of the training texts."""
        classifier = LinearSVC(random_state=0)
        # Every text has a word of this kind; scikit-learn's own pattern drops single letters and signs.
        words = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True)
        model = make_pipeline(words, OneVsRestClassifier(classifier) if self.several else classifier)
        return model.fit(self._joined("train"), self.right["train"]).predict(self._joined(split))

    def metrics(self, split: str, found: np.ndarray) -> dict[str, float]:
        right = self.right[split]
        macro = {"macro_f1": float(f1_score(right, found, average="macro", zero_division=0))}
        if self.several:
            return {"micro_f1": float(f1_score(right, found, average="micro", zero_division=0))} | macro
        return {"accuracy": float(accuracy_score(right, found))} | macro

    def label_report(self, split: str, found: np.ndarray) -> str:
        options = {"labels": range(len(self.labels)), "target_names": self.labels, "digits": 3, "zero_division": 0}
        return classification_report(self.right[split], found, **options)

    def errors(self, split: str, found: np.ndarray, logits: np.ndarray) -> list[tuple[float, str, str, str]]:
        """How sure the model is of what is wrong."""
        right = self.right[split]
        if self.several:
            sizes = np.where(found != right, np.abs(logits), 0).max(-1)
        else:
            sizes = logits.max(-1) - logits[np.arange(len(right)), right]
        return list(zip(sizes, map(self._names, right), map(self._names, found), self._joined(split)))

    def _names(self, found: np.ndarray) -> str:
        if not self.several:
            return self.labels[found]
        return ", ".join(name for name, flag in zip(self.labels, found) if flag) or "none"

    def _joined(self, split: str) -> list[str]:
        return [" ".join(texts) for texts in zip(*(self.tables[split][name][:] for name in self.texts))]
