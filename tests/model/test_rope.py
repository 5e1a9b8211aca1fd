"""Promise 2: every RoPE type of Transformers, YaRN first, in every layout; no batch depends on the one before."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.helpers.models import positions_of, small_model
from tests.helpers.plain_neobert import plain_hidden_states


FACTORS = [1.0 + i / 8 for i in range(16)]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_TYPES = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn_of_two_scales": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
    "llama3": {"rope_type": "llama3", "factor": 4.0, **LLAMA3},
}
TRAINED = 64
LENGTHS = (90, 20, 50)


def rope_of_transformers(rope: dict, longest: int) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of a model of Transformers with heads of 32 that was trained with 64 tokens."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_theta": 10000.0, "original_max_position_embeddings": TRAINED, **rope},
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=longest)


def yarn_of_the_paper(factor: float) -> tuple[torch.Tensor, float]:
    """arXiv 2309.00071, equations 17 to 23: short wavelengths stay, long ones are stretched, a ramp between."""
    theta = 10000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    first, last = (32 * math.log(TRAINED / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 31)
    kept = 1 - ((torch.arange(16) - first) / (last - first)).clamp(0, 1)
    return theta / factor * (1 - kept) + theta * kept, 0.1 * math.log(factor) + 1


@torch.no_grad()
@pytest.mark.parametrize("kind", ROPE_TYPES)
@pytest.mark.parametrize("lengths", [LENGTHS, (40, 30)], ids=["long", "short"])
def test_types_in_every_layout(kind, lengths):
    """`dynamic` and `longrope` look at the longest text: padding and packing must not change what that is."""
    model = small_model(rope_parameters=ROPE_TYPES[kind])
    rope = rope_of_transformers(ROPE_TYPES[kind], max(lengths))
    ids = torch.randint(1, 100, (1, sum(lengths)))
    documents = ids[0].split(lengths)
    expected = [plain_hidden_states(model.state_dict(), model.config, text, rope=rope) for text in documents]
    assert (model(documents[0][None]).last_hidden_state[0] - expected[0]).abs().max() <= 2e-5
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        packed = model(ids, position_ids=positions_of(lengths)).last_hidden_state[0]
        assert (packed - torch.cat(expected)).abs().max() <= 2e-5
        for side in ("right", "left"):
            padded, mask = torch.zeros(2, len(lengths), 120, dtype=torch.long)
            for row, text in enumerate(documents):
                columns = slice(0, len(text)) if side == "right" else slice(120 - len(text), 120)
                padded[row, columns], mask[row, columns] = text, 1
            found = model(padded, attention_mask=mask).last_hidden_state[mask.bool()]
            assert (found - torch.cat(expected)).abs().max() <= 2e-5, (backend, side)


@torch.no_grad()
def test_yarn_as_in_its_paper():
    model = small_model(rope_parameters=ROPE_TYPES["yarn"])
    ids = torch.randint(1, 100, (200,))
    expected = plain_hidden_states(model.state_dict(), model.config, ids, rope=yarn_of_the_paper(4.0))
    assert (model(ids[None]).last_hidden_state[0] - expected).abs().max() <= 2e-5
    assert (small_model()(ids[None]).last_hidden_state[0] - expected).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_no_state_is_left_by_a_long_batch(kind):
    """Transformers' dynamic update keeps grown frequencies."""
    model = small_model(rope_parameters=ROPE_TYPES[kind])
    short, long = torch.randint(1, 100, (1, 30)), torch.randint(1, 100, (1, 150))
    before = model(short).last_hidden_state
    model(long)
    assert torch.equal(model(short).last_hidden_state, before)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions_are_rotated_in_float32(dtype):
    """Shifting all positions leaves relative ones: in bfloat16, positions 4,000 and 4,001 would be one."""
    model = small_model(max_length=4096, embedding_init_range=0.5).to(dtype)
    ids, positions = torch.randint(1, 100, (1, 20)), torch.arange(20)[None]
    near, far = (model(ids, position_ids=positions + first).last_hidden_state.float() for first in (0, 4000))
    assert torch.cosine_similarity(near, far, dim=-1).min() > 0.999
    assert dtype != torch.float32 or (near - far).abs().max() < 1e-2
