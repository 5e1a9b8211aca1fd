"""The encoders that NeoBERT is compared with: their sizes, batches and the operations that they need."""

import pytest
import torch
from encoders import ENCODERS, Bench, build_config, build_model, count_parameters, forward_flops, ragged_lengths
from torch.utils.flop_counter import FlopCounterMode


SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "pad_token_id": 1}


@pytest.mark.parametrize("name", ENCODERS)
def test_published_sizes(name):
    """To 1.2%: published counts are rounded, and those of BERT and RoBERTa have the pooler in them."""
    assert count_parameters(build_config(name)) / 1e6 == pytest.approx(ENCODERS[name].parameters, rel=0.012)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("training", [False, True])
def test_one_measurement(name, training):
    """Only real tokens are counted, and only a training step changes the weights."""
    bench = Bench(build_config(name, **SIZES), "sdpa", torch.float32, training)
    before = [parameter.clone() for parameter in bench.model.parameters()]
    full = bench.measure(torch.full((8,), 16), False, 0.0)
    ragged = bench.measure(ragged_lengths(8, 16), name == "NeoBERT", 0.0)
    assert all(found["tokens"] > 0 and found["flops"] > 0 for found in (full, ragged))
    changed = any((old != new).any() for old, new in zip(before, bench.model.parameters()))
    assert changed == training
    assert all(parameter.isfinite().all() for parameter in bench.model.parameters())


@pytest.mark.parametrize("name", ENCODERS)
def test_flops_equal_those_of_torch(name):
    """Exactly, where nothing is padded, every label is wanted and the local window reaches over the whole sequence."""
    model = build_model(build_config(name, **SIZES), "eager", "cpu", torch.float32).train()
    lengths = torch.tensor([24, 24])
    ids = torch.randint(5, 100, (2, 24))
    with FlopCounterMode(display=False) as forward:
        model.base_model(ids)
    assert forward.get_total_flops() == forward_flops(model, lengths, 0)
    with FlopCounterMode(display=False) as training:
        model(ids, labels=ids).loss.backward()
    # The derivative by the first layer's input is not taken where the embedding stays: both are counted alike.
    assert training.get_total_flops() == 3 * forward_flops(model, lengths, 48)
