"""Muon learns and takes what it should. AdamW and the schedules are in test_random_settings.py."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.training.optimizers import build_optimizer, build_schedule
from neobert_hf.training.pretraining import PretrainingArguments
from tests.helpers.models import ragged_batch, small_model


def build(name, model):
    settings = {"learning_rate": 2e-3, "weight_decay": 0.1, "use_cpu": True, "bf16": False}
    return build_optimizer(model, PretrainingArguments("unused", optimizer=name, **settings))


def test_a_warm_up_beyond_the_end_is_refused():
    with pytest.raises(ValueError, match="`warmup_steps` is 51"):
        build_schedule("linear", build("adamw", torch.nn.Linear(1, 1)), 51, 50)


def test_muon_learns():
    ids, mask = ragged_batch()
    labels = torch.where(mask.bool(), ids, -100)
    model = small_model(NeoBERTForMaskedLM).train()
    optimizer, losses = build("muon", model), []
    for _ in range(12):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


BERT = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize(
    "model, blocks",
    [(small_model(NeoBERTForMaskedLM), "transformer_encoder."), (BertForMaskedLM(BERT), "encoder.layer.")],
    ids=["NeoBERT", "BERT"],
)
def test_muon_takes_the_hidden_matrices_only(model, blocks):
    optimizer = build("muon", model)
    muon = {id(weight) for group in optimizer.param_groups if group["use_muon"] for weight in group["params"]}
    for name, weight in model.named_parameters():
        assert (id(weight) in muon) == (weight.ndim == 2 and blocks in name), name
