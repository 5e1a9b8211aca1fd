"""Contextual document embeddings as a Sentence Transformers model: what is built, the context, saving and loading."""

import json

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from neobert_hf import NeoBERTModel
from neobert_hf.contextual.model import build_contextual_encoder, draw_context, embed_context
from neobert_hf.embeddings.models import build, load_trained_model


SETTINGS = {"context_size": 6, "context_dropout": 0.1, "soft_prompts": 8, "text_position": 0}


@pytest.fixture(scope="module")
def texts(corpus) -> list[str]:
    lines = (corpus / "train.jsonl").read_text().splitlines()
    return [" ".join(json.loads(line)["text"].split()[: 4 + number % 9]) for number, line in enumerate(lines[:20])]


@pytest.fixture(scope="module")
def model(encoder) -> SentenceTransformer:
    torch.manual_seed(0)
    model = build_contextual_encoder(str(encoder), 48, **SETTINGS)
    model.prompts = {"query": "Find the answer. ", "document": ""}
    return model


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("contextual") / "model")
    model.save_pretrained(folder)
    return folder


def test_both_stages_start_as_the_encoder(model, encoder):
    expected, stages = NeoBERTModel.from_pretrained(encoder).state_dict(), model[0].model
    for stage in (stages.first_stage, stages.second_stage):
        state = stage.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    first, second = (set(map(id, stage.parameters())) for stage in (stages.first_stage, stages.second_stage))
    assert not first & second


def test_saved_loaded_and_encoded_to_the_bit(model, saved, texts):
    context = embed_context(model, texts, seed=0)
    calls = {
        "first stage": lambda each: each.encode(texts),
        "second stage": lambda each: each.encode(texts, dataset_embeddings=context),
        "null context": lambda each: each.encode(texts, dataset_embeddings=context[:0]),
        "queries": lambda each: each.encode_query(texts, dataset_embeddings=context),
        "documents": lambda each: each.encode_document(texts, dataset_embeddings=context),
    }
    before, loaded = {name: call(model) for name, call in calls.items()}, SentenceTransformer(saved)
    for name, call in calls.items():
        assert (call(loaded) == before[name]).all(), name
    assert (before["documents"] == before["second stage"]).all() and (before["queries"] != before["documents"]).any()
    assert len({before[name].tobytes() for name in ("first stage", "second stage", "null context")}) == 3
    again = build_contextual_encoder(saved, 48, **SETTINGS)
    assert (again.encode(texts, dataset_embeddings=context) == before["second stage"]).all()


def test_a_context_is_whole_and_has_the_prompt_of_documents(model, saved, texts):
    expected = embed_context(model, texts, seed=0)
    assert expected.shape == (6, 32) and expected.dtype == torch.float32 and not expected.requires_grad
    drawn = draw_context(texts, 6, seed=0)
    assert len(set(drawn)) == 6 and (expected.numpy() == model.encode(drawn)).all()
    # Equal texts count once, empty ones not at all; of too few each is taken as often as the others, or once more.
    few = draw_context(["a", "b", "a", " ", "c", ""], 8, seed=0)
    assert sorted(few.count(text) for text in "abc") == [2, 3, 3]
    # Also of a model that cuts its embeddings.
    shortened = SentenceTransformer(saved, truncate_dim=8)
    assert torch.equal(embed_context(shortened, texts, 0), expected)
    shortened.prompts["document"] = "Find. "
    prompted = embed_context(shortened, texts, 0)
    assert not torch.equal(prompted, expected) and torch.equal(embed_context(model, texts, 0, "Find. "), prompted)


# Calls with a model that does not fit, and what the error names.
REFUSED = [
    (lambda saved, _: build_contextual_encoder(saved, 48, **SETTINGS | {"context_size": 8}), "context_size"),
    (lambda _, encoder: build_contextual_encoder(encoder, 48, **SETTINGS | {"context_size": 65}), "context_size"),
    # No other recipe embeds with the first stage by mistake.
    (lambda saved, _: build(MultiVectorEncoder, saved, 48), "contextual model"),
    (lambda saved, _: load_trained_model(saved, "miner"), "contextual model"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_does_not_fit_is_refused(saved, encoder, call, message):
    with pytest.raises(ValueError, match=message):
        call(saved, str(encoder))
