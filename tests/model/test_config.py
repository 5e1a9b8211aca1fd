"""Promises 1 and 5: the published config is read, all options are saved, a misspelt one is an error that names it."""

import json

import pytest
from transformers import AutoConfig

from neobert_hf import NeoBERTConfig, NeoBERTModel
from tests.helpers.models import ROOT, small_config


def test_the_published_config_is_the_default():
    config = AutoConfig.from_pretrained(ROOT / "tests" / "data" / "published_config.json")
    assert type(config) is NeoBERTConfig
    loaded, default = config.to_dict(), NeoBERTConfig().to_dict()
    differing = {key for key in loaded if loaded[key] != default.get(key)}
    assert differing <= {"architectures", "dtype", "_name_or_path"}
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
    changes = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 100, "num_hidden_layers": 3}
    changes |= {"hidden_act": "gelu", "rms_norm": False, "norm_eps": 1e-6, "dropout": 0.1, "pad_token_id": 3}
    changes |= {"classifier_pooling": "mean", "sparse_prediction": True, "unpad": False, "tie_word_embeddings": True}
    changes |= {"num_labels": 7, "problem_type": "multi_label_classification"}
    config = NeoBERTConfig(**changes, rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16})
    config.save_pretrained(tmp_path)
    again = NeoBERTConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert {name: getattr(again, name) for name in changes} == changes
    # Every field of the architecture is written: the original code's own defaults differ (1,024 tokens, eps 1e-6).
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"max_length", "norm_eps", "dim_head", "vocab_size", "pad_token_id", "rope", "rms_norm"} <= set(written)


MISSPELT = ["dropuot", "max_lenght", "max_position_embedding", "rope_parameter", "classifier_poolng", "unpadd"]


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_options(name, mlm_checkpoint):
    with pytest.raises(ValueError, match=f"`{name}`"):
        NeoBERTConfig(**{name: 1})
    for load in (NeoBERTModel.from_pretrained, NeoBERTConfig.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=f"`{name}`"):
            load(mlm_checkpoint, **{name: 1})
    stored = json.loads((mlm_checkpoint / "config.json").read_text())
    (mlm_checkpoint / "config.json").write_text(json.dumps(stored | {name: 1}))
    with pytest.raises(ValueError, match=f"`{name}`"):
        NeoBERTModel.from_pretrained(mlm_checkpoint)


def test_heads_that_do_not_fit_the_width(mlm_checkpoint):
    for make in (NeoBERTConfig, lambda **changes: NeoBERTConfig.from_pretrained(mlm_checkpoint, **changes)):
        for changes in ({"num_attention_heads": 5}, {"dim_head": 16}):
            with pytest.raises(ValueError, match="`hidden_size`"):
                make(**changes)


def test_unknown_keys_are_kept_and_saved(tmp_path):
    """A user's, a tool's, or another model's: none is taken for a misspelt one, none is lost."""
    notes = {"run": {"name": "a", "steps": 10}, "transformers.js_config": {"dtype": "q8"}, "_own": 1, "num_labels": 3}
    # Of BERT, of Transformers 4, and the argument that AutoTokenizer hands to AutoConfig.
    notes |= {"hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "sep_token_id": 102}
    notes |= {"cls_token_id": 101, "is_decoder": False, "pruned_heads": {}, "model_max_length": 10}
    small_config(**notes).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in notes} == notes
