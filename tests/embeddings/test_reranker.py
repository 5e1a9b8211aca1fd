"""Rerankers that learn numbers: a teacher's, which are stored, or those of a column."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder

from neobert_hf.embeddings import reranker
from neobert_hf.training.arguments import fast_bfloat16
from tests.helpers.embedding_runs import files_of, load, losses_of, run


@pytest.fixture(scope="module")
def teacher(encoder, tmp_path_factory) -> Path:
    """Its logits are about 3, and differ."""
    model = CrossEncoder(str(encoder), num_labels=1, device="cpu")
    model.model.classifier.bias.data += 3
    model.model.classifier.weight.data *= 20
    folder = tmp_path_factory.mktemp("teacher")
    model.save(str(folder))
    return folder


def test_a_teacher_scores_each_pair_once_and_its_logits_are_learned(settings, teacher, tmp_path, monkeypatch):
    changes = {"teacher": teacher, "only": "triplets nested", "negatives": 1, "max_steps": 2, "eval_strategy": "no"}
    monkeypatch.setattr(reranker, "ROWS_OF_PART", 60)
    read, predict, write = [], CrossEncoder.predict, reranker.write_parquet

    def count(self, pairs, **options):
        read.append(len(pairs))
        return predict(self, pairs, **options)

    def killed(file, rows):
        if file.name == "000000120.parquet":
            raise KeyboardInterrupt
        write(file, rows)

    monkeypatch.setattr(CrossEncoder, "predict", count)
    log = run("reranker", settings(output_dir=tmp_path / "whole", **changes))
    whole, rows, squares = list(read), 0, []
    for file in (tmp_path / "whole" / "scored").glob("*.parquet"):
        stored = Dataset.from_parquet(str(file))
        rows += len(stored)
        for row in stored.select(range(0, len(stored), 10)):
            pairs = [(row["query"], text) for text in [row["positive"], *row["negatives"][:1]]]
            expected = predict(CrossEncoder(str(teacher), device="cpu"), pairs, activation_fn=torch.nn.Identity())
            tolerance = 1e-2 if fast_bfloat16(torch.device("cpu")) else 1e-5
            assert row["scores"] == pytest.approx(expected, abs=tolerance, rel=tolerance)
            squares += np.square(expected).tolist()
    assert rows == 250 and not list((tmp_path / "whole" / "scored").glob("*.parts"))
    # A new head scores near 0.
    assert losses_of(log)[0] == pytest.approx(np.mean(squares), rel=0.2) and np.std(squares) > 1e-3
    # Interrupted in its third part, it goes on with that, and nothing is read once trained on.
    read.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reranker, "write_parquet", killed)
        run("reranker", settings(**changes))
    lost = read[-1]
    run("reranker", settings(**changes))
    assert sum(read) == sum(whole) + lost
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")


def test_numbers_of_a_column_are_learned(settings, data, tmp_path):
    pairs = [json.loads(line) for line in (data / "pairs.jsonl").read_text().splitlines()]
    rows = [pair | {"grade": 3.0 + number % 2} for number, pair in enumerate(pairs)]
    changes = {"datasets": None, "pairs": tmp_path / "pairs.parquet", "query": "title", "positive": "body"}
    Dataset.from_list(rows).to_parquet(tmp_path / "pairs.parquet")
    log = run("reranker", settings(**changes, score="grade", held_out=0.2, learning_rate=2e-2))
    losses = losses_of(log)
    assert losses[0] == pytest.approx(12.5, abs=2.5) and losses[-1] < losses[0] / 2
    assert {"eval_scores_pearson", "eval_scores_spearman"} < set(log[0])
    # The model gives the numbers, and no sigmoid of them.
    assert load("reranker", tmp_path / "run").predict([("for loops", "a list of numbers")]).item() > 1.2


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("reranker", {"teacher": "helper"}, "`teacher`.*SentenceTransformer.*must be a CrossEncoder"),
        ("reranker", {"teacher": "reranker", "only": "pairs"}, "pairs has no hard negatives.*`miner`"),
        ("reranker", {"score": "grade"}, "`score` is a column of `pairs`"),
        ("reranker", {"scored": ["pairs"]}, "Some of the tables have a `score`"),
        ("reranker", {"scored": ["pairs"], "only": "pairs", "miner": "helper"}, "`miner`.*have a `score` already"),
        ("reranker", {"scored": ["triplets"]}, "`score` is 'grade'.*`negatives`"),
        ("dense", {"scored": ["pairs"]}, "dataset pairs: only `train_reranker` learns a `score`"),
    ],
)
def test_what_has_no_scores_or_too_many_is_refused(
    settings, teacher, helper, data, edit, tmp_path, kind, change, message
):
    change = dict(change)
    graded = [json.loads(line) | {"grade": 1} for line in (data / "pairs.jsonl").read_text().splitlines()]
    Dataset.from_list(graded).to_parquet(data / "graded.parquet")

    def score(description):
        for name in change.pop("scored"):
            description["train"][name] |= {"score": "grade", "source": "graded.parquet"}

    if "scored" in change:
        change |= {"datasets": edit(score)}
    places = {"helper": helper, "reranker": teacher}
    change |= {name: places[change[name]] for name in ("teacher", "miner") if name in change}
    with pytest.raises(ValueError, match=message):
        run(kind, settings(**change))
