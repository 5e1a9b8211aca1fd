"""Contextual models on MTEB tasks: one context a task, made before its queries are encoded."""

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from neobert_hf.contextual.model import build_contextual_encoder
from tests.helpers.mteb_tasks import random_texts, run_local


def test_every_task_has_a_context_of_its_own_texts(local, models, tmp_path, monkeypatch):
    """Of the corpus, of the texts that a classifier learns from, or of those that are compared."""
    torch.manual_seed(0)
    settings = {"context_size": 5, "context_dropout": 0.0, "soft_prompts": 8, "text_position": 0}
    model = build_contextual_encoder(models[0], 64, **settings)
    model.prompts = {"query": "the cat sat ", "document": "a dog "}
    model.save_pretrained(str(tmp_path / "model"))
    calls, encode = [], SentenceTransformer.encode

    def record(self, inputs, *args, dataset_embeddings=None, prompt=None, **kwargs):
        calls.append((prompt, list(inputs), dataset_embeddings))
        return encode(self, inputs, *args, dataset_embeddings=dataset_embeddings, prompt=prompt, **kwargs)

    monkeypatch.setattr(SentenceTransformer, "encode", record)
    tasks = ("Search", "Similarity", "Topics")
    run_local(local, str(tmp_path / "model"), tmp_path / "out", "--name", "m", "--tasks", *tasks)
    # The instruction for a task's documents, or for all its texts, also stands before those of the context.
    one, two = random_texts(24, seed=1), random_texts(24, seed=2)
    expected = {"a dog ": {*one, *two}, "on a mat ": {*one}, "": {f"{text} mat" for text in (*one, *two)}}
    # The draws, without a context; then whatever reads them, queries as well as documents.
    draws = {prompt: texts for prompt, texts, context in calls if context is None}
    assert draws.keys() == expected.keys() and sum(context is None for _, _, context in calls) == 3
    assert all(len(texts) == 5 and set(texts) <= expected[prompt] for prompt, texts in draws.items())
    contexts = {prompt: encode(model, texts, prompt=prompt) for prompt, texts in draws.items()}
    for prompt, _, context in calls:
        if context is not None:
            of = "a dog " if prompt == "the cat sat " else prompt or ""
            assert np.array_equal(context.numpy(), contexts[of])
