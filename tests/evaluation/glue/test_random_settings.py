"""Random settings of GLUE and the steps, ids and metrics written out here."""

import math
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import example, given
from hypothesis import strategies as st

from neobert_hf.evaluation.glue.recipe import GlueSettings
from neobert_hf.evaluation.glue.report import summarize
from neobert_hf.evaluation.glue.runs import Hyperparameters, Run
from neobert_hf.evaluation.glue.trainer import GlueArguments, TaskData
from neobert_hf.training.metrics import ScoreMetric
from tests.helpers.glue_runs import TASKS
from tests.helpers.properties import reproducible
from tests.helpers.small_tokenizer import small_tokenizer


protocol = {
    "num_train_epochs": st.floats(0.5, 20),
    "eval_steps": st.none() | st.integers(1, 1000),
    "warmup_steps": st.integers(0, 50) | st.floats(0, 1),
    "early_stopping_patience": st.integers(1, 30),
}
point = {
    "batch_size": st.integers(1, 64),
    "learning_rate": st.floats(0, 1e-3, exclude_min=True),
    "weight_decay": st.floats(0, 1),
}


@reproducible(60)
@given(st.fixed_dictionaries(protocol), st.fixed_dictionaries(point), st.integers(100, 10**6))
def test_steps_of_a_run(values, hyperparameters, rows):
    arguments = GlueArguments("unused", use_cpu=True, bf16=False, **values)
    run = Run("mnli", Hyperparameters(**hyperparameters), seed=1)
    found = arguments.for_run(run, "folder", rows)
    batches = math.ceil(rows / hyperparameters["batch_size"])
    assert found.max_steps == math.floor(values["num_train_epochs"] * batches)
    every = values["eval_steps"] or max(1, min(500, batches // 10))
    assert found.eval_steps == found.save_steps == found.logging_steps == every
    warmup = values["warmup_steps"]
    expected = int(warmup) if warmup >= 1 else math.ceil(found.max_steps * warmup)
    assert found.get_warmup_steps(found.max_steps) == expected
    assert (found.learning_rate, found.weight_decay) == (
        run.hyperparameters.learning_rate,
        hyperparameters["weight_decay"],
    )
    assert found.early_stopping_patience == values["early_stopping_patience"]


def longest_first(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """The shorter text keeps its tokens up to half of the room, and the longer one has the rest."""
    shorter = min(len(first), len(second), room // 2)
    if len(first) > len(second):
        return first[: room - shorter], second[:shorter]
    return first[:shorter], second[: room - shorter]


letters = st.integers(1, 40).map(lambda number: " ".join(("abcdefgh" * 5)[:number]))


def test_ids_of_texts_and_pairs():
    tokenizer = small_tokenizer(model_input_names=["input_ids", "attention_mask"])

    @reproducible(15)
    @given(st.fixed_dictionaries({"max_length": st.integers(8, 60)}), letters, st.none() | letters)
    def check(values, text, other):
        length = GlueSettings(model="m", task=["mnli"], task_config="t", **values).max_length
        columns = {"text": [text], "label": [0]} | ({} if other is None else {"text_pair": [other]})
        splits = DatasetDict({"train": Dataset.from_dict(columns)})
        (found,) = TaskData(TASKS["mnli"], splits).tokenize(tokenizer, length).splits["train"]["input_ids"]
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, other or "")]
        if other is None:
            assert found == [2, *ids[0][: length - 2], 3]
        else:
            first, second = longest_first(*ids, length - 3)
            assert found == [2, *first, 3, *second, 3]

    check()


@reproducible(12)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=40))
def test_metrics_of_labels(pairs):
    predicted, labels = map(list, zip(*pairs))
    hits = Counter(pairs)
    found = ScoreMetric(["accuracy", "f1", "macro_f1", "matthews_correlation"]).compute(
        predictions=predicted, references=labels
    )

    def f1(label: int) -> float:
        total = predicted.count(label) + labels.count(label)
        return 2 * hits[label, label] / total if total else 0.0

    both = hits[1, 1] * hits[0, 0] - hits[1, 0] * hits[0, 1]
    spread = math.sqrt(math.prod(part.count(label) for part in (predicted, labels) for label in (0, 1)))
    present = {*predicted, *labels}
    expected = {
        "accuracy": (hits[0, 0] + hits[1, 1]) / len(pairs),
        "f1": f1(1),
        "macro_f1": sum(map(f1, present)) / len(present),
        "matthews_correlation": both / spread if spread else 0.0,
    }
    assert found == pytest.approx(expected, abs=1e-12)


def ranks(values: list[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def correlation(first: list[float], second: list[float]) -> float:
    first, second = (np.array(values) - np.mean(values) for values in (first, second))
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))


@reproducible(12)
@example([(2, 0), (2, 1), (2, 4)])
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=3, max_size=30))
def test_metrics_of_scores(pairs):
    predicted, labels = ([float(value) for value in values] for values in zip(*pairs))
    if len(set(labels)) == 1:
        return
    found = ScoreMetric(["pearson", "spearmanr"]).compute(predictions=predicted, references=labels)
    expected = {"pearson": 0.0, "spearmanr": 0.0}
    if len(set(predicted)) > 1:
        expected = {
            "pearson": correlation(predicted, labels),
            "spearmanr": correlation(ranks(predicted), ranks(labels)),
        }
    assert found == pytest.approx(expected, abs=1e-9)


@reproducible(30)
@given(st.lists(st.tuples(st.sampled_from([8, 16]), st.floats(0, 1)), min_size=1, max_size=12))
def test_means_over_seeds(runs):
    results = [
        {"score": score, "metrics": {"f1": score / 2}, "hyperparameters": dict.fromkeys(point, size), "run": "r"}
        | {"settings": {"data": "rows"}}
        for size, score in runs
    ]
    scores = {size: [100 * score for other, score in runs if other == size] for size, _ in runs}
    found, best = summarize(results), max(scores, key=lambda size: np.mean(scores[size]))
    assert found["score"] == pytest.approx(np.mean(scores[best])) and found["seeds"] == len(scores[best])
    assert found["metrics"] == {"f1": pytest.approx(np.mean(scores[best]) / 2)}
    assert found["std"] == (None if len(scores[best]) == 1 else pytest.approx(np.std(scores[best], ddof=1), abs=1e-9))
    assert found["searched"] == len(scores) and found["runs"] == len(runs)
