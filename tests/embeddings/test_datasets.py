"""Which rows the description of a dataset leads to, and what is refused before training."""

import json

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Value

from neobert_hf.embeddings.datasets import PairDataset, load_pairs, read_descriptions
from tests.helpers.embedding_runs import run
from tests.helpers.models import ROOT


ROW = {"title": "a", "body": "b"}

# Rows of a file of JSON lines, keys of its description, and what the error names.
BAD_ROWS = [
    ([ROW, ROW | {"body": None}], {}, ["bad.jsonl, row 1", "positive", "skip_incomplete"]),
    ([ROW, ROW | {"body": "\u200b"}], {}, ["row 1", "positive"]),
    ([ROW | {"n": 0.0}, ROW | {"n": 2.0}, ROW | {"n": 2.0, "body": None}], {"above": {"n": 1}}, ["row 2", "positive"]),
    ([ROW | {"body": {"a": "b"}}], {}, ["row 0", "'body'", "dict"]),
    ([ROW | {"neg": None}] * 2, {"negatives": "neg"}, ["bad.jsonl", "`negatives`"]),
    ([ROW | {"neg": ["n"]}], {"negatives": "neg.text"}, ["row 0", "'neg.text'"]),
    ([ROW], {"positive": "body.0"}, ["row 0", "'body.0'"]),
    ([ROW | {"body": ["b", "c"]}], {"positive": "body.*"}, ["row 0", "2 texts", "body.*"]),
    ([ROW | {"body": None}], {"skip_incomplete": True}, ["bad.jsonl"]),
    ([ROW], {"query": "titel"}, ["'titel'", "'title'"]),
    ([ROW | {"body": "['b', 'c']"}], {}, ["bad.jsonl", "'body'"]),
]


@pytest.mark.parametrize("rows, keys, named", BAD_ROWS)
def test_bad_rows_are_refused_by_file_and_row(edit, tmp_path, rows, keys, named):
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = edit(lambda content: content["train"]["pairs"].update(keys | {"source": str(tmp_path / "bad.jsonl")}))
    with pytest.raises(ValueError, match="Dataset pairs") as error:
        load_pairs(read_descriptions(str(file)).train["pairs"])
    assert all(name in str(error.value) for name in named)


BAD_DESCRIPTIONS = [
    (lambda c: c["train"]["pairs"].pop("instruction"), "pairs.*`instruction`"),
    (lambda c: c["train"]["pairs"].update(postive="body"), "pairs.*'postive'.*'positive'"),
    # All keys are named, also those of the dataset itself.
    (lambda c: c["train"]["pairs"].update(xyz=1), "'xyz'.*batch_size, default, document_instruction, instruction"),
    (lambda c: c["train"]["pairs"].update(instructions=""), "'instructions'.*'instruction'"),
    (lambda c: c["evaluation"]["retrieval"].update(batch_size=8), "retrieval.*'batch_size'"),
    (lambda c: c["train"]["pairs"].update(source=["a.csv"]), "pairs.*`source`"),
    (lambda c: c["train"]["pairs"].update(positive="title"), "pairs.*`positive` is 'title'"),
    (lambda c: c["train"]["pairs"].update(batch_size="8"), "pairs.*'batch_size'"),
    (lambda c: c["train"]["pairs"].update(parts=[{"sauce": "x"}]), "pairs.*'sauce'.*'source'"),
    (lambda c: c["train"].clear(), "no training dataset"),
    (lambda c: c["evaluation"].update(clustering={"source": "x"}), "'clustering'"),
    (lambda c: c["train"].update(query=c["train"].pop("pairs")), "dataset query"),
]


@pytest.mark.parametrize("change, message", BAD_DESCRIPTIONS)
def test_bad_descriptions_are_refused_by_dataset_and_key(edit, change, message):
    with pytest.raises(ValueError, match=message):
        read_descriptions(str(edit(change)))


def use_twice(content: dict) -> None:
    pairs = {key: content["train"]["pairs"][key] for key in ("source", "query", "positive")}
    content["train"] = {"pairs": content["train"]["pairs"]}
    content["evaluation"] = {"retrieval": pairs | {"instruction": ""}}


BAD_RUNS = [
    (lambda c: c["train"]["pairs"].update(source="nowhere/pairs.jsonl"), FileNotFoundError, "nowhere/pairs.jsonl"),
    (lambda c: c.pop("evaluation"), ValueError, "eval_strategy"),
    (use_twice, ValueError, "retrieval dataset are also trained on"),
    (lambda c: c["train"]["pairs"].update(source="equal.jsonl"), ValueError, "pairs has 20 rows.*`batch_size`"),
]


@pytest.mark.parametrize("change, kind, message", BAD_RUNS)
def test_nothing_is_trained_on_a_bad_description(settings, edit, data, tmp_path, change, kind, message):
    (data / "equal.jsonl").write_text((json.dumps(ROW) + "\n") * 20)
    with pytest.raises(kind, match=message):
        run("dense", settings(datasets=edit(change), eval_strategy="steps"))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


