"""Contextual document embeddings as a Sentence Transformers model: what is built, the context, saving and loading."""

import json

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from neobert_hf import NeoBERTModel
from neobert_hf.embeddings.contextual import build_contextual_encoder, draw_context, embed_context
from neobert_hf.embeddings.models import build, build_encoder, load_trained_model
from tests.helpers.other_encoders import save_other_encoder


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
    assert model.max_seq_length == 48 and model.get_embedding_dimension() == 32


def test_saved_loaded_and_encoded_to_the_bit(model, saved, texts):
    context = embed_context(model, texts, seed=0)
    calls = {
        "first stage": lambda each: each.encode(texts),
        "second stage": lambda each: each.encode(texts, dataset_embeddings=context),
        "null context": lambda each: each.encode(texts, dataset_embeddings=context[:0]),
        "queries": lambda each: each.encode_query(texts, dataset_embeddings=context),
        "documents": lambda each: each.encode_document(texts, dataset_embeddings=context),
        "context": lambda each: embed_context(each, texts, seed=0).numpy(),
    }
    before, loaded = {name: call(model) for name, call in calls.items()}, SentenceTransformer(saved)
    for name, call in calls.items():
        assert (call(loaded) == before[name]).all(), name
    assert (before["documents"] == before["second stage"]).all() and (before["queries"] != before["documents"]).any()
    assert len({before[name].tobytes() for name in ("first stage", "second stage", "null context")}) == 3
    again = build_contextual_encoder(saved, 48, **SETTINGS)
    assert (again.encode(texts, dataset_embeddings=context) == before["second stage"]).all()


def test_a_context_is_whole_whatever_the_model_is_set_to(model, saved, texts):
    expected = embed_context(model, texts, seed=0)
    assert expected.shape == (6, 32) and expected.dtype == torch.float32 and not expected.requires_grad
    assert (expected.numpy() == model.encode(draw_context(texts, 6, 0))).all()
    shortened = SentenceTransformer(saved, truncate_dim=8)
    assert torch.equal(embed_context(shortened, texts, 0), expected)
    assert shortened.encode(texts, dataset_embeddings=expected).shape == (20, 8)
    # The prompt of documents is the model's own, unless another one is given.
    other = embed_context(shortened, texts, 0, prompt="Find. ")
    shortened.prompts["document"] = "Find. "
    assert not torch.equal(other, expected) and torch.equal(embed_context(shortened, texts, 0), other)


def test_the_draw():
    corpus = [f"text {number}" for number in range(40)]
    drawn = draw_context(corpus, 10, seed=0)
    assert len(set(drawn)) == 10 and drawn == draw_context(corpus, 10, seed=0) != draw_context(corpus, 10, seed=1)
    # Equal texts count once, empty ones not at all; of too few each is taken as often as the others, or once more.
    few = draw_context(["a", "b", "a", " ", "c", ""], 8, seed=0)
    assert sorted(few.count(text) for text in "abc") == [2, 3, 3]


# Calls of which the model, the saved one, an encoder or that of another type does not fit, and what the error names.
REFUSED = [
    (lambda paths: build_contextual_encoder(paths["bert"], 48, **SETTINGS), "'bert'"),
    (lambda paths: build_contextual_encoder(paths["saved"], 48, **SETTINGS | {"context_size": 8}), "context_size"),
    (lambda paths: build_contextual_encoder(paths["encoder"], 48, **SETTINGS | {"context_size": 65}), "context_size"),
    (lambda paths: embed_context(build_encoder(paths["encoder"], 48), ["a"], 0), "`embed_context`"),
    (lambda paths: embed_context(SentenceTransformer(paths["saved"]), ["", " "], 0), "at least one text"),
    # No other recipe embeds with the first stage by mistake.
    (lambda paths: build(MultiVectorEncoder, paths["saved"], 48), "contextual model"),
    (lambda paths: load_trained_model(paths["saved"], "miner"), "contextual model"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_does_not_fit_is_refused(saved, encoder, tokenizer, tmp_path, call, message):
    save_other_encoder("bert", tmp_path / "bert", tokenizer)
    with pytest.raises(ValueError, match=message):
        call({"bert": str(tmp_path / "bert"), "saved": saved, "encoder": str(encoder)})
