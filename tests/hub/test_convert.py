"""`neobert-hf convert`: from the original's files and back, bit by bit."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTForTokenClassification
from tests.helpers.examples import status_of
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer
from tests.model.reference import KINDS, VARIANTS, write_reference


@pytest.fixture
def original(tmp_path) -> Path:
    """A checkpoint in the layout of the published model."""
    return write_reference(tmp_path / "original", "published")


@pytest.fixture
def weights(original) -> dict[str, torch.Tensor]:
    return load_file(original / "model.safetensors")


def convert(source: Path, output: Path, *options: str) -> None:
    assert status_of(["convert", str(source), str(output), *options]) == 0


def same_bytes(left, right) -> bool:
    """The same names, dtypes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].contiguous().view(torch.uint8).equal(right[name].contiguous().view(torch.uint8))
        for name in left
    )


@pytest.mark.parametrize("prefix, dtype", [("", torch.float32), ("module._orig_mod.", torch.bfloat16)])
def test_state_dict_there_and_back(prefix, dtype, weights, original, tmp_path):
    """`prefix`: the original saves the model as DDP and `torch.compile` have wrapped it.

    Some versions of its code store the rotary table, which follows from the config.
    """
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    stored = weights | {"model.freqs_cis": torch.ones(64, 16, 2)}
    (tmp_path / "step").mkdir()
    torch.save({prefix + name: tensor for name, tensor in stored.items()}, tmp_path / "step" / "state_dict.pt")
    convert(tmp_path / "step", tmp_path / "here", "--config", str(original))
    assert same_bytes(load_file(tmp_path / "here" / "model.safetensors"), weights)
    convert(tmp_path / "here", tmp_path / "back", "--to", "state_dict")
    assert same_bytes(torch.load(tmp_path / "back" / "state_dict.pt", weights_only=True), weights)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == str(dtype)[6:]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_published_layout_there_and_back(variant, kind, tmp_path):
    source = write_reference(tmp_path / "original", variant, kind)
    convert(source, tmp_path / "here")
    convert(tmp_path / "here", tmp_path / "back", "--to", "original")
    original = load_file(source / "model.safetensors")
    assert same_bytes(load_file(tmp_path / "here" / "model.safetensors"), original)
    assert same_bytes(load_file(tmp_path / "back" / "model.safetensors"), original)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    # Notes of the training script, which describe nothing.
    for key in set(before) - {"kwargs", "trust_remote_code", "pretrained_model_name_or_path", "transformers_version"}:
        assert after[key] == before[key], key
    # Keys that the original code would not understand.
    assert not {"rope_parameters", "classifier_pooling", "sparse_prediction", "unpad", "dtype"} & set(after)


def test_shards_and_the_tokenizer_come_along(tmp_path):
    model = small_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    small_tokenizer().save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    convert(tmp_path / "shards", tmp_path / "original", "--to", "original")
    assert same_bytes(load_file(tmp_path / "original" / "model.safetensors"), dict(model.state_dict()))
    assert (tmp_path / "original" / "tokenizer.json").is_file()


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_no_code_in_a_pickle_is_run(weights, original, tmp_path):
    torch.save(weights | {"decoder.bias": Malicious(tmp_path / "executed")}, tmp_path / "state_dict.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        status_of(["convert", str(tmp_path / "state_dict.pt"), str(tmp_path / "out"), "--config", str(original)])
    assert not (tmp_path / "executed").exists() and not list(tmp_path.glob("out*"))


QKV = "model.transformer_encoder.1.qkv.weight"
# What is wrong with the tensors, and the name that is said.
TENSOR_DAMAGES = {
    "missing": (lambda t: t.pop(QKV), QKV),
    "unknown": (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "model.extra.weight"),
    "shape": (lambda t: t.update({QKV: t[QKV][:, :32].clone()}), QKV),
    "dtype": (lambda t: t.update({QKV: t[QKV].half()}), "torch.float16"),
    "another head": (lambda t: t.update({"classifier.weight": torch.ones(2, 64)}), "classifier.weight"),
}


@pytest.mark.parametrize("damage", TENSOR_DAMAGES)
def test_damaged_tensors_are_errors_that_name_them(damage, weights, original, tmp_path):
    change, name = TENSOR_DAMAGES[damage]
    change(weights)
    save_file(weights, original / "model.safetensors")
    assert name in status_of(["convert", str(original), str(tmp_path / "out")])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "line, name", [("original bare", "bare"), ("nowhere out", "nowhere"), ("bare out", "config.json")]
)
def test_folders_that_are_there_or_not_are_named(line, name, original, tmp_path, monkeypatch):
    """The output exists; the source does not; the source lacks its config."""
    monkeypatch.chdir(tmp_path)
    Path("bare").mkdir()
    os.link("original/model.safetensors", "bare/model.safetensors")
    assert name in status_of(["convert", *line.split()])
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
    cls, changes, name = UNKNOWN_TO_THE_ORIGINAL[case]
    small_model(cls, **changes).save_pretrained(tmp_path / "here")
    assert name in status_of(["convert", str(tmp_path / "here"), str(tmp_path / "out"), "--to", "original"])
    assert not list(tmp_path.glob("out*"))


def test_modules_that_are_left_out_are_said(embedder, tmp_path, capsys):
    convert(embedder, tmp_path / "out", "--to", "neobert_hf")
    assert "only the encoder" in capsys.readouterr().out
    assert not (tmp_path / "out" / "modules.json").exists()
