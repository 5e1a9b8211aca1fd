"""Libraries that embed texts with a model."""

import asyncio

import numpy as np
import pytest

from neobert_hf import NeoBERTForSequenceClassification
from neobert_hf.hub import export
from tests.clients.plain import TEXTS, logits, same, vectors


@pytest.mark.clients("sentence-transformers")
def test_sentence_transformers(encoder):
    """The vectors are the plain model's mean-pooled hidden states."""
    from sentence_transformers import SentenceTransformer

    got = SentenceTransformer(encoder, device="cpu").encode(TEXTS)
    assert same(got, vectors(encoder))


@pytest.mark.clients("langchain-huggingface")
def test_langchain(encoder):
    """The vectors of documents and of a query are the plain model's mean-pooled hidden states."""
    from langchain_huggingface import HuggingFaceEmbeddings

    embeddings = HuggingFaceEmbeddings(model_name=encoder, model_kwargs={"device": "cpu"})
    assert same(embeddings.embed_documents(TEXTS), vectors(encoder))
    assert same(embeddings.embed_query(TEXTS[0]), vectors(encoder)[0])


@pytest.mark.clients("llama-index-embeddings-huggingface")
def test_llama_index(encoder):
    """The vectors are the plain model's normalised mean-pooled hidden states."""
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    embeddings = HuggingFaceEmbedding(model_name=encoder, device="cpu")
    assert same(embeddings.get_text_embedding_batch(TEXTS), vectors(encoder, normalize=True))


@pytest.mark.clients("txtai")
def test_txtai(encoder):
    """A search gives the cosines of the plain model's mean-pooled hidden states."""
    from txtai import Embeddings

    embeddings = Embeddings(path=encoder, gpu=False, backend="numpy")
    embeddings.index(TEXTS)
    found = dict(embeddings.search(TEXTS[1], len(TEXTS)))
    plain = vectors(encoder, normalize=True)
    assert len(found) >= 2 and same(list(found.values()), (plain @ plain[1])[list(found)])  # Without those below 0.


@pytest.mark.clients("infinity-emb")
def test_infinity(encoder):
    """The vectors of a running engine are the plain model's normalised mean-pooled hidden states."""
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    options = {"device": "cpu", "engine": "torch", "model_warmup": False, "bettertransformer": False}
    arguments = EngineArgs(model_name_or_path=encoder, **options)

    async def embed():
        engine = AsyncEmbeddingEngine.from_args(arguments)
        async with engine:
            return (await engine.embed(sentences=TEXTS))[0]

    assert same(np.stack(asyncio.run(embed())), vectors(encoder, normalize=True))


@pytest.mark.clients("fastembed")
def test_fastembed(encoder, tmp_path):
    """The vectors of the exported file, without PyTorch, are the plain model's normalised mean-pooled hidden states."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    export(model=encoder, output_dir=tmp_path / "exported", precisions=["float32"])
    options = {"pooling": PoolingType.MEAN, "normalization": True, "sources": ModelSource(hf="me/neobert")}
    TextEmbedding.add_custom_model("me/neobert", **options, dim=64, model_file="onnx/model.onnx")
    model = TextEmbedding("me/neobert", specific_model_path=str(tmp_path / "exported"))
    assert same(np.stack(list(model.embed(TEXTS))), vectors(encoder, normalize=True))


@pytest.mark.clients("model2vec")
def test_model2vec(encoder):
    """The static vector of a word is the plain model's normalised mean-pooled hidden state."""
    from model2vec.distill import distill

    static = distill(encoder, device="cpu", pca_dims=None, sif_coefficient=None)
    assert same(static.encode(["a", "7"]), vectors(encoder, ["a", "7"], normalize=True), 1e-3)


@pytest.mark.clients("rerankers")
@pytest.mark.clients("sentence-transformers")
def test_rerankers(checkpoint):
    """The scores are the logits of query and document encoded as one pair; those of a cross-encoder their sigmoids."""
    from rerankers import Reranker
    from sentence_transformers import CrossEncoder

    folder, pairs = checkpoint(NeoBERTForSequenceClassification, num_labels=1), [(TEXTS[1], text) for text in TEXTS]
    expected = logits(folder, pairs)[:, 0]
    ranker = Reranker(folder, model_type="cross-encoder", device="cpu", dtype="float32")
    scores = {result.doc_id: result.score for result in ranker.rank(query=TEXTS[1], docs=TEXTS).results}
    assert same([scores[row] for row in range(len(TEXTS))], expected)
    assert same(CrossEncoder(folder, device="cpu").predict(pairs), expected.sigmoid())
