"""Tasks on whole texts: which columns hold the one or two texts of a row, and what a model reads of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from neobert_hf.data.rows import Row, is_number
from neobert_hf.tasks.rows import Splits, check_columns, choose_column
from neobert_hf.tasks.task import Task, TaskSettings


# Usual names of columns, the likelier first. If a dataset has both label names and label numbers, the names are used.
LABELS = "label_text label_name labels_text label labels category class target section topic sentiment intent score"
LABELS = (*LABELS.split(), "rating", "y")
TEXTS = ("text", "sentence", "content", "review", "document", "comment", "description", "title", "body", "question")
PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"))
# Of a baseline. They take 400 MB, and fitting them twice as much again.
MOST_WEIGHTS = 50_000_000


@dataclass
class TextSettings(TaskSettings):
    """Which columns are used, and what the head reads."""

    usual_labels: ClassVar[tuple[str, ...]] = LABELS

    text_columns: list[str] = field(default_factory=list, metadata={"help": "one or two columns; guessed if empty"})
    label_column: str | None = field(default=None, metadata={"help": "guessed if unset"})
    pooling: Literal["cls", "mean"] | None = field(
        default=None, metadata={"help": "hidden states for the head; as in the model's config if unset"}
    )

    def choose_columns(self, splits: Splits) -> tuple[list[str], str]:
        """The one or two text columns, and the label column."""
        cells = splits["train"][0].cells
        if len(self.text_columns) > 2:
            raise ValueError(f"`text_columns` names {len(self.text_columns)} columns; it must name one or two.")
        label = choose_column(list(cells), self.label_column, self.usual_labels, "label_column")
        if self.text_columns:
            texts = [choose_column(list(cells), name, (), "text_columns") for name in self.text_columns]
        else:
            texts = guess_text_columns({name: cell for name, cell in cells.items() if name != label})
        if label in texts:
            raise ValueError(f"`label_column` is {label!r}, which is also a text column: name another one.")
        check_columns(splits, {label: "label_column"} | dict.fromkeys(texts, "text_columns"))
        note_numbers(splits["train"], texts)
        return texts, label


def guess_text_columns(cells: dict[str, Any]) -> list[str]:
    """Two columns with the usual names of a pair, one with a usual name, or else the only one that holds text."""
    for pair in PAIRS:
        if set(pair) <= cells.keys():
            return list(pair)
    strings = [name.lower() for name, cell in cells.items() if isinstance(cell, str)]
    guesses = (*TEXTS, *strings) if len(strings) == 1 else TEXTS
    return [choose_column(list(cells), None, guesses, "text_columns")]


def note_numbers(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print that a column of texts holds numbers: it may be another one that was meant."""
    for column in columns:
        cells = [row.cells.get(column) for row in rows]
        numbers = [cell for cell in cells if isinstance(cell, (int, float)) or is_number(cell)]
        # In a file of CSV, where all is text, a text may be a number.
        if len(numbers) > len(cells) / 2 or any(not isinstance(number, str) for number in numbers):
            print(
                f"{len(numbers):,} of {len(cells):,} training rows have a number in {column!r}, such as {numbers[0]}, "
                "which is read as a text: if another column is meant, name it as `text_columns`."
            )


def texts_of(row: Row, columns: Sequence[str]) -> dict[str, str]:
    """The texts of a row as `text` and, if there are two, `text_pair`."""
    return {name: row.text(column) for name, column in zip(("text", "text_pair"), columns)}


def joined(rows: Dataset) -> list[str]:
    """The texts of each row as one."""
    return [" ".join(texts) for texts in zip(*(rows[name][:] for name in rows.column_names if name.startswith("text")))]


def bag_of_words(outputs: int = 1) -> TfidfVectorizer:
    """What a baseline with so many outputs knows of a text: its words and pairs of words, the commonest if need be."""
    # Every text has a word of this kind; scikit-learn's own pattern drops single letters and signs.
    words = {"token_pattern": r"\S+", "ngram_range": (1, 2), "sublinear_tf": True}
    return TfidfVectorizer(max_features=MOST_WEIGHTS // outputs, **words)


class TextTask(Task):
    """What tasks on the columns `text` and perhaps `text_pair` have in common, GLUE's too."""

    auto_class = AutoModelForSequenceClassification

    def targets(self, rows: Dataset) -> list:
        """What the model learns for each row: the number of its class, flags of all classes, or a number."""
        return rows["label"][:]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
        """Of a pair, the longer text is cut first."""

        def ids(batch: dict[str, list]) -> dict[str, list]:
            return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

        encoded = rows.map(ids, batched=True, remove_columns=rows.column_names, desc="tokenizing")
        return encoded.add_column("label", self.targets(rows))
