"""Which rows the description of a dataset leads to, and what is refused before training."""

import json
import math

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, List, Value

from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.descriptions import read_descriptions
from neobert_hf.embeddings.pairs import load_pairs, most_negatives
from neobert_hf.embeddings.recipe import read_data
from neobert_hf.embeddings.trainers import MixtureTrainer
from tests.helpers.embedding_runs import run
from tests.helpers.models import ROOT


def write(tmp_path, rows: list[dict]) -> str:
    file = tmp_path / "bad.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


ROW = {"title": "a", "body": "b"}

BAD_ROWS = [
    ([ROW, ROW | {"body": None}], {}, "row 1 has no positive .body is empty.*skip_incomplete"),
    ([ROW | {"title": " "}], {}, "row 0 has no query"),
    (
        [ROW | {"score": 0.0}, ROW | {"score": 2.0}, ROW | {"score": 2.0, "body": None}],
        {"above": {"score": 1}},
        "bad.jsonl, row 2 has no positive",
    ),
    ([ROW, ROW | {"body": "\u200b"}], {}, "row 1 has no positive .body is empty"),
    ([ROW | {"body": {"a": "b"}}], {}, "'body' holds dict .*; it must be a text"),
    ([ROW | {"neg": None}] * 2, {"negatives": "neg"}, "no row has any. Leave `negatives` out"),
    ([ROW | {"neg": [["n"]]}], {"negatives": "neg.*"}, "'neg.*' holds list .*; it must be a text"),
    ([ROW | {"neg": ["n"]}], {"negatives": "neg.text"}, "'neg.text' does not lead to a text"),
    ([ROW], {"positive": "body.0"}, "'body.0' does not lead to a text .a text has no part '0'"),
    ([ROW], {"positive": "body.*"}, "'body.[*]' does not lead to a text .a text has no part '[*]'"),
    ([ROW | {"body": ["b"], "more": None}], {"positive": ["body.*", "more"]}, "no positive .more is empty"),
    # Once both became one long text.
    ([ROW | {"body": ["b", "c"]}], {"positive": "body.*"}, "row 0 has 2 texts at body.[*]; .*one positive.*as body.0 "),
    ([ROW | {"title": ["b", "c"]}], {"query": "title"}, "row 0 has 2 texts at title; a row needs one query"),
    ([ROW | {"body": None}], {"skip_incomplete": True}, "none of its rows is left"),
    ([ROW] * 20, {}, "pairs has 20 rows, but not 8 without a text in common"),
    ([ROW], {}, "pairs has 1 rows, but not 8"),
]


@pytest.mark.parametrize("rows, keys, message", BAD_ROWS)
def test_bad_rows_are_refused_before_training(settings, edit, tmp_path, rows, keys, message):
    source = write(tmp_path, rows)
    file = edit(lambda content: content["train"]["pairs"].update(keys | {"source": source}))
    with pytest.raises(ValueError, match="(?s)" + message):
        run("dense", settings(datasets=file))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def in_parts(entry: dict, parts) -> None:
    """Move the table of an entry into `parts`, so many times, or put this there."""
    table = {key: entry.pop(key) for key in ("source", "query", "positive")}
    entry["parts"] = [table] * parts if isinstance(parts, int) else parts


