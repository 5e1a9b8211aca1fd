"""The average of models is the mean of each tensor, of models that fit each other, and loads like them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.run import SettingsMismatch
from neobert_hf.hub import average
from tests.helpers.models import save_checkpoint, save_encoder
from tests.helpers.small_tokenizer import small_tokenizer, tiny_tokenizer


@pytest.fixture
def runs(tmp_path):
    """Three finished runs with other weights."""
    for seed in range(3):
        save_encoder(tmp_path / f"run-{seed}" / "model", small_tokenizer(), seed)
        (tmp_path / f"run-{seed}" / "model" / "README.md").write_text("scores of this model")
    return [tmp_path / f"run-{seed}" for seed in range(3)]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("shares", [[], [1, 1, 2]])
def test_every_tensor_is_the_mean(runs, tmp_path, shares):
    # As of a checkpoint of the same run.
    config = json.loads((runs[1] / "model" / "config.json").read_text())
    (runs[1] / "model" / "config.json").write_text(json.dumps(config | {"sparse_prediction": True}))
    result = average(models=runs, output=tmp_path / "mean", weights=shares)
    tensors, found = [weights(run / "model") for run in runs], weights(result.model)
    total = shares or [1, 1, 1]
    for name, tensor in found.items():
        expected = sum(share * each[name].double() for share, each in zip(total, tensors)) / sum(total)
        torch.testing.assert_close(tensor, expected.float(), rtol=0, atol=1e-7)
    assert found.keys() == tensors[0].keys() and not torch.equal(found["decoder.weight"], tensors[0]["decoder.weight"])
    model, info = AutoModelForMaskedLM.from_pretrained(result.model, output_loading_info=True)
    assert isinstance(model, NeoBERTForMaskedLM) and not any(info.values())
    assert AutoTokenizer.from_pretrained(result.model)("a b") == AutoTokenizer.from_pretrained(runs[0] / "model")("a b")
    # A card tells of one of them.
    assert not (result.model / "README.md").exists()


def test_a_model_of_sentence_transformers_stays_one(runs, tmp_path):
    for number, run in enumerate(runs[:2]):
        model = SentenceTransformer(str(run / "model"), device="cpu", prompts={"query": "q "})
        model.save(str(tmp_path / f"st-{number}"))
    average.main(f"--models {tmp_path}/st-0 {tmp_path}/st-1 --output {tmp_path}/mean".split())
    averaged = SentenceTransformer(str(tmp_path / "mean"), device="cpu")
    assert averaged.encode(["a b c", "d"]).shape == (2, 32) and averaged.prompts["query"] == "q "
    one, two, found = (weights(tmp_path / name)["encoder.weight"] for name in ("st-0", "st-1", "mean"))
    torch.testing.assert_close(found, (one + two) / 2)


@pytest.mark.parametrize("what", ["config", "tokenizer", "one model", "weights", "there already"])
def test_what_does_not_fit_is_named_and_nothing_is_written(runs, tmp_path, what):
    models, output, options = list(runs), tmp_path / "mean", {}
    error, message = ValueError, ""
    if what == "config":
        config = json.loads((runs[1] / "model" / "config.json").read_text())
        (runs[1] / "model" / "config.json").write_text(json.dumps(config | {"norm_eps": 0.5}))
        error, message = (
            SettingsMismatch,
            "run-1/model was made with other settings:\n  config.json.norm_eps: 0.5 there",
        )
    elif what == "tokenizer":
        tiny_tokenizer().save_pretrained(runs[2] / "model")
        error, message = SettingsMismatch, "run-2/model was made with other settings:\n  tokenizer: "
    elif what == "one model":
        models, message = models[:1], "`models` names 1,"
    elif what == "weights":
        options, message = {"weights": [1.0, 2.0]}, "`models` names 3,"
    else:
        shutil.copytree(runs[0], output)
        message = "mean exists"
    with pytest.raises(error, match=message):
        average(models=models, output=output, **options)
    assert output.exists() == (what == "there already")


def test_a_tensor_that_one_of_them_lacks_is_named(tmp_path):
    for name in "ab":
        save_checkpoint(tmp_path / name, NeoBERTForMaskedLM)
    other = weights(tmp_path / "b")
    del other["decoder.bias"]
    save_file(other, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="decoder.bias is missing in"):
        average(models=[tmp_path / "a", tmp_path / "b"], output=tmp_path / "mean")
