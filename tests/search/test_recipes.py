"""The recipes of the search from Python, what they show, and what they never touch."""

import json
from pathlib import Path

import pandas
import pytest

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.search import recipe as recipes
from neobert_hf.search.excerpts import LENGTH, find_excerpts, whole_sentences
from neobert_hf.search.lancedb_index import LanceDBIndex
from neobert_hf.search.vector_index import Hit, VectorIndexError
from tests.search.conftest import write_rows


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails."""

    def load(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(recipes, "PassageEncoder", load)


def rows_of(folder: Path) -> list[dict]:
    rows = LanceDBIndex(folder).table.search().limit(10_000).to_list()
    return sorted(({**row, "source": ""} for row in rows), key=lambda row: (row["document"], row["number"]))


def test_a_table_gives_the_vectors_of_its_file(index, corpus, model, tmp_path, capsys):
    index(corpus, "--id_column=id", index=tmp_path / "command")
    frame = pandas.read_json(corpus, lines=True)
    settings = {"model": model, "id_column": "id", "device": "cpu", "index": tmp_path / "python"}
    made = recipes.index(source=frame, name="mine", **settings)
    assert made.scores == {"embedded": 60, "passages": 60, "unchanged": 0, "removed": 0, "left_out": 0}
    assert rows_of(tmp_path / "python") == rows_of(tmp_path / "command")
    ((hit, *_),) = recipes.query(index=tmp_path / "python", text=frame["text"][3], device="cpu")
    assert (hit.document, hit.source) == ("d21", "mine") and hit.score > 0.999
    # Rows that are gone are removed, by the name of the table.
    again = recipes.index(source=frame[:50].to_dict("records"), name="mine", **settings)
    assert again.scores["removed"] == 10 and again.scores["unchanged"] == 50
    with pytest.raises(ValueError, match="`name`"):
        recipes.index(source=frame, **settings)


WRONG = [
    ({"source": "/nowhere/*.md"}, FileNotFoundError, "/nowhere"),
    ({"model": "/nowhere/model"}, FileNotFoundError, "`model`"),
]


@pytest.mark.parametrize(("changes", "error", "name"), WRONG)
def test_wrong_paths_are_found_before_a_model_is_loaded(index, no_model, corpus, tmp_path, changes, error, name):
    with pytest.raises(error, match=name):
        index(**({"source": corpus} | changes))
    with pytest.raises(VectorIndexError, match="There is no index"):
        recipes.query(index=tmp_path / "index", text="x")
    with pytest.raises(VectorIndexError, match="There is no index"):
        recipes.remove(index=tmp_path / "nowhere" / "index", name="x")
    assert not (tmp_path / "index").exists() and not (tmp_path / "nowhere").exists()


def test_other_settings_are_found_before_anything_is_read(index, corpus, monkeypatch):
    index(corpus)
    monkeypatch.setattr(recipes, "Documents", None)
    with pytest.raises(SettingsMismatch, match="overlap: 32 there, 3 now"):
        index(corpus, overlap=3)


def test_a_query_says_that_the_index_is_not_finished(index, query, corpus, texts, tmp_path, monkeypatch, capsys):
    write = LanceDBIndex.write

    def killed(self, *args):
        write(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LanceDBIndex, "write", killed)
        index(corpus, "--id_column=id", write_every=4)
    with pytest.raises(VectorIndexError, match="index is empty"):
        query("text")
    index(corpus, "--id_column=id")
    assert len(query("text")[0]) == 5 and "not finished" not in capsys.readouterr().err
    # An interrupted update leaves what was there.
    with open(corpus, "a") as file:
        file.write('{"id": "new", "text": "another text"}\n{"id": "newer", "text": "one more"}\n')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LanceDBIndex, "write", killed)
        index(corpus, "--id_column=id", write_every=1)
    capsys.readouterr()
    recipes.query(index=tmp_path / "index", text="text", device="cpu")
    assert "not finished" in capsys.readouterr().err


def test_the_bar_counts_what_is_embedded(corpus, encoder, model, monkeypatch):
    seen = []

    class Bar:
        n = 0

        def update(self, count):
            self.n += count
            seen.append(self.n)

    settings = recipes.EmbeddingSettings(str(model))
    documents = recipes.Documents(recipes.SourceSettings(str(corpus), id_column="id"))
    own, bar = recipes.PassageEncoder(settings, "cpu"), Bar()
    monkeypatch.setattr(documents.source, "write_every", 20)
    for passages, _ in documents.passages(own):
        recipes.embed_passages(own, passages, 8, bar)
    assert seen == [8, 16, 20, 28, 36, 40, 48, 56, 60]


def test_one_result_a_document_unless_asked(index, query, texts, tmp_path):
    rows = {"long": ". ".join(texts[:30])} | {f"d{number}": text for number, text in enumerate(texts[30:40])}
    index(write_rows(tmp_path / "rows.jsonl", rows), "--id_column=id", "--passage_tokens=40", "--overlap=10")
    (every,) = query(texts[0], top_k=100, every_passage=True)
    assert sum(hit["document"] == "long" for hit in every) > 5
    for weight in (0, 0.5):
        (every,) = query(texts[0], top_k=100, every_passage=True, keyword_weight=weight)
        (hits,) = query(texts[0], top_k=11, keyword_weight=weight)
        assert len({hit["document"] for hit in hits}) == len(hits) == 11
        assert hits == [next(one for one in every if one["document"] == hit["document"]) for hit in hits]


def test_the_sentences_nearest_to_the_query_are_shown(model):
    """Of a passage that begins and ends inside of sentences."""
    others = [f"The {word} of a list is the value that it prints." for word in "first second third last next".split()]
    wanted = "Strings are encoded as bytes by a codec, e.g. this one (which Python has)."
    own = recipes.PassageEncoder(recipes.EmbeddingSettings(str(model)), "cpu")
    hit = Hit(0.5, "source", "document", 1, 3, " ".join(["of a list.", *others, wanted, *others, "The last"]))
    (vector,) = own.embed("query", [wanted])
    (shown,) = find_excerpts(own, vector, [hit])
    assert shown.startswith(wanted) and shown in hit.text and shown.endswith("prints.") and len(shown) <= LENGTH
    (printed,) = recipes.format_hits("q", [hit], [shown], "cosine").split("[2 of 3]\n")[1:]
    assert " ".join(printed.split()) == shown


@pytest.mark.parametrize(
    ("text", "number", "count", "expected"),
    [
        ("One is here. Two, e.g. this. Three", 0, 1, ["One is here.", "Two, e.g. this.", "Three"]),
        ("of one. Two is whole. And three is", 1, 3, ["Two is whole."]),
        ("without any end", 1, 3, ["without any end"]),
        ("一句话。第二句！", 0, 1, ["一句话。", "第二句！"]),
        ("# Title\n\n- one\n- two", 0, 1, ["# Title", "- one", "- two"]),
    ],
)
def test_sentences_of_a_passage(text, number, count, expected):
    assert whole_sentences(Hit(1.0, "source", "document", number, count, text)) == expected


def test_nothing_of_the_users_is_deleted(index, corpus, texts, tmp_path):
    folder = tmp_path / "index"
    (folder / "waiting").mkdir(parents=True)
    (folder / "waiting" / "letter.txt").write_text("precious")
    with pytest.raises(ValueError, match="waiting was not written by index"):
        index(corpus)
    assert (folder / "waiting" / "letter.txt").read_text() == "precious"
    # Nor what lies beside an index, or came into its folder later.
    index(corpus, index=tmp_path / "other")
    (tmp_path / "other" / "waiting").mkdir()
    (tmp_path / "other" / "waiting" / "letter.txt").write_text("precious")
    (tmp_path / "other" / "notes.txt").write_text("mine")
    rows = {str(number): text for number, text in enumerate(texts[:3])}
    assert index(write_rows(corpus, rows), index=tmp_path / "other")[2:4] == [3, 57]
    write_rows(corpus, rows | {"new": "something new"})
    assert index(corpus, index=tmp_path / "other")[0] == 1
    assert (tmp_path / "other" / "waiting" / "letter.txt").read_text() == "precious"
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    assert json.loads((tmp_path / "other" / "neobert_hf.json").read_text()) == {"recipe": "index"}
