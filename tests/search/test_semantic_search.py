"""The recipes `index`, `query` and `remove` on small data: what is found, embedded again, and refused."""

from pathlib import Path

import lancedb
import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.search import recipe as recipes
from neobert_hf.search.lancedb_index import LanceDBIndex
from neobert_hf.search.vector_index import VectorIndexError
from tests.search.conftest import write_rows


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("dimensions", [32, 20])
def test_hits_are_those_of_brute_force(index, query, place, corpus, texts, encoder, dimensions):
    flags = ["--id_column=id", "--query_prompt=question: ", "--document_prompt=text: "]
    assert index(corpus, *flags, truncate_dim=dimensions, **place) == [60, 60, 0, 0, 0]
    queries = ["how is text encoded?", "a list of numbers"]
    vectors = unit(encoder.encode([f"text: {text}" for text in texts])[:, :dimensions])
    cosines = unit(encoder.encode([f"question: {text}" for text in queries])[:, :dimensions]) @ vectors.T
    for row, hits in zip(cosines, query(*queries, top_k=12, **place)):
        best = np.argsort(-row)[:12]
        assert [hit["document"] for hit in hits] == [f"d{7 * i}" for i in best]
        assert [hit["text"] for hit in hits] == [texts[i] for i in best]
        # float32 against float64.
        assert np.abs([hit["score"] for hit in hits] - row[best]).max() < 1e-5
        assert all(hit["number"] == 0 and hit["source"] == str(corpus) for hit in hits)


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_vectors_in_fewer_bytes_are_found_by_bits_and_ordered_by_what_is_stored(
    index, query, corpus, texts, encoder, tmp_path, precision
):
    index(corpus, "--id_column=id", precision=precision)
    vectors, asked = unit(encoder.encode(texts)), unit(encoder.encode(["a list of numbers"]))[0]
    stored = np.round(127 * vectors / np.abs(vectors).max(1, keepdims=True)) if precision == "int8" else vectors > 0
    stored = stored if precision == "int8" else 2 * stored - 1
    cosines = unit(stored) @ asked
    # Ten times as many are compared as are returned: all of them, or the 10 that differ from the query in fewest bits.
    (hits,) = query("a list of numbers", top_k=12)
    assert [hit["document"] for hit in hits] == [f"d{7 * row}" for row in np.argsort(-cosines)[:12]]
    assert np.abs([hit["score"] for hit in hits] - np.sort(cosines)[::-1][:12]).max() < 1e-5
    different = ((vectors > 0) != (asked > 0)).sum(1)
    (hits,) = query("a list of numbers", top_k=1)
    assert hits[0]["score"] == pytest.approx(cosines[different <= np.sort(different)[9]].max(), abs=1e-5)
    # With words, too, which may find what is not near.
    (hits,) = query("a list of numbers", top_k=60, keyword_weight=1e-6)
    assert [hit["score"] for hit in hits] == pytest.approx(np.sort(cosines)[::-1], abs=1e-5)
    types = {field.name: str(field.type) for field in LanceDBIndex(tmp_path / "index").table.schema}
    assert types["bits"] == "fixed_size_list<item: uint8>[4]" and "float" not in "".join(types.values())
    with pytest.raises(SettingsMismatch, match=f"precision: '{precision}' there"):
        index(corpus, "--id_column=id")


def test_the_prompts_of_the_model_are_the_default(index, query, corpus, model, tmp_path):
    encoder = SentenceTransformer(str(model), prompts={"query": "question: ", "document": "text: "})
    encoder.save(str(tmp_path / "prompted"))
    index(corpus, model=tmp_path / "prompted")
    identity = LanceDBIndex(tmp_path / "index").identity
    assert (identity["query_prompt"], identity["document_prompt"]) == ("question: ", "text: ")
    (hits,) = query("a list of numbers", top_k=1)
    vectors = unit(encoder.encode(["question: a list of numbers", f"text: {hits[0]['text']}"], prompt=""))
    assert abs(hits[0]["score"] - vectors[0] @ vectors[1]) < 1e-5


def test_only_what_changed_is_embedded_again(index, stored, place, corpus, texts):
    rows = {f"d{i}": text for i, text in enumerate(texts[:10])} | {"long": ". ".join(texts[10:20])}
    assert index(write_rows(corpus, rows), "--id_column=id", **place)[0] == 11
    before = stored(**place)
    assert len(before) > 12 and index(corpus, "--id_column=id", **place) == [0, 0, 11, 0, 0]
    # Of a document that is shorter now, nothing is left.
    rows |= {"long": "something else", "new": texts[20]}
    del rows["d5"]
    assert index(write_rows(corpus, rows), "--id_column=id", **place) == [2, 2, 9, 1, 0]
    after = stored(**place)
    assert {key: text for key, (text, _) in after.items()} == {(str(corpus), id, 0): rows[id] for id in rows}
    for document in rows.keys() - {"long", "new"}:
        assert after[str(corpus), document, 0] == before[str(corpus), document, 0]