BAD_DESCRIPTIONS = [
    (lambda c: c["train"]["pairs"].update(query="titel"), "has no column 'titel'; it has 'title', 'body'"),
    (lambda c: c["train"]["pairs"].update(source="nowhere/pairs.jsonl"), "matches no file"),
    (lambda c: c["train"]["pairs"].pop("instruction"), "pairs lacks `instruction`: add it"),
    (
        lambda c: c["train"].update(other={"instruction": "Find."}),
        "other must have either `source`, ",
    ),
    (lambda c: c["train"]["pairs"].update(postive="body"), "has the unknown key 'postive'; did you mean 'positive'"),
    (lambda c: c["train"]["pairs"].update(query=3), "query"),
    (lambda c: c["train"]["pairs"].update(query=[]), "pairs: .*`query` and `positive` must each name a column"),
    (lambda c: c["train"]["pairs"].pop("positive"), "positive"),
    (lambda c: c["train"].clear(), "names no training dataset"),
    (lambda c: c.update(tests={}), "unknown key 'tests'"),
    (lambda c: c["evaluation"].update(clustering={}), "not 'clustering'"),
    (lambda c: c["evaluation"]["sts"].update(c["evaluation"]["retrieval"]), "row 0 has no column 'score'; it has"),
    (lambda c: c["evaluation"]["sts"].update(above={"score": 0.2}), "sts: scores are read from all rows of one table"),
    (lambda c: c["evaluation"]["sts"].update(skip_incomplete=True), "sts: scores are read from all rows of one table"),
    (lambda c: in_parts(c["evaluation"]["sts"], 2), "sts: scores are read from all rows of one table"),
    (lambda c: c.update(train=[c["train"]]), "`train` holds .*; it must hold one `key: value` per line"),
    (lambda c: c["train"]["pairs"].update(above=None), "pairs: .*'above' expected a dict"),
    (lambda c: c["train"]["pairs"].update(above={"title": "many"}), "pairs: .*'above'"),
    (
        lambda c: c["train"]["pairs"].update(above={"title": 4}),
        "'title' is .*; it must be a number",
    ),
    (lambda c: c["train"]["nested"].update(above={"set": 4}), "'set' is .*; it must be a number"),
    (lambda c: c["train"]["pairs"].update(lookups=["a"]), "pairs: .*'lookups' expected a dict"),
    (lambda c: in_parts(c["train"]["pairs"], {"a": 1}), "pairs must have either .*, or `parts`, a list of tables"),
    (lambda c: in_parts(c["train"]["pairs"], ["a"]), "pairs holds 'a'; it must hold one `key: value`"),
    (lambda c: c["train"]["pairs"].update(batch_size=0), "pairs: `batch_size` is 0; it must be a whole number, 2 or m"),
    (lambda c: c["train"]["pairs"].update(batch_size="8"), "pairs: .*'batch_size' with value '8'"),
]


@pytest.mark.parametrize("change, message", BAD_DESCRIPTIONS)
def test_bad_descriptions_are_refused_before_training(settings, edit, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("dense", settings(datasets=edit(change)))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "scores, message",
    [([0.0, 0.0], "every score .* is 0.0"), ([1.0, math.nan], "row 1: 'score' is nan; it must be a number")],
)
def test_scores_that_nothing_correlates_with_are_refused(settings, edit, tmp_path, scores, message):
    Dataset.from_dict({"a": ["x", "y"], "b": ["y", "z"], "score": scores}).to_parquet(tmp_path / "bad.parquet")
    source = str(tmp_path / "bad.parquet")
    file = edit(lambda content: content["evaluation"]["sts"].update(source=source))
    with pytest.raises(ValueError, match=message):
        run("dense", settings(datasets=file))


def test_a_query_is_not_its_own_answer(settings, edit, tmp_path):
    file = edit(lambda content: content["train"]["pairs"].update(positive=content["train"]["pairs"]["query"]))
    with pytest.raises(ValueError, match="`query` and `positive` are both .*: name two columns"):
        run("dense", settings(datasets=file))


def test_pairs_that_are_trained_on_are_no_evaluation(settings, edit, tmp_path):
    def use_twice(content):
        pairs = {key: content["train"]["pairs"][key] for key in ("source", "query", "positive")}
        content["train"] = {"pairs": content["train"]["pairs"]}
        content["evaluation"] = {"retrieval": pairs | {"instruction": ""}}

    with pytest.raises(ValueError, match="rows of the retrieval dataset are also trained on: every model"):
        run("dense", settings(datasets=edit(use_twice)))


