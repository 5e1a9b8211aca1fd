"""Metrics of GLUE, as an `evaluate.Metric` based on scikit-learn and SciPy."""

from functools import partial

import evaluate
import numpy as np
from datasets import Features, Value
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


CLASSIFICATION = {
    "accuracy": accuracy_score,
    "f1": partial(f1_score, zero_division=0.0),
    "macro_f1": partial(f1_score, average="macro", zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
}
CORRELATIONS = {"pearson": pearsonr, "spearmanr": spearmanr}


class ScoreMetric(evaluate.Metric):
    """Some of the metrics above, computed together. It replaces `evaluate.load("glue", ...)`, which downloads code.

    `f1` is the F1 of label 1. The correlation with constant values, which SciPy leaves undefined, is 0, like
    scikit-learn's Matthews correlation.

    Args:
        names: the metrics to compute, either all from `CLASSIFICATION` or all from `CORRELATIONS`.

    References:
        https://arxiv.org/abs/1804.07461, section 3.

    Example:

    ```python
    >>> ScoreMetric(["accuracy", "f1"]).compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'accuracy': 0.6666666666666666, 'f1': 0.6666666666666666}
    ```
    """

    def __init__(self, names: list[str], **kwargs):
        self.names = names
        # Kept in memory, since files would be shared, and locked, by runs at the same time.
        super().__init__(config_name="_".join(names), keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        value = Value("float64" if set(self.names) <= CORRELATIONS.keys() else "int64")
        return evaluate.MetricInfo(
            description=", ".join(self.names),
            citation="",
            features=Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        values = {}
        for name in self.names:
            if name in CLASSIFICATION:
                values[name] = float(CLASSIFICATION[name](references, predictions))
            elif np.ptp(predictions) == 0 or np.ptp(references) == 0:
                values[name] = 0.0
            else:
                values[name] = float(CORRELATIONS[name](predictions, references).statistic)
        return values
