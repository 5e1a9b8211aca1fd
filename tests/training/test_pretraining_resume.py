"""examples/pretrain.py interrupted, resumed, continued by a second stage."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.data.documents import Documents
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from tests.helpers.pretraining_runs import assert_same_weights, pretrain, run, start


@pytest.fixture
def interrupted(finished, tmp_path) -> Path:
    """The last checkpoint of tmp_path / "run", which stopped after step 6, in the middle of its way."""
    interrupted_copy(finished, tmp_path / "run", after=6)
    return tmp_path / "run" / "checkpoint-6"


def interrupted_copy(whole: Path, folder: Path, after: int) -> None:
    """A copy of a run as if it had been interrupted at this step."""
    shutil.copytree(whole, folder)
    for checkpoint in complete_checkpoints(folder):
        if int(checkpoint.name.split("-")[1]) > after:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "model")


def test_resuming_does_not_read_skipped_data(flags, finished, interrupted, tmp_path, monkeypatch):
    read = []
    original = Documents.__getitems__
    monkeypatch.setattr(Documents, "__getitems__", lambda self, keys: read.append(1) or original(self, keys))
    for steps in (12 - 6, 0):
        # Once it is finished, nothing is trained again, also if the model is gone.
        shutil.rmtree(tmp_path / "run" / "model", ignore_errors=True)
        read.clear()
        pretrain.main(flags())
        assert len(read) == steps * 4
        assert_same_weights(tmp_path / "run", finished)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate: 0.005 there, 0.001 now"),
        ({"hidden_size": 64}, "hidden_size: 32 there, 64 now"),
    ],
)
def test_resuming_with_other_settings_names_them(flags, interrupted, change, message):
    may_change = {"logging_steps": 2, "save_steps": 4, "dataloader_num_workers": 1}
    with pytest.raises(SettingsMismatch, match=message) as error:
        pretrain.main(flags(**change, **may_change))
    assert str(error.value).count(" there, ") == 1


def test_a_signal_saves_stops_and_the_same_command_goes_on(flags, tmp_path):
    """A terminal signals the whole process group: loader workers must survive it."""
    changes = {"max_steps": 30, "save_steps": 1000, "dataloader_num_workers": 2}
    run(flags(**changes, output_dir=tmp_path / "whole"))
    training = start(flags(**changes))
    while not re.search(r"step 1 of|'loss'", training.output):
        training.check_running()
    training.signal(signal.SIGINT)
    assert training.end() == [128 + signal.SIGINT], training.output[-3000:]
    step = int(re.search("Stopped by SIGINT after step (\\d+)", training.output)[1])
    assert f"checkpoint-{step} is complete: the same command goes on from there." in training.output
    assert 0 < step < 30 and not (tmp_path / "run" / "model").exists()
    run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    # The tokenizer is the same to the byte, however the run went.
    for file in (tmp_path / "whole" / "model").glob("*.json"):
        assert file.read_bytes() == (tmp_path / "run" / "model" / file.name).read_bytes(), file


def test_second_stage_continues_weights_and_optimizer_once(flags, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "first")
    stage = {
        "init_from": tmp_path / "first",
        "continue_optimizer": True,
        "max_length": 128,
        "schedule": "constant",
        "learning_rate": 5e-4,
        "weight_decay": 0.05,
        "warmup_steps": 0,
        "max_steps": 4,
        "save_steps": 1,
        "save_total_limit": 10,
    }
    log = run(flags(**stage))
    first = torch.load(tmp_path / "first" / "checkpoint-12" / "optimizer.pt")
    second = torch.load(tmp_path / "run" / "checkpoint-1" / "optimizer.pt")
    # Adam's own count of its steps goes on, the settings are this stage's.
    assert {int(state["step"]) for state in first["state"].values()} == {12}
    assert {int(state["step"]) for state in second["state"].values()} == {13}
    assert [group["weight_decay"] for group in second["param_groups"]] == [0.05] * len(first["param_groups"])
    assert [entry["learning_rate"] for entry in log if "loss" in entry] == [5e-4] * 4
    assert log[0]["loss"] < json.loads((tmp_path / "first" / "log.json").read_text())[0]["loss"] - 0.3
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").config.max_length == 128
    # Interrupted, it resumes its own optimizer and not the first stage's again; a checkpoint can be named, too.
    interrupted_copy(tmp_path / "run", tmp_path / "again", after=2)
    stage["init_from"] = tmp_path / "first" / "checkpoint-12"
    run(flags(**stage, output_dir=tmp_path / "again"))
    assert_same_weights(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "factor": 2.0}], ids=["as it was", "new"])
def test_a_run_from_a_model_keeps_what_no_setting_names(flags, finished, tmp_path, rope):
    """Architecture, rotary positions and rows of the vocabulary."""
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    rows = model.config.vocab_size + 8
    model.resize_token_embeddings(rows)
    if rope is None:
        model.config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    shutil.copytree(finished / "model", tmp_path / "first" / "model")
    model.save_pretrained(tmp_path / "first" / "model")
    stage = {"init_from": tmp_path / "first", "max_length": 128, "max_steps": 2}
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "dropout")
    stage |= dict.fromkeys((*names, "decoder_init_range", "embedding_init_range"))
    run([*flags(**stage), *(["--rope_parameters", json.dumps(rope)] if rope else [])])
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").config
    assert all(getattr(config, name) == getattr(model.config, name) for name in names)
    assert config.vocab_size == rows and config.max_length == 128
    # As in configs/adapt/length.yaml: the model remembers the length that it was trained with before.
    expected = rope | {"original_max_position_embeddings": 64} if rope else model.config.rope_parameters
    assert expected.items() <= config.rope_parameters.items()
    with pytest.raises(SettingsMismatch, match="rope_parameters"):
        pretrain.main([*flags(**stage), "--rope_parameters", '{"rope_type": "yarn", "factor": 3.0}'])


def test_several_folders_resume_with_the_same_bits(flags, prepared, tmp_path):
    """With other shares, or the folders in another order, it is another run."""
    domain, general = tmp_path / "domain", prepared / "train"
    shutil.copytree(prepared / "validation", domain)
    changes = {"max_steps": 12, "min_lengths": 0, "probabilities": 1, "train_data": f"{domain}:1 {general}:0.5"}
    run(flags(**changes, output_dir=tmp_path / "whole"))
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=6)
    run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    for other, name in ((f"{domain} {general}", "shares"), (f"{general}:1 {domain}:0.5", "corpus")):
        with pytest.raises(SettingsMismatch, match=f"{name}: "):
            pretrain.main(flags(**changes | {"train_data": other}))


def test_second_stage_from_something_else_is_refused(flags, finished, tmp_path):
    first = shutil.copytree(finished, tmp_path / "first")
    for changes, error, message in (
        ({"init_from": first, "hidden_size": 64}, ValueError, "`hidden_size` is 64"),
        ({"init_from": first / "model", "continue_optimizer": True}, CheckpointError, "not a complete checkpoint"),
        ({"continue_optimizer": True}, ValueError, "needs `init_from`"),
        ({"init_from": first, "continue_optimizer": True, "optimizer": "muon"}, ValueError, "`optimizer`"),
        ({"init_from": tmp_path / "nowhere"}, FileNotFoundError, "`init_from` is .*nowhere"),
    ):
        with pytest.raises(error, match=message):
            pretrain.main(flags(**changes, output_dir=tmp_path / "second"))
    # As if it had been interrupted.
    shutil.rmtree(first / "checkpoint-12")
    with pytest.raises(ValueError, match="has reached only step 9 of 12"):
        pretrain.main(flags(init_from=first, continue_optimizer=True))
    file = first / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["the"], vocabulary["is"] = vocabulary["is"], vocabulary["the"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="first/model has another tokenizer"):
        pretrain.main(flags(init_from=first))
