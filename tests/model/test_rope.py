"""Promise 2: every RoPE type of Transformers, YaRN first, in every layout; a stretched length is kept by files."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, pipeline
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from tests.helpers.models import batch_of, small_model
from tests.helpers.plain_neobert import plain_documents, plain_hidden_states
from tests.helpers.small_tokenizer import tiny_tokenizer


FACTORS = [1.0 + i / 8 for i in range(16)]
YARN = {"rope_type": "yarn", "factor": 4.0}
ROPE_TYPES = {
    "yarn": YARN,
    "yarn_of_two_scales": {**YARN, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
TRAINED = 64


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
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_types_in_every_layout(kind, backend):
    """`dynamic` and `longrope` look at the longest text: of this batch, without its padding, and not of the last."""
    model = small_model(attn_implementation=backend, rope_parameters=ROPE_TYPES[kind])
    for lengths in ((90, 20, 50), (40, 30), (90, 20, 50)):
        rope = rope_of_transformers(ROPE_TYPES[kind], max(lengths))
        for layout in ("dense", "position_ids", "right", "left"):
            ids, kwargs, documents = batch_of(layout, lengths)
            expected = plain_documents(model.state_dict(), model.config, ids, documents, rope)
            if "attention_mask" in kwargs:
                ids, kwargs = F.pad(ids, (0, 30)), {"attention_mask": F.pad(kwargs["attention_mask"], (0, 30))}
            found = model(ids, **kwargs).last_hidden_state
            found = torch.cat([found[row, columns] for row, columns in documents])
            assert (found - expected).abs().max() <= 2e-5, (lengths, layout)


@torch.no_grad()
def test_yarn_as_in_its_paper():
    model = small_model(rope_parameters=YARN)
    ids = torch.randint(1, 100, (200,))
    expected = plain_hidden_states(model.state_dict(), model.config, ids, rope=yarn_of_the_paper(4.0))
    assert (model(ids[None]).last_hidden_state[0] - expected).abs().max() <= 2e-5
    assert (small_model()(ids[None]).last_hidden_state[0] - expected).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions_are_rotated_in_float32(dtype):
    """Shifting all positions leaves relative ones: in bfloat16, positions 4,000 and 4,001 would be one."""
    model = small_model(max_length=4096, embedding_init_range=0.5).to(dtype)
    ids, positions = torch.randint(1, 100, (1, 20)), torch.arange(20)[None]
    near, far = (model(ids, position_ids=positions + first).last_hidden_state.float() for first in (0, 4000))
    assert torch.cosine_similarity(near, far, dim=-1).min() > 0.999
    assert dtype != torch.float32 or (near - far).abs().max() < 1e-2


def lengths_of(config) -> tuple[int, int, float]:
    rope = config.rope_parameters
    return config.max_length, rope["original_max_position_embeddings"], rope["rope_theta"]


@pytest.mark.parametrize("load", ["model", "config", "constructor", "rope_scaling"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "longrope", "llama3"])
@pytest.mark.parametrize("form", ["short", "as other models' cards have it"])
def test_a_new_rope_stretches_the_trained_length_once(form, kind, load, tmp_path):
    small_model(rope_theta=50000.0).save_pretrained(tmp_path / "trained")
    given = ROPE_TYPES[kind] | ({} if form == "short" else {"original_max_position_embeddings": TRAINED})
    rope, folder = dict(given), tmp_path / "trained"
    if load == "model":
        config = NeoBERTModel.from_pretrained(folder, rope_parameters=rope).config
    elif load == "config":
        config = AutoConfig.from_pretrained(folder, rope_parameters=rope)
    elif load == "constructor":
        config = NeoBERTConfig(max_length=64, rope_parameters={**rope, "rope_theta": 50000.0})
    else:
        config = NeoBERTConfig(max_length=64, rope_theta=50000.0, rope_scaling=rope)
    assert lengths_of(config) == (256, 64, 50000.0)
    assert rope == given, "the caller's dictionary is left alone"
    for number in range(2):
        config.save_pretrained(tmp_path / f"{number}")
        config = AutoConfig.from_pretrained(tmp_path / f"{number}")
        assert lengths_of(config) == (256, 64, 50000.0) and config.rope_parameters["rope_type"] == kind


def test_a_second_override_starts_from_the_trained_length(tmp_path):
    small_model().save_pretrained(tmp_path / "trained")
    NeoBERTModel.from_pretrained(tmp_path / "trained", rope_parameters=YARN).save_pretrained(tmp_path / "four")
    again = NeoBERTModel.from_pretrained(tmp_path / "four", rope_parameters={**YARN, "factor": 2.0}).config
    assert lengths_of(again) == (128, 64, 10000.0) and again.rope_parameters["factor"] == 2.0
    # Of `dynamic`, the length of training is where it begins to grow.
    dynamic = ROPE_TYPES["dynamic"]
    assert NeoBERTConfig.from_pretrained(tmp_path / "trained", rope_parameters=dynamic).max_length == 64


def test_pipelines_and_sentence_transformers_read_all_of_it(tmp_path):
    """A model of 64 tokens, loaded with YaRN of factor 4 and saved with its tokenizer, as the documentation says."""
    from sentence_transformers import SentenceTransformer  # Some of its versions need `datasets`.

    trained, long, text = str(tmp_path / "trained"), str(tmp_path / "long"), " ".join(["dog"] * 300)
    small_model(NeoBERTForMaskedLM).save_pretrained(trained)
    tiny_tokenizer().save_pretrained(trained)
    model = NeoBERTForMaskedLM.from_pretrained(trained, rope_parameters=YARN)
    model.save_pretrained(long)
    AutoTokenizer.from_pretrained(trained, model_max_length=model.config.max_length).save_pretrained(long)
    features = torch.tensor(pipeline("feature-extraction", long)(text, truncation=True)[0])
    assert len(features) == 256
    embedding = SentenceTransformer(long, device="cpu").encode(text)
    torch.testing.assert_close(torch.tensor(embedding), features.mean(0), rtol=0, atol=1e-5)
