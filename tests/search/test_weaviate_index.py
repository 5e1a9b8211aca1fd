"""Weaviate behind the same interface as LanceDB, against a stand-in: no real server has run."""

import socket

import numpy as np
import pytest

from neobert_hf.search.index import Passage, VectorIndexError, open_index
from neobert_hf.search.lancedb_index import LanceDBIndex


pytest.importorskip("weaviate")
pytest.importorskip("lancedb")
from tests.helpers.weaviate_standin import FakeWeaviateServer  # noqa: E402


IDENTITY = {"model": "some/model", "fingerprint": "abc", "dimension": 8, "query_prompt": 'say "it": é '}


@pytest.fixture
def server(monkeypatch):
    # The client asks PyPI for its newest version.
    monkeypatch.setattr("weaviate.connect.v4.PYPI_PACKAGE_URL", "http://127.0.0.1:9/")
    with FakeWeaviateServer() as fake:
        yield fake


@pytest.fixture
def opened(server):
    """Open the collection `Docs`; every client is closed in the end."""
    indexes = []

    def run(name: str = "Docs"):
        indexes.append(open_index(name, server.url, server.grpc_port))
        return indexes[-1]

    yield run
    for index in indexes:
        index.close()


def passages(source: str, document: str, count: int, version: str = "1") -> list[Passage]:
    hash = f"{document}-{version}"
    return [Passage(source, document, i, count, hash, f"{document} {version} {i}") for i in range(count)]


def vectors(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def fill(index) -> None:
    rows = passages("it's", "a b", 5) + passages("it's", "b", 1) + passages("other", "a b", 2)
    index.add(rows, vectors(len(rows)))


def test_it_does_what_lancedb_does(opened, tmp_path):
    both = [opened(), LanceDBIndex(tmp_path / "index")]
    for index in both:
        assert index.identity is None
        index.create(IDENTITY)
        fill(index)
        index.delete("it's", ["a b", "nothing"])
        index.add(passages("it's", "a b", 3, "2"), vectors(3, seed=1))
        index.optimize()
    both = [opened(), LanceDBIndex(tmp_path / "index")]
    query = vectors(1, seed=2)[0]
    found = []
    for index in both:
        assert index.identity == IDENTITY
        assert index.document_hashes("it's") == {"a b": "a b-2", "b": "b-1"} and index.document_hashes("other") == {
            "a b": "a b-1"
        }
        assert index.document_hashes("nowhere") == {}
        found.append(index.search(query, 10))
    assert len(found[0]) == 6
    for one, two in zip(*found):
        assert (one.source, one.document, one.number, one.text) == (two.source, two.document, two.number, two.text)
        assert abs(one.score - two.score) < 1e-6
    assert found[0][0].score > found[0][-1].score


def test_words_are_not_searched(opened):
    index = opened()
    index.create(IDENTITY)
    fill(index)
    (query,) = vectors(1, seed=2)
    with pytest.raises(VectorIndexError, match="searched by vectors only: use LanceDB, or `keyword_weight` 0"):
        index.search_hybrid("a b", query, 3, 0.5)
    assert index.search_hybrid("a b", query, 3, 0.0) == index.search(query, 3)


def test_a_document_in_part_has_no_hash_and_can_be_deleted_or_written_again(opened, server):
    index = opened()
    index.create(IDENTITY)
    whole = {"a b": "a b-1", "b": "b-1"}
    fill(index)
    assert index.document_hashes("it's") == whole
    # A write or a deletion stopped after any of its passages: the order is the server's.
    for key, (properties, vector) in list(server.objects["Docs"].items()):
        if (properties["source"], properties["document"]) == ("it's", "a b"):
            del server.objects["Docs"][key]
            assert index.document_hashes("it's") == whole | {"a b": ""}
            server.objects["Docs"][key] = (properties, vector)
    # What is left of an old version beside a new one.
    index.add(passages("it's", "a b", 3, "2"), vectors(3))
    assert index.document_hashes("it's") == whole | {"a b": ""}
    index.delete("it's", ["a b"])
    assert index.document_hashes("it's") == {"b": "b-1"} and index.document_hashes("other") == {"a b": "a b-1"}
    # Three at a time are what this server deletes.
    assert [len(numbers) for kind, numbers in server.writes if kind == "delete"] == [3, 2]


def test_writing_once_more_is_no_second_object(opened, server):
    index = opened()
    index.create(IDENTITY)
    fill(index)
    fill(index)
    assert len(server.objects["Docs"]) == 8


def test_refused_passages_are_an_error_and_their_document_is_written_again(opened, server):
    index = opened()
    index.create(IDENTITY)
    server.refuse.add("a b 1 3")
    with pytest.raises(VectorIndexError, match="Weaviate refused 1 of 8 passages: no room"):
        fill(index)
    assert index.document_hashes("it's") == {"a b": "", "b": "b-1"}
    server.refuse.clear()
    fill(index)
    assert index.document_hashes("it's") == {"a b": "a b-1", "b": "b-1"} and len(server.objects["Docs"]) == 8


def test_many_documents_go_in_parts(opened, server):
    index = opened()
    index.create(IDENTITY)
    rows = [one for i in range(1100) for one in passages("s", f"d{i}", 1)]
    index.add(rows, vectors(1100))
    assert [len(numbers) for _, numbers in server.writes] == [100] * 11
    assert index.document_hashes("s") == {f"d{i}": f"d{i}-1" for i in range(1100)}


def test_the_collection_compares_ids_whole_and_by_cosine(opened, server):
    opened().create(IDENTITY)
    properties = {one["name"]: one for one in server.schema["Docs"]["properties"]}
    for name in ("source", "document"):
        assert properties[name]["tokenization"] == "field"
    assert properties["number"]["dataType"] == ["int"]
    (vector,) = server.schema["Docs"]["vectorConfig"].values()
    assert "none" in vector["vectorizer"] and vector["vectorIndexConfig"]["distance"] == "cosine"


def test_what_is_refused(opened, server):
    for name in ("docs", "My-docs", "folder/Docs", "Überall"):
        with pytest.raises(VectorIndexError, match="is not a name for a Weaviate collection: use a capital"):
            opened(name)
    server.schema["Docs"] = {"class": "Docs", "description": "mine", "vectorConfig": {}}
    with pytest.raises(VectorIndexError, match="The collection Docs was made by another program"):
        opened()
    for url in ("localhost:8080", "ftp://localhost"):
        with pytest.raises(VectorIndexError, match="give one such as http://localhost:8080"):
            open_index("Docs", url)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(VectorIndexError, match="No Weaviate server answers at .* with gRPC port 50051"):
        open_index("Docs", f"http://127.0.0.1:{port}")
