"""Weaviate behind the same interface as LanceDB, against a stand-in. No real server has run."""

import socket

import pytest


pytest.importorskip("weaviate")
pytest.importorskip("lancedb")
from neobert_hf.search.index import VectorIndexError, open_index  # noqa: E402
from neobert_hf.search.lancedb_index import LanceDBIndex  # noqa: E402
from neobert_hf.search.passages import Passage  # noqa: E402
from tests.search.conftest import unit_vectors  # noqa: E402
from tests.search.weaviate_standin import FakeWeaviateServer  # noqa: E402


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

    def run():
        indexes.append(open_index("Docs", server.url, server.grpc_port))
        return indexes[-1]

    yield run
    for index in indexes:
        index.close()


def passages(source: str, document: str, count: int, version: str = "1") -> list[Passage]:
    hash = f"{document}-{version}"
    return [Passage(source, document, i, count, hash, f"{document} {version} {i}") for i in range(count)]


def fill(index) -> None:
    rows = passages("it's", "a b", 5) + passages("it's", "b", 1)
    index.write(rows, unit_vectors(6), [])
    index.write(passages("other", "a b", 2), unit_vectors(2, seed=5), [])
    index.commit()


def test_it_does_what_lancedb_does(opened, tmp_path):
    both = [opened(), LanceDBIndex(tmp_path / "index")]
    for index in both:
        assert index.identity is None
        index.create(IDENTITY)
        fill(index)
        index.delete("it's", ["b", "nothing"])
        index.write(passages("it's", "a b", 3, "2"), unit_vectors(3, seed=1), ["a b"])
        index.commit()
        index.optimize()
    both = [opened(), LanceDBIndex(tmp_path / "index")]
    query = unit_vectors(1, seed=2)[0]
    for index in both:
        assert index.identity == IDENTITY and index.sources() == ["it's", "other"]
        assert dict(index.document_hashes("it's")) == {"a b": "a b-2"}
        assert dict(index.document_hashes("other")) == {"a b": "a b-1"} and dict(index.document_hashes("nowhere")) == {}
    for weight in (0, 0.5):
        found = [index.search_hybrid("2", query, 10, weight) for index in both]
        assert len(found[0]) == 5
        for one, two in zip(*found, strict=True):
            assert (one.source, one.document, one.number, one.text) == (two.source, two.document, two.number, two.text)
            assert abs(one.score - two.score) < 1e-5


def test_the_command_line_finds_the_same_in_both(index, query, server, corpus):
    location = {"index": "Docs", "weaviate_url": server.url, "weaviate_grpc_port": server.grpc_port}
    found = []
    for place in (location, {}):
        assert index(corpus, "--id_column=id", **place) == [60, 60, 0, 0, 0]
        assert index(corpus, "--id_column=id", **place) == [0, 0, 60, 0, 0]
        found += query("a list of numbers", top_k=8, **place)
    for one, two in zip(*found, strict=True):
        assert abs(one.pop("score") - two.pop("score")) < 1e-5 and one == two


def test_a_document_in_part_has_no_hash_and_can_be_deleted_or_written_again(opened, server):
    index = opened()
    index.create(IDENTITY)
    whole = {"a b": "a b-1", "b": "b-1"}
    fill(index)
    fill(index)
    # Writing once more is no second object.
    assert dict(index.document_hashes("it's")) == whole and len(server.objects["Docs"]) == 8
    # A write or a deletion stopped after any of its passages: the order is the server's.
    for key, (properties, vector) in list(server.objects["Docs"].items()):
        if (properties["source"], properties["document"]) == ("it's", "a b"):
            del server.objects["Docs"][key]
            assert dict(index.document_hashes("it's")) == whole | {"a b": ""}
            server.objects["Docs"][key] = (properties, vector)
    # What is left of an old version beside a new one.
    index.write(passages("it's", "a b", 3, "2"), unit_vectors(3), [])
    assert dict(index.document_hashes("it's")) == whole | {"a b": ""}
    # The server deletes three at a time.
    index.delete("it's", ["a b"])
    assert dict(index.document_hashes("it's")) == {"b": "b-1"}
    assert dict(index.document_hashes("other")) == {"a b": "a b-1"}
    server.refuse.add("a b 1 3")
    with pytest.raises(VectorIndexError, match="no room"):
        fill(index)
    assert dict(index.document_hashes("it's")) == {"a b": "", "b": "b-1"}


def test_the_collection_compares_ids_whole_and_by_cosine(opened, server):
    opened().create(IDENTITY)
    properties = {one["name"]: one for one in server.schema["Docs"]["properties"]}
    for name in ("source", "document"):
        assert properties[name]["tokenization"] == "field"
    (vector,) = server.schema["Docs"]["vectorConfig"].values()
    assert "none" in vector["vectorizer"] and vector["vectorIndexConfig"]["distance"] == "cosine"


def test_what_is_refused(opened, server):
    server.schema["Docs"] = {"class": "Docs", "description": "mine", "vectorConfig": {}}
    with pytest.raises(VectorIndexError, match="Docs"):
        opened()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for url in ("localhost:8080", f"http://127.0.0.1:{port}"):
        with pytest.raises(VectorIndexError, match=url):
            open_index("Docs", url)
