"""Stores of vectors, with their own ways of asking a model for them."""

import numpy as np
import pytest

from tests.clients.plain import TEXTS, logits, same, vectors


def cosines(folder: str, query: int) -> np.ndarray:
    plain = vectors(folder, normalize=True)
    return plain @ plain[query]


@pytest.mark.clients("chromadb")
def test_chroma(encoder):
    """The distances computed with its own embedding function are those of the plain vectors."""
    import chromadb
    from chromadb.utils.embedding_functions import SentenceTransformerEmbeddingFunction

    embed = SentenceTransformerEmbeddingFunction(model_name=encoder, device="cpu")
    space = {"hnsw": {"space": "cosine"}}
    collection = chromadb.EphemeralClient().create_collection("texts", embedding_function=embed, configuration=space)
    collection.add(ids=list("0123"), documents=TEXTS)
    found = collection.query(query_texts=TEXTS[1], n_results=4)
    distances = dict(zip(found["ids"][0], found["distances"][0]))
    assert same([1 - distances[row] for row in "0123"], cosines(encoder, 1))


@pytest.mark.clients("lancedb")
def test_lancedb(encoder, tmp_path):
    """The distances computed with its own embedding function are those of the plain vectors."""
    import lancedb
    from lancedb.embeddings import get_registry
    from lancedb.pydantic import LanceModel, Vector

    embed = get_registry().get("sentence-transformers").create(name=encoder, device="cpu")

    class Passage(LanceModel):
        text: str = embed.SourceField()
        vector: Vector(embed.ndims()) = embed.VectorField()

    table = lancedb.connect(tmp_path).create_table("texts", schema=Passage)
    table.add([{"text": text} for text in TEXTS])
    found = {row["text"]: 1 - row["_distance"] for row in table.search(TEXTS[1]).distance_type("cosine").to_list()}
    assert same([found[text] for text in TEXTS], cosines(encoder, 1))


@pytest.mark.clients("sentence-transformers-haystack")
def test_haystack_embedder(encoder):
    """The vectors are the plain model's mean-pooled hidden states."""
    from haystack import Document
    from haystack.utils import ComponentDevice
    from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersDocumentEmbedder

    cpu = ComponentDevice.from_str("cpu")
    embedder = SentenceTransformersDocumentEmbedder(model=encoder, device=cpu)
    found = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    assert same([document.embedding for document in found], vectors(encoder))


@pytest.mark.clients("transformers-haystack")
def test_haystack_router(classifier):
    """A text is routed by the plain model's larger logit."""
    from haystack.utils import ComponentDevice
    from haystack_integrations.components.routers.transformers import TransformersTextRouter

    labels, cpu = ["LABEL_0", "LABEL_1"], ComponentDevice.from_str("cpu")
    router = TransformersTextRouter(model=classifier, labels=labels, device=cpu)
    for text, label in zip(TEXTS, logits(classifier).argmax(-1).tolist()):
        assert router.run(text) == {f"LABEL_{label}": text}
