"""Weaviate behind the same interface as LanceDB, against a stand-in.

Where WEAVIATE_URL (and WEAVIATE_GRPC_PORT) name a server, two of the tests run against it, too. None has done so yet.
"""

import os
import socket
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer


pytest.importorskip("weaviate")
pytest.importorskip("lancedb")
from neobert_hf.search.index import VectorIndexError, open_index  # noqa: E402
from neobert_hf.search.lancedb_index import LanceDBIndex  # noqa: E402
from neobert_hf.search.passages import Passage  # noqa: E402
from tests.helpers.search_encoder import save_search_encoder  # noqa: E402
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

    def run(url=server.url, grpc_port=server.grpc_port):
        indexes.append(open_index("Docs", url, grpc_port))
        return indexes[-1]

    yield run
    for index in indexes:
        index.close()


no_server = pytest.mark.skipif("WEAVIATE_URL" not in os.environ, reason="WEAVIATE_URL is not set")


@pytest.fixture(params=["stand-in", pytest.param("real", marks=no_server)])
def address(request, server):
    """URL and gRPC port of the stand-in, or of a real server, which must hold no collection `Docs`."""
    if request.param == "stand-in":
        return server.url, server.grpc_port
    return os.environ["WEAVIATE_URL"], int(os.environ.get("WEAVIATE_GRPC_PORT", 50051))


def passages(source: str, document: str, count: int, version: str = "1") -> list[Passage]:
    hash = f"{document}-{version}"
    return [Passage(source, document, i, count, hash, f"{document} {version} {i}") for i in range(count)]


def vectors(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def fill(index) -> None:
    rows = passages("it's", "a b", 5) + passages("it's", "b", 1)
    index.write(rows, vectors(6), [])
    index.write(passages("other", "a b", 2), vectors(2, seed=5), [])
    index.commit()


def test_it_does_what_lancedb_does(opened, address, tmp_path):
    both = [opened(*address), LanceDBIndex(tmp_path / "index")]
    for index in both:
        assert index.identity is None
        index.create(IDENTITY)
        fill(index)
        index.delete("it's", ["b", "nothing"])
        index.write(passages("it's", "a b", 3, "2"), vectors(3, seed=1), ["a b"])
        index.commit()
        index.optimize()
    both = [opened(*address), LanceDBIndex(tmp_path / "index")]
    query = vectors(1, seed=2)[0]
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
    both[0].client.collections.delete("Docs")


ABOUT_ANIMALS = [
    "Weighing around a ton, the eland is the largest species of this animal in Africa",
    "The gavial looks very much like a crocodile except for this bodily feature",
    "This organ removes excess glucose from the blood & stores it as glycogen",
    "In 1953 Watson & Crick built a model of the molecular structure of this, the gene-carrying substance",
]


# Its code is older than the client.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_study_notes_search_with_vectors_of_ones_own(address, tmp_path):
    """Their cells with a model that has not learned anything; their `get_embedding` embeds one text for all."""
    import weaviate
    import weaviate.classes as wvc
    import weaviate.classes.config as wc

    model_name = save_search_encoder(tmp_path / "encoder")
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModel.from_pretrained(model_name)

    @torch.no_grad()
    def get_embedding(source_text: str):
        inputs = tokenizer(source_text, return_tensors="pt")
        outputs = model(**inputs)
        embedding = outputs.last_hidden_state[:, 0, :]
        return embedding[0].tolist()

    url = urlsplit(address[0])
    with weaviate.connect_to_local(url.hostname, url.port, address[1]) as client:
        assert client.is_ready()
        if client.collections.exists("TestCollection"):
            client.collections.delete("TestCollection")
        collection = client.collections.create(
            name="TestCollection",
            vectorizer_config=wc.Configure.Vectorizer.none(),
            properties=[wc.Property(name="Text", data_type=wc.DataType.TEXT)],
        )
        objs = [wvc.data.DataObject(properties={"Text": text}, vector=get_embedding(text)) for text in ABOUT_ANIMALS]
        inserted = collection.data.insert_many(objs)
        assert not inserted.errors

        query = get_embedding("African animal")
        response = collection.query.near_vector(near_vector=query, limit=3, include_vector=True)

        vectors = np.array([one.vector for one in objs])
        cosines = vectors @ query / np.linalg.norm(vectors, axis=1)
        assert len(response.objects) == 3
        for item, best in zip(response.objects, np.argsort(-cosines)):
            assert item.uuid == inserted.uuids[best]
            assert item.properties == {"text": ABOUT_ANIMALS[best]}
            assert np.allclose(item.vector["default"], vectors[best], atol=1e-5)
        client.collections.delete("TestCollection")


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
    index.write(passages("it's", "a b", 3, "2"), vectors(3), [])
    assert dict(index.document_hashes("it's")) == whole | {"a b": ""}
    # The server deletes three at a time.
    index.delete("it's", ["a b"])
    assert dict(index.document_hashes("it's")) == {"b": "b-1"} and dict(index.document_hashes("other")) == {
        "a b": "a b-1"
    }
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
