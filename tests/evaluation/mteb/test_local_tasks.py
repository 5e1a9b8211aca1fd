"""Local tasks: what MTEB is given of one's own files, and which files are refused."""

import math

import mteb
import pytest
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from neobert_hf.evaluation.mteb.local_tasks import LocalTask, make_task, read_local_tasks
from tests.helpers.mteb_tasks import random_texts, refused, write_rows


def test_function_and_yaml_make_the_same_task(local):
    (by_yaml, *_), instructions = read_local_tasks(local / "tasks.yaml")
    files = {"data": local / "search.jsonl", "corpus": local / "more.parquet"}
    by_call = make_task(LocalTask("Search", "Retrieval", **files, columns={"query": "question"}))
    assert by_call.metadata == by_yaml.metadata and instructions["Search"] == "the cat sat"
    by_call.load_data()
    split = by_call.dataset["default"]["test"]
    assert split["top_ranked"] is None and set(split["relevant_docs"]) == set(split["queries"]["id"])
    assert set(split["corpus"]["text"]) == set(random_texts(24, seed=1) + random_texts(24, seed=2))


def test_the_data_may_be_several_files(tmp_path):
    def revision() -> str:
        task = make_task(LocalTask("Mine", "STS", tmp_path / "*.jsonl"))
        task.load_data()
        assert task.dataset["test"]["score"][:] == [1.0, 2.0]
        return task.metadata.revision

    for name, score in (("a", 1.0), ("b", 2.0)):
        write_rows(tmp_path / f"{name}.jsonl", sentence1=["a cat"], sentence2=["the dog"], score=[score])
    first = revision()
    assert revision() == first
    write_rows(tmp_path / "b.jsonl", sentence1=["a dog"], sentence2=["the dog"], score=[2.0])
    assert revision() != first


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


