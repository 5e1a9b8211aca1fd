"""Promises 2 and 6: a RoPE that stretches the trained length is kept by files, and reaches whoever uses the model."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoTokenizer, pipeline

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import tiny_tokenizer


YARN = {"rope_type": "yarn", "factor": 4.0}
STRETCHED = {
    "yarn": YARN,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def lengths_of(config) -> tuple[int, int, float]:
    rope = config.rope_parameters
    return config.max_length, rope["original_max_position_embeddings"], rope["rope_theta"]


@pytest.mark.parametrize("load", ["from_pretrained", "auto", "config", "rope_scaling", "constructor"])
@pytest.mark.parametrize("kind", STRETCHED)
def test_a_new_rope_stretches_the_trained_length_once(kind, load, tmp_path):
    small_model(rope_theta=50000.0).save_pretrained(tmp_path / "trained")
    rope, folder = dict(STRETCHED[kind]), tmp_path / "trained"
    if load == "constructor":
        config = NeoBERTConfig(max_length=64, rope_parameters={**rope, "rope_theta": 50000.0})
    elif load == "rope_scaling":
        config = NeoBERTConfig(max_length=64, rope_theta=50000.0, rope_scaling=rope)
    elif load == "config":
        config = AutoConfig.from_pretrained(folder, rope_parameters=rope)
    else:
        config = (AutoModel if load == "auto" else NeoBERTModel).from_pretrained(folder, rope_parameters=rope).config
    assert lengths_of(config) == (256, 64, 50000.0)
    assert rope == STRETCHED[kind], "the caller's dictionary is left alone"
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
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert NeoBERTConfig.from_pretrained(tmp_path / "trained", rope_parameters=dynamic).max_length == 64


def text_of(words: int, last: str = "cat") -> str:
    return " ".join(["dog"] * (words - 1) + [last])


def test_pipelines_and_sentence_transformers_read_all_of_it(tmp_path):
    """A model of 256 tokens, loaded with YaRN of factor 4 and saved with its tokenizer, as the documentation says."""
    trained, long = str(tmp_path / "trained"), str(tmp_path / "long")
    small_model(NeoBERTForMaskedLM, max_length=256).save_pretrained(trained)
    tiny_tokenizer().save_pretrained(trained)
    model = NeoBERTForMaskedLM.from_pretrained(trained, rope_parameters=YARN)
    model.save_pretrained(long)
    AutoTokenizer.from_pretrained(trained, model_max_length=model.config.max_length).save_pretrained(long)
    extract = pipeline("feature-extraction", long)
    assert [len(extract(text_of(words), truncation=True)[0]) for words in (1022, 2000)] == [1024, 1024]

    encoder = SentenceTransformer(long, device="cpu")
    assert encoder.max_seq_length == 1024 == encoder.preprocess([text_of(1022)])["input_ids"].shape[1]
    first, second = (torch.tensor(encoder.encode(text_of(1022, last))) for last in ("cat", "mat"))
    assert (first - second).abs().max() > 1e-6
