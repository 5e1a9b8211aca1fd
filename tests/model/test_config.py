"""Promises 1 and 5: the published config is read, all options are saved, a misspelt one is an error that names it."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from neobert_hf import NeoBERTConfig, NeoBERTModel
from tests.helpers.models import ROOT, small_config
from tests.helpers.small_tokenizer import tiny_tokenizer


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


MISSPELT = ["dropuot", "num_hidden_layer", "max_lenght", "max_position_embedding", "rms_nrom", "hidden_sizes"]
MISSPELT += ["rope_parameter", "sparse_predictions", "classifier_poolng", "intermediate_sise", "unpadd"]


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


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"dim_head": 16}, "dim_head"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"classifier_pooling": "max"}, "classifier_pooling"),
        ({"hidden_size": "768"}, "hidden_size"),
    ],
)
def test_values_that_do_not_fit(changes, name, mlm_checkpoint):
    for make in (NeoBERTConfig, lambda **changes: NeoBERTConfig.from_pretrained(mlm_checkpoint, **changes)):
        with pytest.raises(Exception, match=f"`?{name}`?") as error:
            make(**changes)
        assert isinstance(error.value, ValueError) or "StrictDataclass" in type(error.value).__name__


def test_options_at_loading(mlm_checkpoint):
    model = NeoBERTModel.from_pretrained(mlm_checkpoint, dropout=0.1, unpad=False)
    assert (model.config.dropout, model.config.unpad) == (0.1, False)
    # AutoTokenizer hands its own arguments to AutoConfig.
    tiny_tokenizer().save_pretrained(mlm_checkpoint)
    assert AutoTokenizer.from_pretrained(mlm_checkpoint, use_fast=True, model_max_length=10).model_max_length == 10


def test_unknown_keys_are_kept_and_saved(tmp_path):
    """A user's, a tool's, or a newer Transformers': none makes a checkpoint unloadable, none is lost."""
    notes = {"run": {"name": "a", "steps": 10}, "flash_attention": True, "hidden_dropout_prob": 0.1, "_own": 1}
    notes |= {"sentence_transformers": {"version": "6"}, "transformers.js_config": {"dtype": "q8"}}
    notes |= {"sep_token_id": 102, "label_smoothing": 0.1, "num_labels": 3, "task_specific_params": None}
    small_config(**notes).save_pretrained(tmp_path / "first")
    AutoConfig.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    loaded = AutoConfig.from_pretrained(tmp_path / "second")
    assert {name: getattr(loaded, name) for name in notes} == notes


def test_no_name_of_transformers_is_taken_for_a_misspelt_one():
    names = {name for name in vars(PreTrainedConfig()) if not name.startswith("_")} | set(GenerationConfig().to_dict())
    # Of Transformers 4, whose checkpoints are read by this class as well, and of BERT, which people convert from.
    names |= {"cls_token_id", "finetuning_task", "is_decoder", "pruned_heads", "sep_token_id", "tokenizer_class"}
    names |= {"attention_probs_dropout_prob", "hidden_dropout_prob", "layer_norm_eps", "type_vocab_size"}
    for name in names - {"_name_or_path", "rope_parameters", "dtype", "model_type", "transformers_version", "auto_map"}:
        try:
            NeoBERTConfig(**{name: None})
        except Exception as error:
            assert "did you mean" not in str(error), name
