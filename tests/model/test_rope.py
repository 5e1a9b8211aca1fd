"""Rotary positions: every type through Transformers' own frequencies, and nothing silent about length."""

import math

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.rotary_neobert import rotary_table, rotate
from tests.helpers.models import CPU_BACKENDS, positions_of, ragged_batch, small_config, small_model


FACTORS = [1.0 + i / 4 for i in range(8)]
ROPE_TYPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("span", [40, 200])
def test_types_are_those_of_transformers(rope_type, span):
    config = small_config(rope_parameters=ROPE_TYPES[rope_type])
    llama = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **ROPE_TYPES[rope_type]},
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](llama, torch.device("cpu"), seq_len=span)
    table = rotary_table(config, torch.arange(span)[None], span)
    angles = torch.arange(span).float()[:, None] * inv_freq
    expected = torch.stack((angles.cos(), angles.sin()), dim=-1) * factor
    query, key = table[0, :, 0].unbind(1)
    assert torch.equal(query, expected) and torch.equal(key, expected)
    default = rotary_table(small_config(), torch.arange(span)[None], span)
    expect_default = rope_type == "dynamic" and span <= 64
    assert torch.allclose(table, default, atol=1e-6) == expect_default


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_rotation_by_complex_multiplication(dtype, tolerance):
    """float32 has a path of its own on a CPU; the gradient is turned back."""
    x, upstream = (states[..., :2, :] for states in torch.randn(2, 2, 9, 4, 3, 16).to(dtype))
    positions = torch.arange(9)
    table = rotary_table(small_config(), positions[None], 9)
    turns = torch.polar(torch.ones(9, 8).double(), positions[:, None] / 10000 ** (torch.arange(0, 16, 2).double() / 16))

    def turned(states, turns):
        pairs = torch.view_as_complex(states.double().unflatten(-1, (-1, 2))) * turns[None, :, None, None]
        return torch.view_as_real(pairs).flatten(-2)

    rotated = rotate(x.requires_grad_(), table)
    rotated.backward(upstream)
    assert rotated.dtype == dtype and (rotated - turned(x, turns)).abs().max() < tolerance
    assert (x.grad - turned(upstream, turns.conj())).abs().max() < tolerance


def test_yarn_factor_scales_the_scores():
    """Scores grow by (0.1 ln s + 1)^2, arXiv 2309.00071, eq. 15: seen in attention weights at distance 0."""
    factor = 0.1 * math.log(4.0) + 1
    plain, scaled = (small_config(rope_parameters=p) for p in (None, ROPE_TYPES["yarn"]))
    x = torch.randn(1, 1, 1, 2, 16)
    query, key = rotate(x, rotary_table(plain, torch.tensor([[0]]), 1)).unbind(-2)
    query_yarn, key_yarn = rotate(x, rotary_table(scaled, torch.tensor([[0]]), 1)).unbind(-2)
    assert torch.allclose((query_yarn * key_yarn).sum(), (query * key).sum() * factor**2, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_backends_and_layouts_agree(rope_type):
    """`dynamic` and `longrope` look at the longest sequence: padding and packing must not change what that is."""
    lengths = (90, 20, 50)
    ids = torch.randint(1, 100, (1, sum(lengths)))
    states = {}
    for backend in CPU_BACKENDS:
        model = small_model(attn_implementation=backend, rope_parameters=ROPE_TYPES[rope_type])
        states[backend, "packed"] = model(ids, position_ids=positions_of(lengths)).last_hidden_state[0]
        for side in ("right", "left"):
            padded, mask = torch.zeros(3, 120, dtype=torch.long), torch.zeros(3, 120, dtype=torch.long)
            for row, document in enumerate(ids[0].split(lengths)):
                columns = slice(0, len(document)) if side == "right" else slice(120 - len(document), 120)
                padded[row, columns], mask[row, columns] = document, 1
            states[backend, side] = model(padded, attention_mask=mask).last_hidden_state[mask.bool()]
    expected = states["eager", "packed"]
    for which, got in states.items():
        assert (got - expected).abs().max() <= 1e-5, which


@torch.no_grad()
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_no_state_is_left_by_a_long_batch(rope_type):
    """Transformers' dynamic update keeps grown frequencies; here a batch never depends on the one before."""
    model = small_model(rope_parameters=ROPE_TYPES[rope_type])
    short, long = torch.randint(1, 100, (1, 30)), torch.randint(1, 100, (1, 150))
    before = model(short).last_hidden_state
    model(long)
    assert torch.equal(model(short).last_hidden_state, before)


@torch.no_grad()
def test_lengths_beyond_the_trained_one_run_and_warn(caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.warning_once.cache_clear()
    model = small_model()
    long = torch.randint(1, 100, (1, 130))
    for length in (130, 70, 71):
        assert model(long[:, :length]).last_hidden_state.isfinite().all()
    warnings = [record.message for record in caplog.records if "YaRN" in record.message]
    assert len(warnings) == 1 and "64 tokens" in warnings[0] and '"rope_type": "yarn"' in warnings[0]
    caplog.clear()
    extended = small_model(rope_parameters={"rope_type": "yarn", "factor": 3.0})
    extended(long)
    assert not [record for record in caplog.records if "YaRN" in record.message]


def test_absolute_positions_end():
    model = small_model(rope=False)
    model(torch.ones(1, 64, dtype=torch.long))
    for kwargs in ({}, {"attention_mask": torch.tensor([[1] * 65 + [0]])}):
        length = 66 if kwargs else 65
        with pytest.raises(ValueError, match="65 tokens.*`max_position_embeddings` is 64"):
            model(torch.ones(1, length, dtype=torch.long), **kwargs)


def test_yarn_at_loading(tmp_path):
    """As users do it: no checkpoint is edited."""
    small_model().save_pretrained(tmp_path)
    model = NeoBERTModel.from_pretrained(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 2.0})
    expected = small_model(rope_parameters={"rope_type": "yarn", "factor": 2.0})
    ids = torch.randint(1, 100, (1, 100))
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, expected(ids).last_hidden_state)
    assert NeoBERTConfig.from_pretrained(tmp_path).rope_parameters["rope_type"] == "default"


