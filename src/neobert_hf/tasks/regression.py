"""Regression: each row has a number, such as a price, hours or a rating."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from torch import nn

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.data.rows import Row
from neobert_hf.tasks.recipe import train_on_task
from neobert_hf.tasks.rows import Splits, parse_splits
from neobert_hf.tasks.task import OwnTask
from neobert_hf.tasks.texts import TextSettings, TextTask, bag_of_words, joined, texts_of
from neobert_hf.training.fine_tuning import FineTuningArguments


@dataclass
class RegressionSettings(TextSettings):
    """Which columns are used, and what the head reads."""

    usual_labels: ClassVar[tuple[str, ...]] = ("score", "rating", "value", "price", "target", "label", "labels", "y")


# The squares of larger numbers, which the scores are made of, would be infinite.
LARGEST = 1e30


@recipe
def regress(settings: RegressionSettings, arguments: FineTuningArguments) -> Result:
    """Fine-tune any encoder to find a number for each text: a price, hours, a rating, how similar two texts are.

    The data are as of `classify`, with a number in the label column. The best checkpoint is that with the smallest mean
    squared error. For resuming and `output_dir` see `classify`; the baseline is a linear model on a bag of words.

    Returns:
        The model's folder; `scores` and those of the `baseline`, by split and metric.
    """
    return train_on_task("regress", Regression, settings, arguments)


class Regression(TextTask, OwnTask):
    """See `Task`. The columns are `text`, `text_pair` if there are two, and `label`, a number.

    Numbers are learned as distances from their mean, in standard deviations: otherwise prices would take thousands of
    steps to be reached. `finish` gives the last layer of the model the scale of the numbers.
    """

    kind = "text-classification"
    title = "Numbers estimated from texts"
    problem = "regression"
    labels = ["score"]
    in_percent = False
    baseline_name = "TF-IDF and ridge regression"

    def __init__(self, settings: RegressionSettings, splits: Splits):
        self.pooling = settings.pooling
        texts, label = settings.choose_columns(splits)
        print(f"columns: texts in {' and '.join(map(repr, texts))}, numbers in {label!r} (settings can name others)")

        def parse(row: Row) -> dict[str, Any]:
            if abs(number := row.number(label)) > LARGEST:
                raise ValueError(
                    f"{row.place}: {label!r} is {number:g}; its size must be {LARGEST:g} or less. Correct it."
                )
            return texts_of(row, texts) | {"label": number}

        inputs = ["text", "text_pair"][: len(texts)]
        self.tables = parse_splits(splits, parse, settings.validation_share, inputs, inputs)
        numbers = np.array(self.tables["train"]["label"][:])
        self.mean, self.deviation = float(numbers.mean()), float(numbers.std())
        if self.deviation == 0:
            raise ValueError(f"All training rows have {self.mean:g} in {label!r}: there is nothing to learn.")

    def purpose(self) -> str:
        low, high = (function(self.tables["train"]["label"][:]) for function in (min, max))
        return f"This model gives a number for a text; it learned from numbers between {low:g} and {high:g}."

    def targets(self, rows: Dataset) -> list[float]:
        return ((np.array(rows["label"][:]) - self.mean) / self.deviation).tolist()

    def predict(self, rows: Dataset, inputs: Dataset, logits: np.ndarray) -> np.ndarray:
        return logits[:, 0].astype(float) * self.deviation + self.mean

    def baseline(self, rows: Dataset) -> np.ndarray:
        train = self.tables["train"]
        return make_pipeline(bag_of_words(), Ridge()).fit(joined(train), train["label"][:]).predict(joined(rows))

    def metrics(self, rows: Dataset, found: np.ndarray) -> dict[str, float]:
        right = np.array(rows["label"][:])
        values = {"mae": np.abs(found - right).mean(), "rmse": np.sqrt(((found - right) ** 2).mean())}
        # There is no correlation with what is always the same.
        varied = np.ptp(found) > 0 and np.ptp(right) > 0
        values["pearson"] = np.corrcoef(right, found)[0, 1] if varied else 0
        values["spearman"] = spearmanr(right, found).statistic if varied else 0
        return {name: float(value) for name, value in values.items()}

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["rmse"]

    def errors(self, rows: Dataset, found: np.ndarray, logits: np.ndarray) -> list[tuple[float, str, str, str]]:
        return [
            (abs(number - right), f"{right:g}", f"{number:g}", text)
            for right, number, text in zip(rows["label"][:], found, joined(rows))
        ]

    @torch.no_grad()
    def finish(self, model: nn.Module) -> None:
        last = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.out_features == 1][-1]
        last.weight *= self.deviation
        last.bias *= self.deviation
        last.bias += self.mean
