"""`neobert-hf convert`: from the original's files and back, bit by bit."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.cli import main
from neobert_hf.hub.convert import ConvertSettings
from neobert_hf.hub.convert import convert as convert_checkpoint
from tests.helpers.models import small_config, small_model
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.fixture
def weights():
    """Of a masked LM; without biases of zero, so that an exchange of two tensors shows."""
    model = small_model(NeoBERTForMaskedLM)
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


@pytest.fixture
def config(tmp_path) -> str:
    small_config(architectures=["NeoBERTLMHead"]).save_pretrained(tmp_path / "config")
    return str(tmp_path / "config")


def convert(source, output, **options):
    return convert_checkpoint(ConvertSettings(str(source), str(output), **options))


def same_bytes(left, right) -> bool:
    """The same names, dtypes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].contiguous().view(torch.uint8).equal(right[name].contiguous().view(torch.uint8))
        for name in left
    )


@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_there_and_back(prefix, dtype, weights, config, tmp_path):
    """`prefix`: the original saves the model as DDP and `torch.compile` have wrapped it."""
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    (tmp_path / "step").mkdir()
    torch.save({prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "step" / "state_dict.pt")
    convert(tmp_path / "step", tmp_path / "here", config=config)
    assert same_bytes(load_file(tmp_path / "here" / "model.safetensors"), weights)
    convert(tmp_path / "here", tmp_path / "back", to="state_dict")
    assert same_bytes(torch.load(tmp_path / "back" / "state_dict.pt", weights_only=True), weights)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == str(dtype)[6:]


# The keys of the published model's config.json.
PUBLISHED_KEYS = (
    "architectures auto_map classifier_init_range decoder_init_range dim_head embedding_init_range hidden_size "
    "intermediate_size max_length model_type norm_eps num_attention_heads num_hidden_layers pad_token_id torch_dtype "
    "transformers_version vocab_size"
).split()


@pytest.mark.parametrize("cls", [NeoBERTModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_what_is_saved_here_has_the_original_layout(cls, tmp_path):
    small_model(cls).save_pretrained(tmp_path / "here")
    convert(tmp_path / "here", tmp_path / "original", to="original")
    assert same_bytes(*(load_file(tmp_path / name / "model.safetensors") for name in ("here", "original")))
    values = json.loads((tmp_path / "original" / "config.json").read_text())
    assert set(PUBLISHED_KEYS) <= set(values)
    assert not {"rope_parameters", "classifier_pooling", "sparse_prediction", "unpad", "dtype"} & set(values)
    assert values["auto_map"]["AutoModelForMaskedLM"] == "model.NeoBERTLMHead"
    name = {NeoBERTModel: "NeoBERT", NeoBERTForMaskedLM: "NeoBERTLMHead"}.get(cls, "NeoBERTForSequenceClassification")
    assert values["architectures"] == [name]


@pytest.mark.parametrize("variant", ["published", "layernorm_abs"])
@pytest.mark.parametrize("part", ["", "sequence_classification"])
def test_recorded_checkpoints_there_and_back(variant, part, shared, tmp_path):
    source = shared / "reference" / variant / part
    convert(source, tmp_path / "here")
    convert(tmp_path / "here", tmp_path / "back", to="original")
    original = load_file(source / "model.safetensors")
    assert same_bytes(load_file(tmp_path / "here" / "model.safetensors"), original)
    assert same_bytes(load_file(tmp_path / "back" / "model.safetensors"), original)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    # Notes of the training script, which describe nothing.
    for key in set(before) - {"kwargs", "trust_remote_code", "pretrained_model_name_or_path", "transformers_version"}:
        assert after[key] == before[key], key


def test_tokenizer_and_shards(tmp_path):
    model = small_model(NeoBERTForMaskedLM, vocab_size=200)
    small_tokenizer(200).save_pretrained(tmp_path / "tokenizer")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    convert(tmp_path / "shards", tmp_path / "here", tokenizer=str(tmp_path / "tokenizer"))
    assert same_bytes(load_file(tmp_path / "here" / "model.safetensors"), dict(model.state_dict()))
    assert (tmp_path / "here" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer/tokenizer.json").read_bytes()
    convert(tmp_path / "here", tmp_path / "back", to="original")
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_a_stored_rotary_table_is_left_out(weights, config, tmp_path):
    """It follows from the config. Some versions of the original's code store it."""
    save_file(weights | {"model.freqs_cis": torch.ones(64, 16, 2)}, tmp_path / "with.safetensors")
    convert(tmp_path / "with.safetensors", tmp_path / "here", config=config)
    assert same_bytes(load_file(tmp_path / "here" / "model.safetensors"), weights)


def test_a_tied_state_dict(tmp_path):
    """Its two names share their memory."""
    model = small_model(NeoBERTForMaskedLM, tie_word_embeddings=True)
    model.config.architectures = ["NeoBERTForMaskedLM"]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "state_dict.pt")
    convert(tmp_path, tmp_path / "here")
    here = NeoBERTForMaskedLM.from_pretrained(tmp_path / "here")
    assert same_bytes(here.state_dict(), model.state_dict()) and here.decoder.weight is here.model.encoder.weight


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_no_code_in_a_pickle_is_run(weights, config, tmp_path):
    torch.save(weights | {"decoder.bias": Malicious(tmp_path / "executed")}, tmp_path / "state_dict.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        convert(tmp_path / "state_dict.pt", tmp_path / "out", config=config)
    assert not (tmp_path / "executed").exists() and not list(tmp_path.glob("out*"))


QKV = "model.transformer_encoder.1.qkv.weight"
# What is wrong with the tensors, and the name that is said.
TENSOR_DAMAGES = {
    "missing": (lambda t: t.pop(QKV), QKV),
    "unknown": (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "model.extra.weight"),
    "shape": (lambda t: t.update({QKV: t[QKV][:, :32].clone()}), QKV),
    "dtype": (lambda t: t.update({QKV: t[QKV].half()}), "torch.float16"),
    "no decoder": (lambda t: [t.pop(f"decoder.{name}") for name in ("weight", "bias")], "decoder.bias"),
    "another head": (lambda t: t.update({"classifier.weight": torch.ones(2, 64)}), "classifier.weight"),
}


@pytest.mark.parametrize("damage", TENSOR_DAMAGES)
def test_damaged_tensors_are_errors_that_name_them(damage, weights, config, tmp_path):
    change, message = TENSOR_DAMAGES[damage]
    change(weights)
    torch.save(weights, tmp_path / "state_dict.pt")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "state_dict.pt", tmp_path / "out", config=config)
    assert not list(tmp_path.glob("out*"))


# The command line, and the name that its error says. MODEL is a checkpoint.
BAD_INPUT = {
    "an output that exists": ("MODEL tokenizer", "tokenizer"),
    "no source": ("nowhere out", "nowhere"),
    "no config": ("state_dict.pt out", "config.json"),
    "another model": ("MODEL out --config bert.json", "'bert'"),
    "no class": ("state_dict.pt out --config classless.json", "architectures"),
    "a misspelt key": ("MODEL out --config misspelt.json", "hiden_size"),
    "another tokenizer": ("MODEL out --tokenizer tokenizer", "tokenizer"),
    "a misspelt setting": ("MODEL out --tokeniser x", "--tokenizer"),
    "another layout": ("MODEL out --to gguf", "gguf"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case, weights, mlm_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_tokenizer(101).save_pretrained("tokenizer")
    Path("bert.json").write_text('{"model_type": "bert", "hidden_size": 64}')
    Path("classless.json").write_text('{"model_type": "neobert"}')
    Path("misspelt.json").write_text('{"model_type": "neobert", "hiden_size": 64}')
    torch.save(weights, "state_dict.pt")
    line, name = BAD_INPUT[case]
    assert name in main(["convert", *line.replace("MODEL", str(mlm_checkpoint)).split()])
    assert not list(tmp_path.glob("out*"))


UNKNOWN_TO_THE_ORIGINAL = {
    "yarn": (NeoBERTForMaskedLM, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "`rope_parameters`"),
    "theta": (NeoBERTForMaskedLM, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "`rope_param"),
    "tied": (NeoBERTForMaskedLM, {"tie_word_embeddings": True}, "`tie_word_embeddings`"),
    "mean": (NeoBERTForSequenceClassification, {"classifier_pooling": "mean"}, "`classifier_pooling`"),
    "class": (NeoBERTForTokenClassification, {}, "NeoBERTForTokenClassification"),
}


@pytest.mark.parametrize("case", UNKNOWN_TO_THE_ORIGINAL)
def test_what_the_original_cannot_express_is_refused(case, tmp_path):
    cls, changes, message = UNKNOWN_TO_THE_ORIGINAL[case]
    small_model(cls, **changes).save_pretrained(tmp_path / "here")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "here", tmp_path / "out", to="original")
    assert not list(tmp_path.glob("out*"))


def test_command_line(mlm_checkpoint, tmp_path, capsys):
    assert main(["convert", str(mlm_checkpoint), str(tmp_path / "out"), "--to", "original"]) is None
    assert "NeoBERTForMaskedLM, 16 tensors, float32" in capsys.readouterr().out
    for wrong in ([], ["convrt"]):
        with pytest.raises(SystemExit) as exit:
            main(wrong)
        assert exit.value.code == 2