def test_a_right_text_is_no_wrong_one(settings, edit, tmp_path):
    rows = {"q": ["a", "b"], "p": ["x", "y"], "n": [["z"], ["z", "y"]]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    description = {"source": str(tmp_path / "rows.parquet"), "query": "q", "positive": "p", "negatives": "n.*"}
    file = edit(lambda content: content.update(train={"mine": description | {"instruction": ""}}))
    with pytest.raises(ValueError, match="Dataset mine: .*row 1 has its positive among its negatives: 'y'"):
        run("dense", settings(datasets=file))


def test_a_run_without_pairs_to_evaluate_on_says_so(settings, edit):
    file = edit(lambda content: content.pop("evaluation"))
    with pytest.raises(ValueError, match="describes no `evaluation`, and `eval_strategy` is steps: describe one"):
        run("dense", settings(datasets=file, eval_strategy="steps"))


@pytest.mark.parametrize("name", ["empty.parquet", "empty.jsonl", "broken.jsonl"])
def test_files_without_rows_are_refused(settings, edit, tmp_path, name):
    if name == "empty.parquet":
        Dataset.from_dict({"title": ["a"], "body": ["b"]}).select([]).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text("" if name == "empty.jsonl" else '{"title": "a", "body": "b"}\n{"title":\n')
    file = edit(lambda content: content["train"]["pairs"].update(source=str(tmp_path / name)))
    place = f".*{name}, line 2 is not valid JSON" if name == "broken.jsonl" else ""
    with pytest.raises(ValueError, match=f"Dataset pairs: .*{place or name + ' is empty: it holds no row'}"):
        run("dense", settings(datasets=file))


def test_rows_are_fewer_where_there_are_hard_negatives(data):
    settings = RecipeArguments("unused", str(data / "datasets.yaml"))
    read = read_data(settings, EmbeddingArguments("unused", bf16=False, use_cpu=True))
    found = {name: most_negatives(rows) for name, rows in read.train.items()}
    assert found == {"triplets": 1, "pairs": 0, "nested": 2}
    assert MixtureTrainer.choose_batch_sizes(read, 64) == {"triplets": 42, "pairs": 64, "nested": 32}
    assert most_negatives(load_pairs(read.descriptions["nested"], max_negatives=1)) == 1


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
    "STS12": {"sentence1": "q", "sentence2": "p", "score": 4.5},
    "STSBENCHMARK": {"sentence1": "q", "sentence2": "p", "score": 4.5},
    "GOOAQ": {"question": "q", "answer": "p"} | {f"negative_{i}": f"n{i}" for i in range(1, 6)},
    "PUBMEDQA": {"anchor": "q", "positive": "p"} | {f"negative_{i}": f"n{i}" for i in range(1, 21)},
    "ALLNLI": {"anchor": "q", "positive": "p", "negative": "n1"},
    "TRIVIAQA": {"anchor": "q", "positive": "p", "negative": "n1"},
    "WIKIHOW": {"text": "q", "summary": "p"},
    "MEDMCQA": {"question": "q", "exp": "p", "subject_name": "s"},
}
NEGATIVES = {"CONCURRENTQA": 2, "QQP": 2, "STACKOVERFLOW": 2, "GOOAQ": 5, "PUBMEDQA": 20, "ALLNLI": 1, "TRIVIAQA": 1}
PAPER = ROOT / "configs" / "embeddings" / "datasets.yaml"


@pytest.mark.parametrize("name", SHAPES)
def test_the_papers_columns_give_queries_positives_and_negatives(tmp_path, name):
    (description,), _ = read_descriptions(str(PAPER), [name])
    (part,) = description.parts
    Dataset.from_list([SHAPES[name]]).to_parquet(tmp_path / "rows.parquet")
    part.source, part.subset = str(tmp_path / "rows.parquet"), None
    part.split = part.split.replace("1000000", "1")
    (row,) = load_pairs(description)
    expected = [f"n{i}" for i in range(1, NEGATIVES.get(name, 0) + 1)]
    assert row == {"query": "q", "positive": "p", "negatives": expected}


