"""Muon learns and takes what it should. AdamW and the schedules are in test_random_settings.py."""

import torch

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.training.optimizers import build_optimizer
from neobert_hf.training.pretraining import PretrainingArguments
from tests.helpers.models import ragged_batch, small_model


def test_muon_takes_the_hidden_matrices_and_learns():
    ids, mask = ragged_batch()
    labels = torch.where(mask.bool(), ids, -100)
    model = small_model(NeoBERTForMaskedLM).train()
    settings = {"learning_rate": 2e-3, "weight_decay": 0.1, "use_cpu": True}
    optimizer, losses = build_optimizer(model, PretrainingArguments("unused", optimizer="muon", **settings)), []
    muon = {id(weight) for group in optimizer.param_groups if group["use_muon"] for weight in group["params"]}
    for name, weight in model.named_parameters():
        assert (id(weight) in muon) == (weight.ndim == 2 and "transformer_encoder." in name), name
    for _ in range(12):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
