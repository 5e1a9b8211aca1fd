"""Metrics as `evaluate.Metric`s based on scikit-learn, SciPy and seqeval.

They replace `evaluate.load("glue", ...)`, which downloads code.
"""

import re
import string
from collections import Counter
from functools import partial

import evaluate
import numpy as np
from datasets import Features, List, Value
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
    """Some of the metrics above, computed together.

    `f1` is the F1 of label 1. The correlation with constant predictions is 0, like scikit-learn's Matthews correlation;
    SciPy leaves it undefined.

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
            elif np.ptp(predictions) == 0:
                values[name] = 0.0
            else:
                values[name] = float(CORRELATIONS[name](predictions, references).statistic)
        return values


def is_entity_scheme(tags: list[str]) -> bool:
    """Whether tags mark words in entities: `B-PER`, `I-PER`, `O`, also with the letters of IOBES and BILOU."""
    return any("-" in tag for tag in tags) and all(re.fullmatch(r"O|[BIESLU]-.+", tag) for tag in tags)


def to_iobes(rows: list[list[str]]) -> list[list[str]]:
    """Replace BILOU's letters `L` (last word of an entity) and `U` (one-word entity) by `E` and `S`, as in seqeval."""
    return [[re.sub("^L-", "E-", re.sub("^U-", "S-", tag)) for tag in row] for row in rows]


class TagMetric(evaluate.Metric):
    """Metrics of word tags: accuracy and, for entities, precision, recall and F1 of whole entities as in `conlleval`.

    Args:
        entities: whether the tags mark entities (`is_entity_scheme`). The accuracy over single tags is always computed.

    Example:

    ```python
    >>> TagMetric(entities=True).compute(predictions=[["B-PER", "O"]], references=[["B-PER", "O"]])["f1"]
    1.0
    ```
    """

    def __init__(self, entities: bool, **kwargs):
        self.entities = entities
        super().__init__(config_name="entities" if entities else "tags", keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        tags = List(Value("string"))
        features = Features({"predictions": tags, "references": tags})
        return evaluate.MetricInfo(description="seqeval", citation="", features=features)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        pairs = [(tag, other) for row, others in zip(predictions, references) for tag, other in zip(row, others)]
        values = {"accuracy": float(np.mean([tag == other for tag, other in pairs]))}
        if self.entities:
            from seqeval.metrics import f1_score, precision_score, recall_score

            metrics = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
            rows = to_iobes(references), to_iobes(predictions)
            values |= {name: float(metric(*rows, zero_division=0)) for name, metric in metrics.items()}
        return values


def entities_of(predictions: list[list[str]], references: list[list[str]]) -> list[list]:
    """For each kind of entity: its name, precision, recall and F1 in percent, and how many there are."""
    from seqeval.metrics import classification_report

    report = classification_report(to_iobes(references), to_iobes(predictions), output_dict=True, zero_division=0)
    return [
        [name, *(f"{100 * values[key]:.1f}" for key in ("precision", "recall", "f1-score")), int(values["support"])]
        for name, values in report.items()
        if not name.endswith(" avg")
    ]


def normal_answer(text: str) -> list[str]:
    """The words of an answer as SQuAD compares them: lower case, without punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def answer_scores(found: str, right: list[str]) -> tuple[float, float]:
    """Exact match and F1 of an answer, each the best over the right answers; an empty list means "no answer"."""
    scores = [(0.0, 0.0)]
    for answer in right or [""]:
        words, expected = normal_answer(found), normal_answer(answer)
        common = sum((Counter(words) & Counter(expected)).values())
        f1 = 2 * common / (len(words) + len(expected)) if words and expected else float(words == expected)
        scores.append((float(words == expected), f1))
    return max(exact for exact, _ in scores), max(f1 for _, f1 in scores)


class AnswerMetric(evaluate.Metric):
    """Exact match and F1 of answers as in SQuAD v1 and v2; also F1 of the questions with and without an answer.

    References:
        https://arxiv.org/abs/1606.05250, section 6.1; https://arxiv.org/abs/1806.03822
    """

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("string"), "references": List(Value("string"))})
        return evaluate.MetricInfo(description="SQuAD", citation="", features=features)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        scores = np.array([answer_scores(found, right) for found, right in zip(predictions, references)])
        has = np.array([bool(right) for right in references])
        values = {"f1": scores[:, 1].mean(), "exact_match": scores[:, 0].mean()}
        if not has.all():
            values |= {"no_answer_f1": scores[~has, 1].mean()} | (
                {"answer_f1": scores[has, 1].mean()} if has.any() else {}
            )
        return {name: float(value) for name, value in values.items()}