def test_scores_labels_and_lookups(tmp_path):
    sts, _ = read_descriptions(str(PAPER), ["STS12"])
    rows = [{"sentence1": f"a{score}", "sentence2": f"b{score}", "score": score} for score in (3.9, 4.0, 4.1, 5.0)]
    Dataset.from_list(rows).to_parquet(tmp_path / "sts.parquet")
    sts[0].parts[0].source = str(tmp_path / "sts.parquet")
    assert load_pairs(sts[0])["query"][:] == ["a4.1", "a5.0"]

    yahoo, _ = read_descriptions(str(PAPER), ["YAHOO_CLUST"])
    names = ClassLabel(names=["Society & Culture", "Health"])
    features = Features({"topic": names, "question_title": Value("string"), "best_answer": Value("string")})
    rows = [
        {"topic": 1, "question_title": "t", "best_answer": "b"},
        {"topic": 0, "question_title": "t", "best_answer": ""},
    ]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "yahoo.parquet")
    yahoo[0].parts[0].source = str(tmp_path / "yahoo.parquet")
    # The second row lacks its answer.
    assert load_pairs(yahoo[0])[:] == {"query": ["t b"], "positive": ["Health"], "negatives": [[]]}

    fever, _ = read_descriptions(str(PAPER), ["FEVER"])
    part = fever[0].parts[0]
    for name, rows in {
        "queries": [{"_id": "q1", "text": "claim 1"}, {"_id": "q2", "text": "claim 2"}],
        "corpus": [{"_id": "d2", "text": "text 2", "title": "t"}, {"_id": "d1", "text": "text 1", "title": "t"}],
        "qrels": [
            {"query-id": "q2", "corpus-id": "d1", "score": 1},
            {"query-id": "q1", "corpus-id": "gone", "score": 1},
        ],
    }.items():
        Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    part.source, part.subset = str(tmp_path / "qrels.parquet"), None
    for column, name in (("query-id", "queries"), ("corpus-id", "corpus")):
        lookup = part.lookups[column]
        lookup.source, lookup.subset, lookup.split = str(tmp_path / f"{name}.parquet"), None, "train"
    assert load_pairs(fever[0])[:] == {"query": ["claim 2"], "positive": ["text 1"], "negatives": [[]]}


@pytest.mark.parametrize(
    "wrong", [[["d2", "d3"], ["d1", "d3"]], [["d2"], ["d3"]], [["d2", "d3"], ["gone"]], [[], None]]
)
def test_lists_of_ids_are_lists_of_texts(tmp_path, wrong):
    """Hard negatives, often as many in every row, and sometimes not."""
    features = Features({"q": Value("string"), "right": Value("string"), "wrong": List(Value("string"))})
    rows = [{"q": f"q{n}", "right": f"d{n}", "wrong": wrong[n - 1]} for n in (1, 2)]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list([{"id": f"d{n}", "text": f"t{n}"} for n in (1, 2, 3)]).to_parquet(tmp_path / "corpus.parquet")
    lookup = {"source": "corpus.parquet", "id": "id", "text": "text"}
    entry = {"source": "rows.parquet", "query": "q", "positive": "right", "negatives": "wrong.*", "instruction": ""}
    if not any(wrong):
        del entry["negatives"]
    content = {"train": {"a": entry | {"lookups": {"right": lookup, "wrong": lookup}}}}
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump(content))
    found = load_pairs(read_descriptions(str(tmp_path / "datasets.yaml"))[0][0])
    assert found["positive"][:] == ["t1", "t2"]
    expected = [[one.replace("d", "t") for one in ids or [] if one != "gone"] for ids in wrong]
    assert found["negatives"][:] == expected


def test_the_papers_datasets_and_instructions_are_table_7(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text()
    table = paper[paper.index("Table 7:") : paper.index("Table 8:")].splitlines()[3:]
    expected = [line.split("\t") for line in table if "\t" in line]
    descriptions, evaluation = read_descriptions(str(PAPER))
    assert len(descriptions) == 22 and set(evaluation) == {"retrieval", "sts"}
    names = [name.replace(" <sub>CLUST</sub>", "_CLUST") for name, _ in expected]
    assert [description.name for description in descriptions] == names
    assert [description.instruction for description in descriptions] == [instruction for _, instruction in expected]


def load(tmp_path, entry: dict) -> dict:
    content = {"train": {"a": {"query": "q", "positive": "p", "instruction": ""} | entry}}
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump(content))
    return load_pairs(read_descriptions(str(tmp_path / "datasets.yaml"))[0][0])[:]


