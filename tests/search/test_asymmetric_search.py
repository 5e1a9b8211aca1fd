"""An index of a teacher's vectors that a student searches, and a reranker that orders what was found."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router

from neobert_hf import NeoBERTForSequenceClassification
from neobert_hf.embeddings.space import TEACHER_FILE, write_teacher
from neobert_hf.search import query as search
from tests.helpers.models import small_model


@pytest.fixture(scope="module")
def student(model, tmp_path_factory) -> Path:
    """Another model, whose folder says that it learned the vectors of `model`."""
    folder = tmp_path_factory.mktemp("student") / "model"
    other = SentenceTransformer(str(model), device="cpu")
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    other.save(str(folder))
    write_teacher(folder, str(model))
    return folder


@pytest.fixture
def indexed(index, corpus, tmp_path) -> dict:
    index(corpus, "--id_column=id")
    return {"index": tmp_path / "index", "device": "cpu", "top_k": 60}


def test_a_student_searches_the_vectors_of_its_teacher(indexed, encoder, student, texts):
    (hits,) = search(**indexed, text="a list of numbers", query_model=student)
    asked = SentenceTransformer(str(student), device="cpu").encode("a list of numbers", normalize_embeddings=True)
    expected = encoder.encode(texts, normalize_embeddings=True) @ asked
    assert [hit.document for hit in hits] == [f"d{7 * row}" for row in np.argsort(-expected)]
    assert np.abs([hit.score for hit in hits] - np.sort(expected)[::-1]).max() < 1e-5
    (own,) = search(**indexed, text="a list of numbers")
    assert [hit.score for hit in own] != [hit.score for hit in hits]


def test_a_model_of_another_space_is_refused(indexed, model, student, tmp_path):
    with pytest.raises(ValueError, match=f"{model} has no teacher.json"):
        search(**indexed, text="x", query_model=model)
    SentenceTransformer(str(student)).save(str(tmp_path / "second"))
    write_teacher(tmp_path / "second", str(student))
    with pytest.raises(ValueError, match=f"learned the vectors of {student}.* holds those of {model}"):
        search(**indexed, text="x", query_model=tmp_path / "second")
    with pytest.raises(ValueError, match="`model` .* would not be used"):
        search(**indexed, text="x", query_model=student, model=model)


def test_a_router_holds_both(encoder, student, texts, tmp_path):
    """As the guide has it: queries go to the student, documents to the teacher."""
    small = SentenceTransformer(str(student), device="cpu")
    SentenceTransformer(modules=[Router.for_query_document(list(small), list(encoder))]).save(str(tmp_path / "both"))
    both = SentenceTransformer(str(tmp_path / "both"), device="cpu")
    np.testing.assert_allclose(both.encode_query(texts[:9]), small.encode_query(texts[:9]), atol=1e-6)
    np.testing.assert_allclose(both.encode_document(texts[:9]), encoder.encode_document(texts[:9]), atol=1e-6)


@pytest.fixture(scope="module")
def reranker(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    sizes = {"vocab_size": 600, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    scorer = small_model(NeoBERTForSequenceClassification, **sizes, num_labels=1, classifier_init_range=0.5)
    scorer.resize_token_embeddings(SentenceTransformer(str(model))[0].model.config.vocab_size)
    scorer.save_pretrained(folder / "scorer")
    SentenceTransformer(str(model)).tokenizer.save_pretrained(folder / "scorer")
    CrossEncoder(str(folder / "scorer"), device="cpu").save_pretrained(str(folder / "model"))
    return folder / "model"


def test_a_reranker_orders_what_was_found(indexed, reranker):
    asked = {"text": "a list of numbers", "reranker": reranker}
    (found,) = search(**indexed, text="a list of numbers")
    (hits,) = search(**indexed | {"top_k": 4}, **asked, rerank=10)
    scores = CrossEncoder(str(reranker), device="cpu").predict([("a list of numbers", hit.text) for hit in found[:10]])
    best = np.argsort(-scores)[:4]
    assert [hit.document for hit in hits] == [found[row].document for row in best]
    np.testing.assert_allclose([hit.score for hit in hits], scores[best], atol=1e-5)


def test_a_reranker_is_a_cross_encoder(indexed, model):
    with pytest.raises(ValueError, match="`reranker`.*SentenceTransformer"):
        search(**indexed, text="x", reranker=model)


def test_a_number_to_rerank_needs_a_reranker(indexed):
    with pytest.raises(ValueError, match="`rerank` is 20, .* `reranker`"):
        search(**indexed, text="x", rerank=20)


def test_the_file_names_the_teacher(model, student):
    assert json.loads((student / TEACHER_FILE).read_text())["teacher"] == str(model)