def test_sources_do_not_touch_each_other_and_are_removed_by_name(index, stored, place, tmp_path, texts, capsys):
    one, two, three = texts[:3]
    first = write_rows(tmp_path / "it's.jsonl", {"a": one, "b": two})
    second = write_rows(tmp_path / "second.jsonl", {"a": three, "c": two})
    for file in (first, second):
        assert index(file, "--id_column=id", **place) == [2, 2, 0, 0, 0]
    assert index(write_rows(first, {"a": one}), "--id_column=id", **place) == [0, 0, 1, 1, 0]
    expected = {(str(first), "a", one), (str(second), "a", three), (str(second), "c", two)}
    assert {(source, id, text) for (source, id, _), (text, _) in stored(**place).items()} == expected
    # A moved source keeps its place under a name of its own.
    assert index(first, "--id_column=id", name="mine", **place) == [1, 1, 0, 0, 0]
    assert index(second, "--id_column=id", name="mine", **place) == [2, 2, 0, 0, 0]
    remove = [*(f"--{key}={value}" for key, value in place.items()), "--name"]
    with pytest.raises(VectorIndexError, match=f"'gone'.*{first}, {second}, mine"):
        recipes.remove.main([*remove, "gone"])
    recipes.remove.main([*remove, str(second)])
    assert "2 documents removed" in capsys.readouterr().out
    assert {source for source, _, _ in stored(**place)} == {str(first), "mine"}


def test_rows_without_ids_are_told_apart_by_their_text(index, corpus, texts, tmp_path):
    rows = [texts[0], texts[1], None, texts[0], " \n", texts[2]]
    Dataset.from_dict({"body": rows}).to_parquet(tmp_path / "rows.parquet")
    assert index(tmp_path / "rows.parquet", column="body") == [3, 3, 0, 0, 3]
    # One more at the front moves all others.
    Dataset.from_dict({"body": [texts[4], *rows[1:]]}).to_parquet(tmp_path / "rows.parquet")
    assert index(tmp_path / "rows.parquet", column="body") == [1, 1, 3, 0, 2]


def test_files_are_documents(index, query, texts, tmp_path):
    docs = tmp_path / "docs"
    (docs / "deep").mkdir(parents=True)
    (docs / "one.md").write_text(f"# One\n\n{texts[0]}\n")
    (docs / "deep" / "two.txt").write_text(texts[1])
    (docs / "empty.md").write_text("")
    assert index(docs) == [2, 2, 0, 0, 1]
    assert query(texts[1], top_k=1)[0][0] == {
        "score": pytest.approx(1, abs=1e-5),
        "source": str(docs),
        "document": str(docs / "deep" / "two.txt"),
        "number": 0,
        "count": 1,
        "text": texts[1],
    }
    (docs / "deep" / "two.txt").unlink()
    assert index(docs) == [0, 0, 1, 1, 1]
    assert index(docs / "*.md") == [1, 1, 0, 0, 1]


def test_long_documents_are_passages_that_the_model_reads_whole(index, query, stored, texts, tmp_path, encoder):
    (tmp_path / "long.txt").write_text(". ".join(texts))
    flags = ["--document_prompt=text: ", "--passage_tokens=40", "--overlap=10"]
    (_, count, *_) = index(tmp_path / "long.txt", *flags)
    passages = [text for _, (text, _) in sorted(stored().items())]
    assert count == len(passages) > 10
    tokens = [len(encoder.tokenizer(f"text: {text}")["input_ids"]) for text in passages]
    assert max(tokens) <= 40 and min(tokens[:-1]) > 30
    for number, (hit,) in enumerate(query(*(f"text: {text}" for text in passages), top_k=1)):
        assert (hit["number"], hit["text"]) == (number, passages[number]) and hit["score"] > 1 - 1e-5