@pytest.mark.parametrize("ids", [["7", "8"], ["7", "007"], ["d7", "d8"], ["1.1", "1.10"], [7, 8]])
def test_ids_in_csv_files_lead_to_their_own_texts(tmp_path, ids):
    """007 is not 7, whatever the other ids look like. The last ids are numbers, in Parquet."""
    corpus = Dataset.from_dict({"id": ids, "text": ["one", "two"]})
    if isinstance(ids[0], int):
        corpus.to_parquet(tmp_path / "corpus.parquet")
    else:
        corpus.to_csv(tmp_path / "corpus.csv", index=False)
    (tmp_path / "rows.csv").write_text(f"q,p\n2024,{ids[1]}\n2025,{ids[0]}\n")
    (file,) = tmp_path.glob("corpus.*")
    lookup = {"source": file.name, "id": "id", "text": "text"}
    found = load(tmp_path, {"source": "rows.csv", "lookups": {"p": lookup}})
    assert found == {"query": ["2024", "2025"], "positive": ["two", "one"], "negatives": [[], []]}


def test_lookups_that_cannot_be_done_say_why(tmp_path):
    (tmp_path / "rows.csv").write_text("q,p\na,1\nb, 2\n")
    (tmp_path / "corpus.csv").write_text("id,text\n1,one\n2,two\n")
    lookup = {"source": "corpus.csv", "id": "id", "text": "text"}
    for key in ("id", "text"):
        with pytest.raises(ValueError, match="corpus.csv, row 0 has no column 'no'; it has 'id', 'text'"):
            load(tmp_path, {"source": "rows.csv", "lookups": {"p": lookup | {key: "no"}}})
    with pytest.raises(ValueError, match="row 1 has no positive .p is empty, or no text has its id."):
        load(tmp_path, {"source": "rows.csv", "lookups": {"p": lookup}})


def test_texts_that_are_not_what_a_row_needs_are_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "a", "p": {"text": "b"}, "neg": {"easy": ["c"]}}))
    for keys in ({"positive": "p.*"}, {"positive": "p.text", "negatives": "neg.*"}):
        with pytest.raises(ValueError, match="does not lead to a text .only a list has '[*]', and this is dict"):
            load(tmp_path, {"source": "a.jsonl"} | keys)
    (tmp_path / "b.csv").write_text("q,p,neg\na,b,\"['c', 'd']\"\na,b,\n")
    with pytest.raises(ValueError, match="'neg' holds lists that were written as text, such as .*'c', 'd'"):
        load(tmp_path, {"source": "b.csv", "negatives": "neg"})
    (tmp_path / "e.csv").write_text("q,p\na,\"['b', 'c']\"\n")
    with pytest.raises(ValueError, match="'p' holds lists that were written as text"):
        load(tmp_path, {"source": "e.csv"})
    (tmp_path / "c.csv").write_text("q,p\na,a\nb,b\n")
    with pytest.raises(ValueError, match="query and positive are the same text in every row"):
        load(tmp_path, {"source": "c.csv"})
    assert "note" not in capsys.readouterr().out
    (tmp_path / "d.csv").write_text("q,p\na,a\nb,c\n")
    assert load(tmp_path, {"source": "d.csv"})["positive"] == ["a", "c"]
    assert "query and positive are the same text in 1 of 2 rows" in capsys.readouterr().out


def test_pairs_of_a_changed_file_are_read_anew(tmp_path):
    for text in "bc":
        (tmp_path / "a.csv").write_text(f"q,p\na,{text}\n")
        assert load(tmp_path, {"source": "a.csv"})["positive"] == [text]


def test_a_file_of_pairs_is_no_description():
    with pytest.raises(ValueError, match="`datasets` is pairs.jsonl, a file of data. It must be a YAML file"):
        read_descriptions("pairs.jsonl")
