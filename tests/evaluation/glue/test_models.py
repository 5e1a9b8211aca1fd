"""Classifiers for fine-tuning: means of checkpoints, other encoders, and weights that do not fit."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertForMaskedLM

from neobert_hf.evaluation.glue.models import build_classifier
from neobert_hf.training.run_checkpoints import CheckpointError, Progress, mark_complete
from neobert_hf.training.starting_points import StartingPoint, build_model, task_config
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import TASKS, best_of, model_folder, save_encoder
from tests.helpers.other_encoders import ENCODERS, save_other_encoder


run_glue = load_example("run_glue")


def pretraining_run(folder: Path, tokenizer, sizes: list[int]) -> Path:
    """Complete checkpoints as pretraining leaves them, of models of these widths, and one that is not complete."""
    for step, size in enumerate(sizes):
        save_encoder(folder / f"checkpoint-{step}", tokenizer, step, size)
        mark_complete(folder / f"checkpoint-{step}", Progress("plain", {}, {}))
    save_encoder(folder / f"checkpoint-{len(sizes)}", tokenizer, 7, sizes[-1])
    return folder


def test_averaged_checkpoints(flags, tokenizer, tmp_path):
    run = pretraining_run(tmp_path / "pretraining", tokenizer, [32, 32, 32])
    run_glue.main(flags(tmp_path, model=run, average_checkpoints=2, max_steps=4, learning_rate=1e-12))
    stored = load_file(model_folder(tmp_path, "sst2") / "model.safetensors")
    parts = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2)]
    backbone = [key for key in stored if key.startswith("model.")]
    assert len(backbone) == len(stored) - 4
    for key in backbone:
        # Four steps of 1e-12 and the rounding of the mean.
        torch.testing.assert_close(stored[key], (parts[0][key] + parts[1][key]) / 2, rtol=0, atol=1e-6)
    assert best_of(tmp_path, "sst2")["settings"]["start"].count(" + ") == 1
    with pytest.raises(CheckpointError, match="holds 3 complete checkpoints, but `average_checkpoints` is 4"):
        run_glue.main(flags(tmp_path / "more", model=run, average_checkpoints=4))


def test_masked_language_models_without_a_pooler_are_averaged(tokenizer, tmp_path):
    config = ENCODERS["bert"](
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        BertForMaskedLM(config).save_pretrained(folder)
    model = build_classifier(StartingPoint(str(folders[0]), backbone=folders), TASKS["sst2"], 0.1)
    parts = [load_file(folder / "model.safetensors") for folder in folders]
    backbone = {key: value for key, value in model.bert.state_dict().items() if not key.startswith("pooler.")}
    assert len(backbone) == len(model.bert.state_dict()) - 2
    for key, weight in backbone.items():
        torch.testing.assert_close(weight, (parts[0][f"bert.{key}"] + parts[1][f"bert.{key}"]) / 2)
    assert model.bert.pooler.dense.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_half_precision_checkpoints_are_averaged_in_float32(tokenizer, tmp_path):
    run = pretraining_run(tmp_path, tokenizer, [32, 32])
    for step in (0, 1):
        file = run / f"checkpoint-{step}" / "model.safetensors"
        save_file({key: value.half() for key, value in load_file(file).items()}, file, {"format": "pt"})
    checkpoints = [run / "checkpoint-0", run / "checkpoint-1"]
    model = build_classifier(StartingPoint(str(checkpoints[0]), backbone=checkpoints), TASKS["sst2"], 0.1)
    parts = [load_file(folder / "model.safetensors")["model.encoder.weight"].double() for folder in checkpoints]
    assert model.dtype == torch.float32
    torch.testing.assert_close(model.model.encoder.weight.double(), sum(parts) / 2, rtol=1e-7, atol=1e-9)


def test_checkpoints_of_another_width_are_refused_before_training(flags, tokenizer, encoder, tmp_path):
    run = pretraining_run(tmp_path / "pretraining", tokenizer, [64, 32])
    with pytest.raises(ValueError, match="model.encoder.weight"):
        run_glue.main(flags(tmp_path / "run", model=run, average_checkpoints=2))
    wide = save_encoder(tmp_path / "wide", tokenizer, hidden_size=64)
    shutil.copy(encoder / "config.json", wide / "config.json")
    with pytest.raises(ValueError, match=r"weights of .*wide do not fit its config.json \(hidden_size 32\)"):
        run_glue.main(flags(tmp_path / "run", model=wide))
    # Not that of a head: an encoder has none, though its config has two labels.
    start = StartingPoint(str(wide))
    with pytest.raises(ValueError, match=r"weights of .*wide do not fit its config.json .* with 3 labels"):
        build_model(start, AutoModelForSequenceClassification, task_config(start, list("abc"), None, 0.0))
    file = run / "checkpoint-1" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.more"] = tensors.pop("model.layer_norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="model.layer_norm.weight"):
        build_classifier(StartingPoint(str(encoder), backbone=[run / "checkpoint-1"]), TASKS["sst2"], 0.1)
    assert not list((tmp_path / "run").rglob("checkpoint-*"))


@pytest.mark.parametrize("name", ENCODERS)
def test_it_works_for_other_encoders(flags, tokenizer, tmp_path, name):
    save_other_encoder(name, tmp_path / name, tokenizer)
    changes = {"model": tmp_path / name, "classifier_dropout": 0.25, "max_steps": 2}
    run_glue.main(flags(tmp_path, **changes))
    trained = model_folder(tmp_path, "sst2")
    stored = load_file(trained / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    model = build_classifier(StartingPoint(str(tmp_path / name), backbone=[trained]), TASKS["mnli"], 0.25)
    prefix = f"{model.base_model_prefix}."
    # Stored, since files have other names and shapes than the modules of some.
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    backbone = {key: weight for key, weight in again.items() if key.startswith(prefix)}
    assert len(backbone) > 10 and all(torch.equal(weight, stored[key]) for key, weight in backbone.items())
    # Before the classifier, and nowhere else.
    modules = model.named_modules()
    dropouts = [key for key, module in modules if 0.25 in (getattr(module, "p", 0), getattr(module, "drop_prob", 0))]
    assert len(dropouts) == 1 and not dropouts[0].startswith(prefix)