@pytest.mark.parametrize(
    "labels, numbers",
    [
        (["spam", "ham"], {"ham": 0, "spam": 1}),
        ([3, 2], {2: 0, 3: 1}),
        (["c", "a", "b"], {"a": -1, "b": 0, "c": 1}),
        ([1, 2], {1: 1, 2: 2}),
    ],
)
def test_of_two_labels_one_is_number_one(models, tmp_path, labels, numbers):
    """MTEB's average precision is of the label 1. Two labels of `data` may be some of more in `train`."""
    texts = random_texts(24)
    write_rows(tmp_path / "train.jsonl", text=[f"{text} mat" for text in texts], label=labels * (24 // len(labels)))
    write_rows(tmp_path / "data.jsonl", text=texts, label=labels[:2] * 12)
    task = make_task(LocalTask("Mine", "Classification", tmp_path / "data.jsonl", train=tmp_path / "train.jsonl"))
    task.load_data()
    assert task.dataset["test"]["label"][:2] == [numbers[label] for label in labels[:2]]
    assert task.dataset["train"]["label"][: len(labels)] == [numbers[label] for label in labels]
    (result,) = mteb.evaluate(SentenceTransformer(models[0], device="cpu"), task, cache=None).task_results
    assert 0 < result.get_score() < 1


def test_csv_files_of_one_task_are_read_alike(tmp_path):
    """A column may hold only numbers in one of its files. Booleans are labels of pairs."""
    (tmp_path / "train.csv").write_text("text,label\na,10\nb,05\n404,other\n")
    (tmp_path / "data.csv").write_text("text,label\n401,10\n402,10\n")
    task = make_task(LocalTask("a", "Classification", tmp_path / "data.csv", train=tmp_path / "train.csv"))
    task.load_data()
    assert task.dataset["test"]["text"][:] == ["401", "402"]
    assert task.dataset["test"]["label"][:] == [task.dataset["train"]["label"][0]] * 2
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,label\na,b,True\nc,1,False\n")
    task = make_task(LocalTask("b", "PairClassification", tmp_path / "pairs.csv"))
    task.load_data()
    assert task.dataset["test"]["label"][:] == [1, 0]


def test_local_tasks_that_cannot_be_read(local, tmp_path):
    def entry(**fields):
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"Mine": fields}))
        return ["--mteb", "false", "--local_tasks", str(tmp_path / "tasks.yaml")]

    search, topics = str(local / "search.jsonl"), str(local / "topics.parquet")
    refused("unknown type 'Search'; known are Retrieval", *entry(type="Search", data=search))
    refused(
        "row 0 has no column 'query'; it has 'question', 'document'",
        *entry(type="Retrieval", data=search),
    )
    refused("`columns` names 'question'", *entry(type="Retrieval", data=search, columns={"question": "query"}))
    refused("unknown key 'prompt'", *entry(type="Retrieval", data=search, prompt="x"))
    refused("Mine lacks `data`: add it", *entry(type="Retrieval"))
    refused("none.jsonl' matches no file", *entry(type="Retrieval", data="none.jsonl"))
    refused("needs `train`", *entry(type="Classification", data=topics))
    refused("takes no `train`", *entry(type="STS", data=topics, train=topics))
    write_rows(tmp_path / "none.jsonl", query=["a", None], document=["a", "b"])
    refused("none.jsonl, row 1: 'query' is None; it must be a text", *entry(type="Retrieval", data="none.jsonl"))
    write_rows(tmp_path / "blank.jsonl", query=["a", " "], document=["a", "b"])
    refused("blank.jsonl, row 1: 'query' is ' '; it must be a text", *entry(type="Retrieval", data="blank.jsonl"))
    write_rows(tmp_path / "two.jsonl", text=["a", "b"], label=[1, 2])
    two = {"data": "two.jsonl", "train": "two.jsonl"}
    refused("all texts of `data` are also in `train`", *entry(type="Classification", **two))
    write_rows(tmp_path / "n.parquet", query=["a"], positive=[["a"]], negative=[["b", None]])
    refused("n.parquet, row 0: 'negative' is None; it must be a text", *entry(type="Reranking", data="n.parquet"))
    write_rows(tmp_path / "p.parquet", query=["a", "b"], positive=[["a"], []], negative=[["b"], ["a"]])
    refused("row 1: 'positive' is ..; it must be a list of one text", *entry(type="Reranking", data="p.parquet"))
    write_rows(tmp_path / "flat.jsonl", query=["a"], positive=["a"], negative=["b"])
    refused("row 0: 'positive' is 'a'; it must be a list of one text", *entry(type="Reranking", data="flat.jsonl"))
    write_rows(tmp_path / "labels.jsonl", sentence1=["a"], sentence2=["b"], label=[2])
    refused("the label of a pair must be 1 or 0; it is '2'", *entry(type="PairClassification", data="labels.jsonl"))
    write_rows(tmp_path / "scores.jsonl", sentence1=["a", "b"], sentence2=["c", "d"], score=[0.0, 0.0])
    refused("every score is 0.0", *entry(type="STS", data="scores.jsonl"))
    for score, found in ((["3", "x"], "'x'"), ([1.0, math.nan], "nan")):
        write_rows(tmp_path / "s.parquet", sentence1=["a", "b"], sentence2=["c", "d"], score=score)
        refused(f"s.parquet, row 1: 'score' is {found}; it must be a number", *entry(type="STS", data="s.parquet"))
    write_rows(tmp_path / "p.parquet", query=["a", "b"], positive=[["a"], ["b"]], negative=[["b"], []])
    refused("row 1: 'negative' is ..; it must be a list of one text", *entry(type="Reranking", data="p.parquet"))
    write_rows(tmp_path / "one.jsonl", text=["a", "b"], label=[1, 1], sentence1=["a", "b"], sentence2=["c", "d"])
    for task_type in ("Clustering", "PairClassification"):
        refused("every label is '?1'?; any", *entry(type=task_type, data="one.jsonl"))
    refused("every label is '1'; any", *entry(type="Classification", data="one.jsonl", train="one.jsonl"))
    for label in (["a", "b"], ["0", "2"]):
        write_rows(tmp_path / "train.jsonl", text=["a", "b"], label=label)
        message = f"label '1' of `data` is not in `train`, which has {label[0]!r}, {label[1]!r}"
        refused(message, *entry(type="Classification", data="one.jsonl", train="train.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    refused("empty.jsonl is empty", *entry(type="STS", data="empty.jsonl"))
    Dataset.from_dict({"query": [], "document": []}).to_parquet(tmp_path / "no_rows.parquet")
    refused("no_rows.parquet is empty: it holds no row", *entry(type="Retrieval", data="no_rows.parquet"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "lab')
    refused("broken.jsonl, line 2 is not valid JSON", *entry(type="Clustering", data="broken.jsonl"))
    refused("has an unknown format", *entry(type="STS", data="tasks.yaml"))