# A row of every shape that a dataset of the paper has on the Hub.
SHAPES = {
    "AMAZONQA": {"query": "q", "pos": ["p", "other"]},
    "CONCURRENTQA": {
        "question": "q",
        "pos_paras": [{"title": "t", "text": "p"}, {"title": "t", "text": "x"}],
        "neg_paras": [{"title": "t", "text": "n1"}, {"title": "t", "text": "n2"}],
    },
    "PAQ": {"set": ["q", "p"]},
    "QQP": {"set": {"query": "q", "pos": ["p"], "neg": ["n1", "n2"]}},
    "SENTENCECOMP": {"set": ["p", "q"]},
    "STACKOVERFLOW": {"query": "q", "positive": ["p", "x"], "negative": ["n1", "n2"]},
    "STSBENCHMARK": {"sentence1": "q", "sentence2": "p", "score": 4.5},
    "GOOAQ": {"question": "q", "answer": "p"} | {f"negative_{i}": f"n{i}" for i in range(1, 6)},
    "PUBMEDQA": {"anchor": "q", "positive": "p"} | {f"negative_{i}": f"n{i}" for i in range(1, 21)},
    "ALLNLI": {"anchor": "q", "positive": "p", "negative": "n1"},
    "WIKIHOW": {"text": "q", "summary": "p"},
    "MEDMCQA": {"question": "q", "exp": "p", "subject_name": "s"},
}
NEGATIVES = {"CONCURRENTQA": 2, "QQP": 2, "STACKOVERFLOW": 2, "GOOAQ": 5, "PUBMEDQA": 20, "ALLNLI": 1}
PAPER = ROOT / "configs" / "embeddings" / "datasets.yaml"


def papers(name: str, tmp_path, rows: list[dict], features: Features | None = None) -> PairDataset:
    """A dataset of the paper, with these rows in place of those on the Hub."""
    dataset = read_descriptions(str(PAPER), [name]).train[name]
    (table,) = dataset.tables
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    # A slice of the split is for the Hub alone.
    table.source, table.subset, table.split = str(tmp_path / f"{name}.parquet"), None, "train"
    return dataset


@pytest.mark.parametrize("name", SHAPES)
def test_the_papers_columns_give_queries_positives_and_negatives(tmp_path, name):
    (row,) = load_pairs(papers(name, tmp_path, [SHAPES[name]]))
    expected = [f"n{i}" for i in range(1, NEGATIVES.get(name, 0) + 1)]
    assert row == {"query": "q", "positive": "p", "negatives": expected}


def test_scores_labels_and_lookups(tmp_path):
    rows = [{"sentence1": f"a{score}", "sentence2": f"b{score}", "score": score} for score in (3.9, 4.0, 4.1, 5.0)]
    assert load_pairs(papers("STS12", tmp_path, rows))["query"][:] == ["a4.1", "a5.0"]

    names = ClassLabel(names=["Society & Culture", "Health"])
    features = Features({"topic": names, "question_title": Value("string"), "best_answer": Value("string")})
    rows = [{"topic": 1, "question_title": "t", "best_answer": "b"}]
    # This one lacks its answer.
    rows += [{"topic": 0, "question_title": "t", "best_answer": ""}]
    found = load_pairs(papers("YAHOO_CLUST", tmp_path, rows, features))
    assert found[:] == {"query": ["t b"], "positive": ["Health"], "negatives": [[]]}

    links = [("q2", "d1"), ("q1", "gone")]
    rows = [{"query-id": query, "corpus-id": document, "score": 1} for query, document in links]
    fever = papers("FEVER", tmp_path, rows)
    for column, ids in (("query-id", ["q1", "q2"]), ("corpus-id", ["d2", "d1"])):
        texts = [{"_id": one, "text": f"text of {one}", "title": "t"} for one in ids]
        Dataset.from_list(texts).to_parquet(tmp_path / f"{column}.parquet")
        lookup = fever.tables[0].lookups[column]
        lookup.source, lookup.subset, lookup.split = str(tmp_path / f"{column}.parquet"), None, "train"
    assert load_pairs(fever)[:] == {"query": ["text of q2"], "positive": ["text of d1"], "negatives": [[]]}


def load(tmp_path, entry: dict) -> dict:
    content = {"train": {"a": {"query": "q", "positive": "p", "instruction": ""} | entry}}
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump(content))
    return load_pairs(read_descriptions(str(tmp_path / "datasets.yaml")).train["a"])[:]


def test_ids_in_csv_files_lead_to_their_own_texts(tmp_path):
    """007 is not 7."""
    (tmp_path / "corpus.csv").write_text("id,text\n7,one\n007,two\n")
    (tmp_path / "rows.csv").write_text("q,p\n2024,007\n2025,7\n")
    lookup = {"source": "corpus.csv", "id": "id", "text": "text"}
    found = load(tmp_path, {"source": "rows.csv", "lookups": {"p": lookup}})
    assert found == {"query": ["2024", "2025"], "positive": ["two", "one"], "negatives": [[], []]}


def test_pairs_of_a_changed_file_are_read_anew(tmp_path):
    for text in "bc":
        (tmp_path / "a.csv").write_text(f"q,p\na,{text}\n")
        assert load(tmp_path, {"source": "a.csv"})["positive"] == [text]


def test_the_papers_datasets_and_instructions_are_table_7(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text()
    table = paper[paper.index("Table 7:") : paper.index("Table 8:")].splitlines()[3:]
    expected = [line.split("\t") for line in table if "\t" in line]
    data = read_descriptions(str(PAPER))
    assert set(data.evaluation) == {"retrieval", "sts"} and len(data.train) == 22
    found = [[name.replace("_CLUST", " <sub>CLUST</sub>"), each.instruction] for name, each in data.train.items()]
    assert found == expected
