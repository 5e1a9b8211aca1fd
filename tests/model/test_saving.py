"""What was saved loads; what would not load is refused before anything is written."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)
from neobert_hf.modeling_neobert import NeoBERTPreTrainedModel
from tests.helpers.models import small_config, small_model
from tests.helpers.properties import any_number, reproducible


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_refused(save, folder: Path, message: str) -> None:
    """Neither is a folder made, nor one changed."""
    before = contents(folder)
    for target in (folder, folder / "new"):
        with pytest.raises(ValueError, match=message):
            save(target)
    assert contents(folder) == before and not (folder / "new").exists()


def setting(**values):
    def change(config: NeoBERTConfig) -> None:
        for name, value in values.items():
            setattr(config, name, value)

    return change


# Each for a finished config, and what the error says; None where the config is as good as before.
CONFIGS = {
    "misspelt": (setting(dropuot=0.5), "`dropuot` .did you mean `dropout`"),
    "misspelt rope": (setting(rope_thetaa=5e5), "`rope_thetaa` .did you mean `rope_theta`"),
    "heads": (setting(num_attention_heads=3), "`hidden_size` .64. must be `num_attention_heads` .3."),
    "range": (setting(norm_eps=float("nan")), "`norm_eps` is nan"),
    "padding": (setting(pad_token_id=100), "`pad_token_id` is 100"),
    "rope key": (setting(rope_parameters={"rope_type": "yarn"}), "lacks .'factor'."),
    "two names": (setting(rope_theta=5e5), "`rope_theta` is 500000.0 and"),
    "layers of their own": (setting(per_layer_config={"0": {"dropout": 0.1}}), "all layers of NeoBERT are alike"),
    "decoder": (setting(is_decoder=True), "`is_decoder` is True"),
    "note": (setting(run={"name": "a", "steps": 10}), None),
    "dropout": (setting(dropout=0.5), None),
    "labels": (setting(id2label={0: "no", 1: "yes", 2: "perhaps"}), None),
    "yarn": (setting(rope_parameters={"rope_type": "yarn", "factor": 2.0}), None),
    "longer": (setting(max_position_embeddings=128), None),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_are_refused_at_save_where_loading_refuses_them(kind, tmp_path):
    change, message = CONFIGS[kind]
    small_config().save_pretrained(tmp_path)
    config = small_config()
    change(config)
    if message is None:
        config.save_pretrained(tmp_path)
        loaded = AutoConfig.from_pretrained(tmp_path).to_diff_dict()
        assert json.loads(json.dumps(loaded)) == json.loads(json.dumps(config.to_diff_dict()))
        return
    assert_refused(config.save_pretrained, tmp_path, message)
    (tmp_path / "config.json").write_text(config.to_json_string())
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


# Transformers itself cannot even print a config whose dtype is none.
NAMES = [field.name for field in fields(NeoBERTConfig) if field.name != "dtype" and not field.name.startswith("_")]
NAMES += ["dropuot", "rope_theta", "max_positon_embeddings", "num_labels", "head_dim", "run"]


@reproducible(200)
@given(st.sampled_from(NAMES), any_number)
def test_any_value_of_any_setting_is_refused_at_save_or_loads(name, value):
    config = small_config()
    try:
        setattr(config, name, value)
    except (StrictDataclassError, TypeError, ValueError, OverflowError):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        try:
            config.save_pretrained(folder)
        except ValueError:
            assert not list(Path(folder).iterdir())
            file.write_text(config.to_json_string())
            with pytest.raises(ValueError):
                AutoConfig.from_pretrained(folder)
        else:
            assert AutoConfig.from_pretrained(folder).to_json_string() == config.to_json_string()


def of_config(**values):
    return lambda model: setting(**values)(model.config)


def fill(name: str, value: float):
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(name)[0] = value

    return change


def give(name: str, value):
    return lambda model: model.set_submodule(name, value())


def built(cls: type, **changes):
    return lambda: small_model(cls, **changes)


MLM, CLASSIFIER = built(NeoBERTForMaskedLM), built(NeoBERTForSequenceClassification, num_labels=3)
QKV = "model.transformer_encoder.1.qkv.weight"
# The model, what is done to it, and what the error says; None where the model is as good as before.
MODELS = {
    "more layers": (MLM, of_config(num_hidden_layers=3), "transformer_encoder.2.wo.weight is missing"),
    "fewer layers": (MLM, of_config(num_hidden_layers=1), "transformer_encoder.1.wo.weight is unknown"),
    "vocabulary": (MLM, of_config(vocab_size=90), r"encoder.weight is \(100, 64\), not \(90, 64\)"),
    "width": (MLM, of_config(hidden_size=32, dim_head=8), r"layer_norm.weight is \(64,\), not \(32,\)"),
    "other MLP": (MLM, of_config(hidden_act="gelu"), "ffn.0.weight is missing.*ffn.w12.weight is unknown"),
    "positions": (MLM, of_config(rope=False), "positional_embedding.weight is missing"),
    "labels": (CLASSIFIER, of_config(num_labels=4), r"classifier.weight is \(3, 64\), not \(4, 64\)"),
    "head": (
        CLASSIFIER,
        give("classifier", lambda: nn.Linear(64, 5)),
        r"classifier.weight is \(5, 64\), not \(3, 64\)",
    ),
    "addition": (MLM, lambda model: model.add_module("extra", nn.Linear(2, 2)), "extra.weight is unknown"),
    "misspelt": (MLM, of_config(dropuot=0.5), "`dropuot` .did you mean `dropout`"),
    "NaN": (MLM, fill(QKV, float("nan")), f"The tensor {QKV} is not finite"),
    "infinite": (MLM, fill("decoder.bias", float("inf")), "The tensor decoder.bias is not finite"),
    "zeros": (MLM, lambda model: nn.init.zeros_(model.get_parameter(QKV)), f"The tensor {QKV} is all zero"),
    "note": (MLM, of_config(run="a"), None),
    "resized": (MLM, lambda model: model.resize_token_embeddings(108, mean_resizing=False), None),
    "tied": (built(NeoBERTForMaskedLM, tie_word_embeddings=True), lambda model: None, None),
    "tied, resized": (
        built(NeoBERTForMaskedLM, tie_word_embeddings=True),
        lambda model: model.resize_token_embeddings(120, mean_resizing=False),
        None,
    ),
    "new head": (CLASSIFIER, lambda model: give("classifier", lambda: nn.Linear(64, 3))(model), None),
    "learned positions": (built(NeoBERTModel, rope=False, hidden_act="gelu", rms_norm=False), of_config(run="a"), None),
    "no layers": (built(NeoBERTModel, num_hidden_layers=0), lambda model: None, None),
    "bfloat16": (CLASSIFIER, lambda model: model.to(torch.bfloat16), None),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_are_refused_at_save_where_loading_refuses_them(kind, tmp_path):
    build, change, message = MODELS[kind]
    build().save_pretrained(tmp_path)
    model = build()
    change(model)
    if message is None:
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        saved = model.state_dict()
        assert loaded.state_dict().keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
        return
    assert_refused(model.save_pretrained, tmp_path, message)
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)):
        type(model).from_pretrained(tmp_path)


def test_saving_draws_no_random_numbers_and_changes_no_model(tmp_path):
    """A model that is built for its shapes must not change the training that goes on behind the checkpoint."""
    model = small_model(NeoBERTForMaskedLM)
    before, state = json.dumps(model.config.to_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="dropuot"):
        setting(dropuot=1)(model.config)
        model.save_pretrained(tmp_path)
    del model.config.dropuot
    assert json.dumps(model.config.to_dict()) == before
    model.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_part_of_the_tensors_is_the_callers_choice(tmp_path):
    model = small_model(NeoBERTForMaskedLM)
    part = {name: tensor for name, tensor in model.state_dict().items() if "decoder" not in name}
    model.save_pretrained(tmp_path, state_dict=dict(part))  # Transformers empties it.
    assert NeoBERTModel.from_pretrained(tmp_path)
    part["model.encoder.weight"] = part["model.encoder.weight"][:50]
    assert_refused(lambda folder: model.save_pretrained(folder, state_dict=part), tmp_path, "is .50, 64., not .100, 64")


class ScoredModel(NeoBERTPreTrainedModel):
    """A user's own head, whose size is no part of the config."""

    def __init__(self, config: NeoBERTConfig, scores: int = 1):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.head = nn.Linear(config.hidden_size, scores)
        self.post_init()


def test_a_class_with_further_arguments_saves_and_loads(tmp_path):
    model = ScoredModel(small_config(), 5)
    model.save_pretrained(tmp_path)
    assert torch.equal(ScoredModel.from_pretrained(tmp_path, 5).head.weight, model.head.weight)


class OwnSizes(NeoBERTForMaskedLM):
    """It makes its config itself."""

    def __init__(self):
        super().__init__(small_config())


def test_a_class_that_makes_its_own_config_saves(tmp_path):
    OwnSizes().save_pretrained(tmp_path)
    assert NeoBERTForMaskedLM.from_pretrained(tmp_path).config.hidden_size == small_config().hidden_size


def test_weights_that_another_library_stores_in_parts_are_saved(tmp_path):
    model = small_model()
    tensors = model.state_dict()
    weight = tensors.pop("transformer_encoder.0.qkv.weight")
    parts = {
        "transformer_encoder.0.qkv.weight._data": weight.char(),
        "transformer_encoder.0.qkv.input_scale": weight[0],
    }
    model.save_pretrained(tmp_path, state_dict=tensors | parts)
    assert "transformer_encoder.0.qkv.weight._data" in load_file(tmp_path / "model.safetensors")
