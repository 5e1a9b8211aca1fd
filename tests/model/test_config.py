"""The config: published file, aliases, strictness."""

import json

import pytest
import torch
from transformers import AutoConfig

from neobert_hf import NeoBERTConfig, NeoBERTModel


# ../shared/reference/README.md: the published config.json, in full.
PUBLISHED = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig",
        "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02,
    "decoder_init_range": 0.02,
    "dim_head": 64,
    "embedding_init_range": 0.02,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "kwargs": {
        "classifier_init_range": 0.02,
        "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
        "trust_remote_code": True,
    },
    "max_length": 4096,
    "model_type": "neobert",
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "pad_token_id": 0,
    "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32",
    "transformers_version": "4.48.2",
    "trust_remote_code": True,
    "vocab_size": 30522,
}


def test_published_config_is_the_default(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is NeoBERTConfig
    loaded, default = config.to_dict(), NeoBERTConfig().to_dict()
    differing = {key for key in loaded if loaded[key] != default.get(key)}
    assert differing == {"architectures", "auto_map", "dtype", "_name_or_path"}
    assert (config.max_position_embeddings, config.head_dim) == (4096, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_aliases_are_read_and_written():
    config = NeoBERTConfig(max_position_embeddings=8192, hidden_size=512, num_attention_heads=8, head_dim=64)
    assert config.max_length == config.max_position_embeddings == 8192
    assert config.dim_head == config.head_dim == 64
    config.max_position_embeddings = 100
    assert config.max_length == 100
    assert "max_position_embeddings" not in config.to_dict() and config.to_dict()["max_length"] == 100


def test_saving_and_loading_keeps_everything(tmp_path):
    changes = dict(
        hidden_size=96,
        num_attention_heads=6,
        intermediate_size=100,
        num_hidden_layers=3,
        hidden_act="GELU",
        rope=True,
        rms_norm=False,
        norm_eps=1e-6,
        dropout=0.1,
        max_length=77,
        pad_token_id=3,
        classifier_pooling="mean",
        sparse_prediction=True,
        tie_word_embeddings=True,
        num_labels=7,
        problem_type="multi_label_classification",
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16},
    )
    config = NeoBERTConfig(**changes)
    config.save_pretrained(tmp_path)
    again = NeoBERTConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.hidden_act == "gelu" and again.num_labels == 7
    assert again.rope_parameters["original_max_position_embeddings"] == 77
    # Every field of the architecture is written: the original code's own defaults differ (1,024 tokens, eps 1e-6).
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"max_length", "norm_eps", "dim_head", "vocab_size", "pad_token_id", "rope", "rms_norm"} <= set(written)


def test_overrides_at_loading_are_checked_and_completed(mlm_checkpoint):
    config = AutoConfig.from_pretrained(mlm_checkpoint, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    with pytest.raises(ValueError, match="dim_head"):
        NeoBERTConfig.from_pretrained(mlm_checkpoint, num_attention_heads=5)
    for load in (NeoBERTModel.from_pretrained, NeoBERTConfig.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match="no `dropuot` .did you mean `dropout`"):
            load(mlm_checkpoint, dropuot=0.1)
    with pytest.raises(TypeError, match="flash"):
        NeoBERTModel.from_pretrained(mlm_checkpoint, flash=True)
    # Arguments of others that pass through here: AutoTokenizer hands its own to AutoConfig.
    AutoConfig.from_pretrained(mlm_checkpoint, use_fast=True, model_max_length=10, padding_side="left", revision="main")
    assert NeoBERTModel.from_pretrained(mlm_checkpoint, dropout=0.1).config.dropout == 0.1


def test_theta_survives_other_overrides(tmp_path):
    NeoBERTConfig(rope_theta=50000.0).save_pretrained(tmp_path)
    yarn = {"rope_type": "yarn", "factor": 2.0}
    for kwargs in ({"rope_parameters": yarn}, {"rope_scaling": yarn}):
        loaded = NeoBERTConfig.from_pretrained(tmp_path, **kwargs).rope_parameters
        assert (loaded["rope_theta"], loaded["rope_type"]) == (50000.0, "yarn")
    loaded = NeoBERTConfig.from_pretrained(tmp_path, rope_theta=7.0, rope_parameters=yarn).rope_parameters
    assert (loaded["rope_theta"], loaded["factor"]) == (7.0, 2.0)
    assert NeoBERTConfig.from_pretrained(tmp_path, rope_theta=7.0).rope_parameters["rope_theta"] == 7.0
    assert yarn == {"rope_type": "yarn", "factor": 2.0}


def test_rope_parameters_set_later_are_completed():
    config = NeoBERTConfig(num_hidden_layers=1)
    config.rope_parameters = {"rope_type": "yarn", "factor": 2.0}
    states = NeoBERTModel(config)(torch.tensor([[5, 6]])).last_hidden_state
    expected = NeoBERTConfig(num_hidden_layers=1, rope_parameters={"rope_type": "yarn", "factor": 2.0})
    assert states.isfinite().all() and config.rope_parameters == expected.rope_parameters


def test_callers_dictionary_is_left_alone():
    parameters = {"rope_type": "linear", "factor": 2.0}
    NeoBERTConfig(rope_parameters=parameters)
    assert parameters == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dropuot": 0.1}, "no `dropuot` .did you mean `dropout`"),
        ({"flash_attention": True}, "no `flash_attention`"),
        ({"num_attention_heads": 5}, "`hidden_size` .768. must be `num_attention_heads` .5."),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0"),
        ({"dim_head": 32}, "`dim_head` .32."),
        ({"hidden_size": 36, "num_attention_heads": 12}, "RoPE rotates pairs"),
        ({"hidden_act": "relu"}, "'swiglu' or 'gelu'"),
        ({"dropout": 1.5}, r"`dropout` is 1.5, it must be in \[0, 1\)"),
        ({"pad_token_id": 40000}, "`pad_token_id` is 40000"),
        ({"classifier_pooling": "max"}, "classifier_pooling"),
        ({"hidden_size": "768"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'default', 'linear', 'dynamic', 'yarn', 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "lacks .'factor'."),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "at least 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "betafast": 3}}, "does not know .'betafast'."),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta.* positive"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 entries"),
        ({"rope": False, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "no effect with `rope=False`"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(Exception, match=message) as error:
        NeoBERTConfig(**changes)
    assert isinstance(error.value, ValueError) or "StrictDataclass" in type(error.value).__name__


def test_values_set_later_are_checked_when_the_model_is_built():
    config = NeoBERTConfig()
    config.num_attention_heads = 7
    with pytest.raises(ValueError, match="num_attention_heads"):
        NeoBERTModel(config)


def test_keys_of_transformers_and_its_companions_pass(tmp_path):
    extra = {"sentence_transformers": {"version": "6"}, "sep_token_id": 102, "use_cache": False, "prefix": None}
    NeoBERTConfig(**extra).save_pretrained(tmp_path)
    assert NeoBERTConfig.from_pretrained(tmp_path).sep_token_id == 102
