"""What Weaviate needs beside what holds for both databases, against a stand-in. No real server has run."""

import socket

import pytest


pytest.importorskip("weaviate")
from neobert_hf.search.passages import Passage  # noqa: E402
from neobert_hf.search.vector_index import VectorIndexError, open_index  # noqa: E402
from tests.search.conftest import unit_vectors  # noqa: E402


pytestmark = pytest.mark.parametrize("place", ["weaviate"], indirect=True)
IDENTITY = {"model": "some/model", "fingerprint": "abc", "dimension": 8, "precision": None}
IDENTITY |= {"query_prompt": 'say "it": é '}


def passages(source: str, document: str, count: int, version: str = "1") -> list[Passage]:
    hash = f"{document}-{version}"
    return [Passage(source, document, i, count, hash, f"{document} {version} {i}") for i in range(count)]


def fill(index) -> None:
    index.write(passages("it's", "a b", 5) + passages("it's", "b", 1), unit_vectors(6), [])
    index.write(passages("other", "a b", 2), unit_vectors(2, seed=5), [])


def test_a_collection_keeps_its_identity_and_compares_ids_whole_and_by_cosine(opened, server):
    opened().create(IDENTITY)
    assert opened().identity == IDENTITY
    properties = {one["name"]: one for one in server.schema["Docs"]["properties"]}
    assert properties["source"]["tokenization"] == properties["document"]["tokenization"] == "field"
    (vector,) = server.schema["Docs"]["vectorConfig"].values()
    assert "none" in vector["vectorizer"] and vector["vectorIndexConfig"]["distance"] == "cosine"


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


def test_what_is_refused(opened, server):
    with pytest.raises(VectorIndexError, match="`precision` is for LanceDB"):
        opened().create(IDENTITY | {"precision": "int8"})
    server.schema["Docs"] = {"class": "Docs", "description": "mine", "vectorConfig": {}}
    with pytest.raises(VectorIndexError, match="Docs"):
        opened()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for url in ("localhost:8080", f"http://127.0.0.1:{port}"):
        with pytest.raises(VectorIndexError, match=url):
            open_index("Docs", url)