def test_another_model_or_other_settings_are_refused_by_name(index, query, stored, corpus, model, tmp_path):
    index(corpus)
    other = SentenceTransformer(str(model))
    with torch.no_grad():
        next(other.parameters())[-1, -1] += 1e-3
    other.save(str(tmp_path / "other"))
    transformer, _ = SentenceTransformer(str(model))
    SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="cls")]).save(str(tmp_path / "cls"))
    for name, folder in (("model", "other"), ("fingerprint", "other"), ("pooling", "cls")):
        for run in (lambda **flags: index(corpus, **flags), lambda **flags: query("text", **flags)):
            with pytest.raises(SettingsMismatch, match=f"{name}: "):
                run(model=tmp_path / folder)
    for name, value in (("passage_tokens", 48), ("overlap", 3), ("query_prompt", "question: "), ("dtype", "bfloat16")):
        with pytest.raises(SettingsMismatch, match=f"{name}: .* there, {value!r} now"):
            index(corpus, **{name: value})
    assert len(stored()) == 60


def test_a_home_is_found_by_every_command(index, query, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    index(corpus, index="~/found")
    assert len(query("text", index="~/found")[0]) == 5 and not Path("~").exists()
    recipes.remove(index="~/found", name=str(corpus))


def test_the_model_may_move_but_not_vanish(index, query, corpus, model, tmp_path):
    SentenceTransformer(str(model)).save(str(tmp_path / "here"))
    index(corpus, model=tmp_path / "here")
    expected = query("text")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(VectorIndexError, match="here of the index .* is gone: name its new folder with `--model`"):
        query("text")
    assert query("text", model=tmp_path / "there") == expected
    assert index(corpus, model=tmp_path / "there") == [0, 0, 60, 0, 0]


@pytest.mark.parametrize(
    ("rows", "changes", "error", "message"),
    [
        ({}, {"source": "/nowhere/*.md"}, FileNotFoundError, "/nowhere"),
        ({}, {"id_column": "key"}, ValueError, "'key'"),
        ({}, {"passage_tokens": 65}, ValueError, "`passage_tokens` is 65"),
        ({}, {"passage_tokens": 20, "overlap": 18}, ValueError, "`overlap` is 18"),
        ({}, {"truncate_dim": 33}, ValueError, "`truncate_dim` is 33"),
        ({"text": ["", None]}, {}, ValueError, "2 documents are empty"),
        ({"id": ["a", "a"]}, {}, ValueError, "id 'a' belongs to two texts"),
        ({"id": ["a", None]}, {}, ValueError, "rows.parquet, row 1: 'id'"),
    ],
)
def test_bad_settings_and_documents_are_refused_before_an_index_is_made(index, tmp_path, rows, changes, error, message):
    Dataset.from_dict({"id": ["a", "b"], "text": ["one", "two"]} | rows).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(error, match=message):
        index(**({"source": tmp_path / "rows.parquet", "id_column": "id"} | changes))
    assert not (tmp_path / "index").exists()


def test_bad_queries_and_indexes_are_refused(index, query, corpus, tmp_path):
    with pytest.raises(VectorIndexError, match="There is no index .*: make it with"):
        query("text")
    assert not (tmp_path / "index").exists()
    with pytest.raises(VectorIndexError, match="corpus.jsonl is a file; an index is a folder"):
        query("text", index=corpus)
    with pytest.raises(ValueError, match="`text` holds an empty query"):
        query("text", " ")
    with pytest.raises(ValueError, match="`text` holds an empty query"):
        recipes.query(index=tmp_path / "index", text=[])
    with pytest.raises(ValueError, match="`top_k` is 0"):
        query("text", top_k=0)
    with pytest.raises(ValueError, match="`keyword_weight` is -1"):
        query("text", keyword_weight=-1)
    lancedb.connect(tmp_path / "other").create_table("passages", [{"a": 1}])
    with pytest.raises(VectorIndexError, match="holds a table of another program"):
        query("text", index=tmp_path / "other")


def test_a_large_source_is_one_transaction_and_an_interruption_loses_one_portion(
    index, stored, corpus, tmp_path, monkeypatch
):
    """LanceDB keeps a version, with a list of all files, of each transaction."""
    write = LanceDBIndex.write

    def killed(self, passages, vectors, replaced):
        write(self, passages, vectors, replaced)
        if len(list(self.waiting.iterdir())) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LanceDBIndex, "write", killed)
        index(corpus, "--id_column=id", write_every=4)
    assert index(corpus, "--id_column=id", write_every=4)[:3] == [32, 32, 28]
    index(corpus, "--id_column=id", write_every=4, index=tmp_path / "whole")
    assert stored() == stored(index=tmp_path / "whole")
    # The table, two indexes, the passages, and both indexes of them.
    assert LanceDBIndex(tmp_path / "whole").table.version <= 6 and not (tmp_path / "whole" / "waiting").exists()
