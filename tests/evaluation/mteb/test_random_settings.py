"""Random settings of MTEB and the embeddings of a text at a time."""

import math
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from neobert_hf.embeddings.inference import load_embedding_model
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.recipe import MTEBSettings
from tests.helpers.mteb_tasks import random_texts
from tests.helpers.properties import reproducible


TASK = SimpleNamespace(name="Topics")
sizes = {"max_length": st.none() | st.integers(3, 80), "truncate_dim": st.none() | st.integers(1, 64)}


def test_embeddings(models):
    texts = [*random_texts(5), "the cat sat on a mat " * 20]
    backbone, tokenizer = AutoModel.from_pretrained(models[0]).eval(), AutoTokenizer.from_pretrained(models[0])

    @reproducible(15)
    @given(st.fixed_dictionaries(sizes | {"batch_size": st.integers(1, 8)}), st.sampled_from(["", "a dog "]))
    def check(values, prompt):
        settings = MTEBSettings(models[0], "unused", **values)
        options = {"device": "cpu", "truncate_dim": settings.truncate_dim}
        model = load_embedding_model(settings.model, torch.float32, settings.max_length, **options)
        encoder = InstructionEncoder(model, "m", {"Topics": prompt})
        options = {"task_metadata": TASK, "hf_split": "test", "hf_subset": "default"}
        found = encoder.encode([{"text": texts}], batch_size=settings.batch_size, **options)
        # The model has 64 positions.
        length = min(settings.max_length or math.inf, 64)
        for vector, text in zip(found, texts):
            ids = torch.tensor([tokenizer(prompt + text, truncation=True, max_length=length)["input_ids"]])
            with torch.no_grad():
                states = backbone(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            expected = states.double().mean(0)[: settings.truncate_dim].numpy()
            assert vector.shape == expected.shape and np.abs(vector - expected).max() < 1e-4 * np.abs(expected).max()

    check()