def test_dynamic_scales_from_the_stored_length(tmp_path):
    """With another `max_length`, texts between the two would not be scaled."""
    small_model().save_pretrained(tmp_path)
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(
        ValueError, match="`max_length` is 128, but that of the stored model is 64.*leave `max_length` out"
    ):
        NeoBERTModel.from_pretrained(tmp_path, rope_parameters=dynamic, max_length=128)
    assert NeoBERTModel.from_pretrained(tmp_path, rope_parameters=dynamic, max_length=64).config.max_length == 64


@torch.no_grad()
def test_rope_that_is_set_on_a_model_is_completed_and_checked():
    ids = torch.randint(1, 100, (1, 60))
    yarn = {"rope_type": "yarn", "factor": 2.0}
    expected = small_model(rope_parameters=yarn)(ids).last_hidden_state
    for name in ("rope_parameters", "rope_scaling"):
        model = small_model()
        setattr(model.config, name, dict(yarn))
        assert torch.equal(model(ids).last_hidden_state, expected)
    model = small_model()
    model.config.rope_theta = 100.0
    with pytest.raises(ValueError, match="`rope_theta` is 100.0 and `rope_parameters.*two names of one setting"):
        model(ids)


def test_a_trace_would_keep_the_factors_of_its_length():
    model = small_model(rope_parameters=ROPE_TYPES["longrope"])
    with pytest.raises(ValueError, match="`torch.jit.trace` would fix the factors"):
        torch.jit.trace(model, torch.randint(1, 100, (1, 12)), strict=False)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_positions_of_masked_tokens_are_not_looked_up(backend):
    model = small_model(rope=False, attn_implementation=backend)
    ids, mask = ragged_batch()
    positions = (mask.cumsum(-1) - 1) * mask
    with torch.no_grad():
        expected, found = (
            model(ids, attention_mask=mask, position_ids=positions.masked_fill(mask == 0, masked)).last_hidden_state
            for masked in (0, 5_000)
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_types_that_look_at_the_longest_document_are_not_compiled_with_padding(rope_type):
    model = small_model(rope_parameters=ROPE_TYPES[rope_type], num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.randint(1, 100, (2, 80))
    with torch.no_grad():
        assert (compiled(ids).last_hidden_state - model(ids).last_hidden_state).abs().max() <= 1e-5
    with pytest.raises(Exception, match="depends on the longest document"):
        compiled(ids, attention_mask=torch.ones_like(ids))
