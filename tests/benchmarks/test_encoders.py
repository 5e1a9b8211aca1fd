"""The encoders that NeoBERT is compared with: their sizes, batches and the operations that they need."""

import pytest
import torch
from encoders import (
    ENCODERS,
    Bench,
    build_config,
    build_model,
    count_parameters,
    forward_flops,
    make_batch,
    ragged_lengths,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers.masking_utils import create_bidirectional_sliding_window_mask


SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 1,
}


def small(name: str):
    return build_config(name, **SMALL)


@pytest.mark.parametrize("name", ENCODERS)
def test_published_sizes(name):
    """To 1.2%: published counts are rounded, and those of BERT and RoBERTa have the pooler in them."""
    assert count_parameters(build_config(name)) / 1e6 == pytest.approx(ENCODERS[name].parameters, rel=0.012)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("training", [False, True])
def test_one_measurement(name, training):
    """Only real tokens are counted, and only a training step changes the weights."""
    bench = Bench(small(name), "sdpa", torch.float32, training)
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
    model = build_model(small(name), "eager", "cpu", torch.float32).train()
    lengths = torch.tensor([24, 24])
    ids = torch.randint(5, 100, (2, 24))
    with FlopCounterMode(display=False) as forward:
        model.base_model(ids)
    assert forward.get_total_flops() == forward_flops(model, lengths, 0)
    with FlopCounterMode(display=False) as training:
        model(ids, labels=ids).loss.backward()
    # The derivative by the first layer's input is not taken where the embedding stays: both are counted alike.
    assert training.get_total_flops() == 3 * forward_flops(model, lengths, 48)


def test_pairs_of_local_attention():
    """As many as Transformers' own mask of the window lets through."""
    config = build_config("ModernBERT-base", **SMALL, local_attention=8)
    config._attn_implementation = "eager"
    model = build_model(config, "eager", "meta", torch.float32)
    for length in (3, 5, 6, 9, 40):
        states = torch.zeros(1, length, 32)
        mask = create_bidirectional_sliding_window_mask(config=config, inputs_embeds=states, attention_mask=None)
        pairs = length**2 if mask is None else int((mask == 0).sum())
        kinds = config.layer_types
        expected = sum(length**2 if kind == "full_attention" else pairs for kind in kinds)
        linear = forward_flops(model, torch.tensor([length]), 0) - 4 * 32 * expected
        assert kinds.count("sliding_attention") == 2
        assert linear == length * forward_flops(model, torch.tensor([1]), 0) - length * 4 * 32 * 4


def test_labels_are_a_fifth_of_the_real_tokens():
    torch.manual_seed(0)
    lengths = ragged_lengths(64, 256)
    for packed in (False, True):
        inputs, labels = make_batch(small("NeoBERT"), lengths, packed)
        assert labels.shape == inputs["input_ids"].shape
        assert (labels != -100).sum() / lengths.sum() == pytest.approx(0.2, abs=0.02)
        if not packed:
            assert inputs["attention_mask"].sum() == lengths.sum()
            assert (labels[inputs["attention_mask"] == 0] == -100).all()


@torch.no_grad()
def test_packed_batch_keeps_sequences_apart():
    """The packed row is the padded batch without its padding: each sequence has the output that it has alone."""
    lengths = torch.tensor([16, 5, 9])
    inputs, _ = make_batch(small("NeoBERT"), lengths, True)
    model = build_model(small("NeoBERT"), "sdpa", "cpu", torch.float32).eval().base_model
    packed = model(**inputs).last_hidden_state[0].split(lengths.tolist())
    for ids, states in zip(inputs["input_ids"][0].split(lengths.tolist()), packed):
        torch.testing.assert_close(model(ids[None]).last_hidden_state[0], states, rtol=0, atol=1e-6)
