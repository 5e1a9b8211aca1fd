"""examples/semantic_search.py on small data: what it finds, what it embeds again, and what it refuses."""

from pathlib import Path

import lancedb
import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.search.index import VectorIndexError
from neobert_hf.search.lancedb_index import LanceDBIndex
from tests.search.conftest import semantic_search, write_rows


def stored(folder: Path) -> dict[tuple[str, int], dict]:
    rows = LanceDBIndex(folder).table.to_arrow().to_pylist()
    found = {(row["document"], row["number"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("dimensions", [32, 20])
def test_hits_are_those_of_brute_force(index, query, corpus, texts, encoder, dimensions):
    flags = ["--id_column=id", "--query_prompt=question: ", "--document_prompt=text: "]
    assert index(corpus, *flags, truncate_dim=dimensions) == [60, 60, 0, 0, 0]
    queries = ["how is text encoded?", "a list of numbers"]
    vectors = unit(encoder.encode([f"text: {text}" for text in texts])[:, :dimensions])
    cosines = unit(encoder.encode([f"question: {text}" for text in queries])[:, :dimensions]) @ vectors.T
    for row, hits in zip(cosines, query(*queries, top_k=12)):
        best = np.argsort(-row)[:12]
        assert [hit["document"] for hit in hits] == [f"d{7 * i}" for i in best]
        assert [hit["text"] for hit in hits] == [texts[i] for i in best]
        # float32 against float64.
        assert np.abs([hit["score"] for hit in hits] - row[best]).max() < 1e-5
        assert all(hit["number"] == 0 and hit["source"] == str(corpus) for hit in hits)


def test_the_prompts_of_the_model_are_the_default(index, query, corpus, model, tmp_path):
    encoder = SentenceTransformer(str(model), prompts={"query": "question: ", "document": "text: "})
    encoder.save(str(tmp_path / "prompted"))
    index(corpus, model=tmp_path / "prompted")
    identity = LanceDBIndex(tmp_path / "index").identity
    assert (identity["query_prompt"], identity["document_prompt"]) == ("question: ", "text: ")
    (hits,) = query("a list of numbers", top_k=1)
    vectors = unit(encoder.encode(["question: a list of numbers", f"text: {hits[0]['text']}"], prompt=""))
    assert abs(hits[0]["score"] - vectors[0] @ vectors[1]) < 1e-5


def test_only_what_changed_is_embedded_again(index, query, corpus, texts, tmp_path):
    rows = {f"d{i}": text for i, text in enumerate(texts[:10])}
    index(write_rows(corpus, rows), "--id_column=id")
    before = stored(tmp_path / "index")
    assert index(corpus, "--id_column=id") == [0, 0, 10, 0, 0]
    rows["d3"], rows["new"] = "something else", texts[20]
    del rows["d5"]
    assert index(write_rows(corpus, rows), "--id_column=id") == [2, 2, 8, 1, 0]
    after = stored(tmp_path / "index")
    assert {document for document, _ in after} == rows.keys()
    assert {document: row["text"] for (document, _), row in after.items()} == rows
    for document in rows.keys() - {"d3", "new"}:
        assert after[document, 0] == before[document, 0]
    assert query("something else", top_k=1)[0][0]["document"] == "d3"


def test_sources_do_not_touch_each_other(index, tmp_path, texts):
    first = write_rows(tmp_path / "it's.jsonl", {"a": texts[0], "b": texts[1]})
    second = write_rows(tmp_path / "second.jsonl", {"a": texts[2], "c": texts[1]})
    assert index(first, "--id_column=id") == [2, 2, 0, 0, 0]
    assert index(second, "--id_column=id") == [2, 2, 0, 0, 0]
    write_rows(first, {"a": texts[0]})
    assert index(first, "--id_column=id") == [0, 0, 1, 1, 0]
    rows = LanceDBIndex(tmp_path / "index").table.to_arrow().to_pylist()
    assert {(row["source"], row["document"], row["text"]) for row in rows} == {
        (str(first), "a", texts[0]), (str(second), "a", texts[2]), (str(second), "c", texts[1])
    }  # fmt: skip
    # A moved source keeps its place under a name of its own.
    assert index(first, "--id_column=id", name="mine") == [1, 1, 0, 0, 0]
    assert index(second, "--id_column=id", name="mine") == [2, 2, 0, 0, 0]


def test_a_source_can_be_removed_by_its_name(index, query, corpus, tmp_path, texts, capsys):
    moved = write_rows(tmp_path / "moved.jsonl", {"a": texts[0], "b": texts[1]})
    index(moved)
    index(corpus)
    assert {hit["source"] for hit in query(texts[0], top_k=100)[0]} == {str(moved), str(corpus)}
    remove = ["remove", "--index", str(tmp_path / "index"), "--name"]
    with pytest.raises(VectorIndexError, match=f"'gone'.*{corpus}, {moved}"):
        semantic_search.main([*remove, "gone"])
    semantic_search.main([*remove, str(moved)])
    assert "2 documents removed" in capsys.readouterr().out
    assert {hit["source"] for hit in query(texts[0], top_k=100)[0]} == {str(corpus)}


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
        "text": texts[1],
    }
    (docs / "deep" / "two.txt").unlink()
    assert index(docs) == [0, 0, 1, 1, 1]
    assert index(docs / "*.md") == [1, 1, 0, 0, 1]


def test_long_documents_are_passages_that_the_model_reads_whole(index, query, texts, tmp_path, encoder):
    long = ". ".join(texts)
    (tmp_path / "long.txt").write_text(long)
    flags = ["--document_prompt=text: ", "--passage_tokens=40", "--overlap=10"]
    (_, count, *_) = index(tmp_path / "long.txt", *flags)
    rows = [row for _, row in sorted(stored(tmp_path / "index").items())]
    assert count == len(rows) > 10
    tokens = [len(encoder.tokenizer(f"text: {row['text']}")["input_ids"]) for row in rows]
    assert max(tokens) <= 40 and min(tokens[:-1]) > 30
    expected = unit(encoder.encode([f"text: {row['text']}" for row in rows]))
    assert np.abs(np.array([row["vector"] for row in rows]) - expected).max() < 1e-5
    hit = query(f"text: {rows[7]['text']}", top_k=1)[0][0]
    assert (hit["number"], hit["text"]) == (7, rows[7]["text"]) and hit["score"] > 1 - 1e-5


def test_another_model_or_other_settings_are_refused_by_name(index, query, corpus, model, tmp_path):
    index(corpus)
    other = SentenceTransformer(str(model))
    with torch.no_grad():
        next(other.parameters())[-1, -1] += 1e-3
    other.save(str(tmp_path / "other"))
    transformer, _ = SentenceTransformer(str(model))
    SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="cls")]).save(str(tmp_path / "cls"))
    for name, folder in (("fingerprint", "other"), ("pooling", "cls")):
        for run in (lambda **flags: index(corpus, **flags), lambda **flags: query("text", **flags)):
            with pytest.raises(SettingsMismatch, match=f"{name}: "):
                run(model=tmp_path / folder)
    for name, value in (("passage_tokens", 48), ("overlap", 3), ("query_prompt", "question: "), ("dtype", "bfloat16")):
        with pytest.raises(SettingsMismatch, match=f"{name}: .* there, {value!r} now"):
            index(corpus, **{name: value})
    assert len(stored(tmp_path / "index")) == 60


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
    ("changes", "error", "message"),
    [
        ({"source": "/nowhere/*.md"}, FileNotFoundError, "/nowhere"),
        ({"id_column": "key"}, ValueError, "'key'"),
        ({"passage_tokens": 65}, ValueError, "`passage_tokens` is 65"),
        ({"passage_tokens": 20, "overlap": 18}, ValueError, "`overlap` is 18"),
        ({"truncate_dim": 33}, ValueError, "`truncate_dim` is 33"),
    ],
)
def test_bad_settings_are_refused_before_an_index_is_made(index, corpus, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        index(**({"source": corpus} | changes))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"id": ["a", "b"], "text": ["", None]}, "2 documents are empty"),
        ({"id": ["a", "a"], "text": ["one", "two"]}, "id 'a' belongs to two texts"),
        ({"id": ["a", None], "text": ["one", "two"]}, "rows.parquet, row 1: 'id'"),
    ],
)
def test_bad_documents_are_refused_before_an_index_is_made(index, tmp_path, rows, message):
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message):
        index(tmp_path / "rows.parquet", "--id_column=id")
    assert not (tmp_path / "index").exists()


def test_bad_queries_and_indexes_are_refused(index, query, corpus, tmp_path):
    with pytest.raises(VectorIndexError, match="There is no index .*: make it with"):
        query("text")
    assert not (tmp_path / "index").exists()
    with pytest.raises(VectorIndexError, match="corpus.jsonl is a file; an index is a folder"):
        query("text", index=corpus)
    with pytest.raises(ValueError, match="`text` holds an empty query"):
        query("text", " ")
    lancedb.connect(tmp_path / "other").create_table("passages", [{"a": 1}])
    with pytest.raises(VectorIndexError, match="holds a table of another program"):
        index(corpus, index=tmp_path / "other")


def test_a_large_source_is_one_transaction_and_an_interruption_loses_one_portion(index, corpus, tmp_path, monkeypatch):
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
    interrupted = stored(tmp_path / "index")
    index(corpus, "--id_column=id", write_every=4, index=tmp_path / "whole")
    whole = LanceDBIndex(tmp_path / "whole").table
    assert interrupted.keys() == stored(tmp_path / "whole").keys()
    # The table, two indexes, the passages, and both indexes of them.
    assert whole.version <= 6 and not (tmp_path / "whole" / "waiting").exists()
