"""Local tasks: what MTEB is given of one's own files, and which files are refused."""

import math

import pytest
import yaml

from neobert_hf.evaluation.mteb.local_tasks import LocalTask, make_task, read_local_tasks
from tests.helpers.mteb_tasks import write_rows


def test_reranking_candidates_are_positives_and_negatives(tmp_path):
    """Rows of the same query are one query; a text is one document."""
    rows = {"query": ["a", "b", "a"], "positive": [["x"], ["y"], ["z"]], "negative": [["y", "z"], ["x"], ["w"]]}
    write_rows(tmp_path / "rows.jsonl", **rows)
    task = make_task(LocalTask("Mine", "Reranking", tmp_path / "rows.jsonl"))
    task.load_data()
    split = task.dataset["default"]["test"]
    text = dict(zip(split["corpus"]["id"], split["corpus"]["text"]))
    query = dict(zip(split["queries"]["text"], split["queries"]["id"]))
    assert sorted(text.values()) == ["w", "x", "y", "z"] and len(query) == 2
    candidates = {name: [text[number] for number in split["top_ranked"][query[name]]] for name in query}
    assert {name: sorted(found) for name, found in candidates.items()} == {"a": ["w", "x", "y", "z"], "b": ["x", "y"]}
    relevant = {name: sorted(text[number] for number in split["relevant_docs"][query[name]]) for name in query}
    assert relevant == {"a": ["x", "z"], "b": ["y"]}


def test_labels_become_their_numbers_in_order_and_texts_that_are_trained_on_are_said(tmp_path, capsys):
    """MTEB needs a label 1 if there are two."""
    write_rows(tmp_path / "train.jsonl", text=["a", "b"], label=["spam", "ham"])
    write_rows(tmp_path / "data.jsonl", text=["a", "d"], label=["ham", "spam"])
    task = make_task(LocalTask("Mine", "Classification", tmp_path / "data.jsonl", train=tmp_path / "train.jsonl"))
    task.load_data()
    assert task.dataset["test"]["label"][:] == [0, 1] and task.dataset["train"]["label"][:] == [1, 0]
    assert "1 of 2 rows of `data` of Mine" in capsys.readouterr().out


def test_labels_of_pairs_may_be_words(tmp_path):
    """As pandas writes booleans into a CSV file."""
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,label\na,b,True\nc,1,False\n")
    task = make_task(LocalTask("Mine", "PairClassification", tmp_path / "pairs.csv"))
    task.load_data()
    assert task.dataset["test"][:] == {"sentence1": ["a", "c"], "sentence2": ["b", "1"], "label": [1, 0]}


PAIR = {"sentence1": ["a"], "sentence2": ["b"], "label": [1]}
TWO_PAIRS = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "score": [1.0, math.nan]}
LISTS = {"query": ["a", "b"], "positive": [["a"], []], "negative": [["b"], ["a"]]}
LEARNED = {"type": "Classification", "train": "train.jsonl"}

# The description, the rows, and what the error names.
BAD_TASKS = [
    ({"type": "Search"}, PAIR, "Search.*Retrieval"),
    ({"type": "Retrieval", "prompt": "x"}, PAIR, "prompt"),
    ({"type": "Retrieval", "data": "none.jsonl"}, PAIR, "none.jsonl"),
    ({"type": "Classification"}, PAIR, "train"),
    ({"type": "STS", "columns": {"text": "a"}}, PAIR, "text"),
    ({"type": "PairClassification", "instruction": {"query": "x", "document": "y"}}, PAIR, "no documents"),
    ({"type": "PairClassification", "instruction": {"querry": "x"}}, PAIR, "`query`"),
    ({"type": "PairClassification"}, PAIR | {"label": [2]}, "row 0: the label .*'2'"),
    ({"type": "Reranking"}, LISTS, "row 1: 'positive'"),
    ({"type": "STS"}, TWO_PAIRS, "row 1: 'score'"),
    (LEARNED, {"text": ["a", "b"], "label": ["x", "y"]}, "2 of 2 rows of `data`"),
    (LEARNED, {"text": ["c"], "label": ["z"]}, "the label 'z'"),
]


@pytest.mark.parametrize("entry, columns, message", BAD_TASKS)
def test_bad_descriptions_and_rows_are_refused_by_task(tmp_path, entry, columns, message):
    write_rows(tmp_path / "rows.parquet", **columns)
    write_rows(tmp_path / "train.jsonl", text=["a", "b"], label=["x", "y"])
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"Mine": {"data": "rows.parquet"} | entry}))
    with pytest.raises((ValueError, FileNotFoundError), match=f"Mine.*{message}"):
        read_local_tasks(tmp_path / "tasks.yaml")
