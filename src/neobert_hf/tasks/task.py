"""A kind of task: what its rows, its inputs, its metrics and its baseline are. The recipes train and report on it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasets import Dataset, DatasetDict
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from neobert_hf.data.readers import READERS, Reader


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


class Task(ABC):
    """What a training needs to know of a task. The methods get the rows that they are about, a table of `tables`.

    Attributes:
        auto_class: the Auto class of the model.
        tables: the checked rows of each split, `train`, `validation` and perhaps `test`; see `parse_splits`.
        labels: names of the model's outputs; None if the head has two outputs of its own.
        problem, pooling: `problem_type` and `classifier_pooling` of Transformers, for text classifiers.
        collator_class: makes a batch of the inputs.
        loss: of the model's outputs and the labels, in place of the model's own; the mean over the labels.
        reduce_logits: reduces the logits that an evaluation keeps.
    """

    auto_class: Any
    tables: DatasetDict
    labels: list[str] | None = None
    problem: str | None = None
    pooling: str | None = None
    collator_class: Any = DataCollatorWithPadding
    loss: Any = None
    reduce_logits: Any = None

    @abstractmethod
    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
        """The model's inputs, with labels, of rows."""

    @abstractmethod
    def predict(self, rows: Dataset, inputs: Dataset, logits: Any) -> Any:
        """What the model found for each of the rows: classes, numbers, tags or an answer.

        Args:
            inputs: what `encode` made of the rows.
            logits: the model's outputs for these inputs.
        """

    @abstractmethod
    def metrics(self, rows: Dataset, found: Any) -> dict[str, float]:
        """The metrics of what was found for rows, the most important one first."""

    def score(self, metrics: dict[str, float]) -> float:
        """By which the best evaluation is chosen; the larger, the better."""
        return next(iter(metrics.values()))

    def finish(self, model: nn.Module) -> None:  # noqa: B027  Most tasks have nothing to do.
        """Make of the trained model the one that is saved."""


def shortened(names: list[str]) -> str:
    """The first of some names, for a sentence."""
    return ", ".join([*names[:30], *(["..."] if len(names) > 30 else [])])


class OwnTask(Task):
    """A task on a user's own rows, which is reported beside a baseline.

    Attributes:
        kind: the Hub's name of the task.
        title: the heading of the report and the card.
        readers: the reader of each kind of file, by suffix.
        baseline_name: what `baseline` is.
        in_percent: whether metrics are shares.
    """

    kind: str
    title: str
    readers: ClassVar[Mapping[str, Reader]] = READERS
    baseline_name: str
    in_percent: bool = True

    @abstractmethod
    def purpose(self) -> str:
        """What the model does, as a sentence for its card."""

    def example(self, name: str) -> list[str]:
        """The lines of a program that uses the model.

        Args:
            name: the argument that names it.
        """
        return ["from transformers import pipeline", "", f'model = pipeline("{self.kind}", {name})', 'model("a text")']

    @abstractmethod
    def baseline(self, rows: Dataset) -> Any:
        """What a simple method finds for rows that learned from the training rows, in the form of `predict`."""

    def label_report(self, rows: Dataset, found: Any) -> str:
        """Precision and recall of each label, as a library prints them; empty if there are no labels."""
        return ""

    @abstractmethod
    def errors(self, rows: Dataset, found: Any, logits: Any) -> list[tuple[float, str, str, str]]:
        """How wrong each row is, 0 if it is right; what is right, what the model found, and the text."""
