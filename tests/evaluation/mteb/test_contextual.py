"""Contextual models on MTEB tasks: one context a task, made before its queries are encoded."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from neobert_hf.data.tables import read_rows
from neobert_hf.embeddings.contextual import build_contextual_encoder
from tests.helpers.mteb_tasks import run_local


SIZE = 5


@pytest.fixture(scope="module")
def model(models, tmp_path_factory) -> str:
    torch.manual_seed(0)
    settings = {"context_size": SIZE, "context_dropout": 0.0, "soft_prompts": 8, "text_position": 0}
    model = build_contextual_encoder(models[0], 64, **settings)
    model.prompts = {"query": "the cat sat ", "document": "a dog "}
    folder = tmp_path_factory.mktemp("contextual")
    model.save_pretrained(str(folder))
    return str(folder)


def test_every_task_has_a_context_of_its_own_texts(local, model, tmp_path, monkeypatch):
    """Of the corpus, of the texts that a classifier learns from, or of those that are compared."""
    calls, encode = [], SentenceTransformer.encode

    def record(self, inputs, *args, dataset_embeddings=None, prompt=None, **kwargs):
        calls.append((prompt, list(inputs), dataset_embeddings))
        return encode(self, inputs, *args, dataset_embeddings=dataset_embeddings, prompt=prompt, **kwargs)

    monkeypatch.setattr(SentenceTransformer, "encode", record)
    run_local(local, model, tmp_path, "--name", "m", "--tasks", "Search", "Similarity", "Topics")

    def texts_of(file: str, column: str) -> set[str]:
        return {row.text(column) for row in read_rows(str(local / file))}

    # The instruction for a task's documents, or for all its texts, also stands before those of the context.
    expected = {
        "a dog ": texts_of("search.jsonl", "document") | texts_of("more.parquet", "document"),
        "on a mat ": texts_of("sts.parquet", "sentence1"),
        "": texts_of("topics_train.parquet", "text"),
    }
    # The draws, without a context; then whatever reads them, queries as well as documents.
    draws = {prompt: texts for prompt, texts, context in calls if context is None}
    assert draws.keys() == expected.keys() and sum(context is None for _, _, context in calls) == 3
    assert all(len(texts) == SIZE and set(texts) <= expected[prompt] for prompt, texts in draws.items())
    loaded = SentenceTransformer(model)
    contexts = {prompt: encode(loaded, texts, prompt=prompt) for prompt, texts in draws.items()}
    for prompt, _, context in calls:
        if context is not None:
            of = "a dog " if prompt == "the cat sat " else prompt or ""
            assert np.array_equal(context.numpy(), contexts[of])
