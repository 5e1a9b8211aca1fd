"""Interrupted runs end with the same bits, checkpoints are whole or not used, and other settings are refused."""

import json
import os
import random
import shutil
import signal
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neobert_hf.data.stored_rows import load_rows
from neobert_hf.training.run_checkpoints import COMPLETE, CheckpointError, complete_checkpoints, step_of
from tests.helpers.embedding_runs import KINDS, assert_same_weights, load, losses_of, run, to_flags
from tests.helpers.pretraining_runs import ScriptProcesses, launched_environments, start


# Long enough to be killed or stopped on the way: the kind, and what is set.
LONG = {
    "dense": ("dense", {"max_steps": 60, "save_steps": 60}),
    "sparse": ("sparse", {"max_steps": 40, "save_steps": 40}),
    # With dropout.
    "adapters": ("dense", {"max_steps": 60, "save_steps": 60, "lora_rank": 4, "lora_dropout": 0.1}),
}


@pytest.fixture(scope="module")
def whole(data, encoder, trained, tmp_path_factory):
    """Settings of a long run by name, and the folder that such a run leaves which nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")

    @cache
    def build(name: str) -> tuple[dict, Path]:
        changes = LONG[name][1] | {"model": encoder, "datasets": data / "datasets.yaml", "eval_strategy": "no"}
        torch.manual_seed(0)
        run(LONG[name][0], changes | {"output_dir": folder / name})
        return changes, folder / name

    return build


@pytest.mark.parametrize("name", ["dense", "sparse", pytest.param("adapters", marks=pytest.mark.slow)])
def test_killed_and_resumed_ends_with_the_same_bits(whole, tmp_path, capsys, name):
    kind, (changes, expected) = LONG[name][0], whole(name)
    changes = changes | {"output_dir": tmp_path / "run"}
    steps = [0]
    for kill in range(2 if name == "adapters" else 1):
        process = start(to_flags(kind, changes | {"save_steps": 5}), script=KINDS[kind][0])
        while not (found := complete_checkpoints(tmp_path / "run")) or step_of(found[-1]) <= steps[-1]:
            process.check_running()
        # At any moment: in the middle of a step or of saving.
        time.sleep(random.Random(kill).random() / 2)
        process.kill()
        last = complete_checkpoints(tmp_path / "run")[-1]
        steps.append(step_of(last))
    assert steps[-1] < changes["max_steps"]
    log = run(kind, changes)
    assert f"resuming from {last}\n" in capsys.readouterr().out
    assert_same_weights(tmp_path / "run", expected)
    losses = losses_of(json.loads((expected / "log.json").read_text()))
    assert losses_of(log) == losses and len(losses) == changes["max_steps"]


def test_sigterm_saves_stops_and_the_same_command_goes_on(whole, settings, tmp_path):
    changes = settings(**whole("dense")[0]) | {"save_steps": 20}

    def stop():
        for _ in range(6000):
            if complete_checkpoints(tmp_path / "run"):
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        run("dense", changes)
    thread.join()
    assert stopped.value.code == 143
    last = complete_checkpoints(tmp_path / "run")[-1]
    assert last.name not in ("checkpoint-20", "checkpoint-40", "checkpoint-60")
    run("dense", changes)
    assert_same_weights(tmp_path / "run", whole("dense")[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_bits(trained, settings, tmp_path, kind):
    output = interrupted(trained[kind], tmp_path / "run", step=6)
    # A checkpoint that was being written is not picked up.
    half = output / "checkpoint-9"
    shutil.copytree(output / "checkpoint-6", half)
    (half / COMPLETE).unlink()
    (half / "model.safetensors").write_bytes(b"half")
    changes = settings(eval_strategy="no") | trained.own(kind)
    run(kind, changes)
    assert_same_weights(output, trained[kind])
    # Once more: nothing is left to train, and the model is the same, with all of its modules.
    shutil.rmtree(output / "model")
    run(kind, changes)
    assert_same_weights(output, trained[kind])
    texts = [("how to sort", "a list"), ("x", "for loops")] if kind == "reranker" else ["a list", "for loops and x"]
    found, expected = (load(kind, folder) for folder in (output, trained[kind]))
    method = "predict" if kind == "reranker" else "encode"
    for ours, theirs in zip(*(getattr(model, method)(texts) for model in (found, expected))):
        ours, theirs = (torch.as_tensor(values).to_dense() for values in (ours, theirs))
        assert torch.equal(ours, theirs)


def test_guided_and_mined_runs_resume_with_the_same_bits_and_the_same_models(trained, settings, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(trained["dense"] / "model", teacher)
    changes = {"eval_strategy": "no", "only": "pairs", "guide": teacher, "miner": teacher, "negatives": 2}
    run("dense", settings(**changes, output_dir=tmp_path / "whole"))
    (mined,) = (tmp_path / "whole" / "mined").iterdir()
    interrupted(tmp_path / "whole", tmp_path / "run", step=6)
    run("dense", settings(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert [file.name for file in (tmp_path / "run" / "mined").iterdir()] == [mined.name]
    # The teacher was trained on since: what it says would be other negatives.
    weights = load_file(teacher / "model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, teacher / "model.safetensors")
    interrupted(tmp_path / "whole", tmp_path / "other", step=6)
    with pytest.raises(CheckpointError, match="(?s)guide_fingerprint.*miner_fingerprint"):
        run("dense", settings(**changes, output_dir=tmp_path / "other"))


def test_checked_runs_resume_with_the_same_bits(trained, settings, tmp_path):
    # The scores of so small a reranker lie within any margin.
    changes = {"only": "pairs", "negatives": 2, "relative_margin": 0, "eval_strategy": "no"}
    changes |= {"miner": trained["dense"] / "model", "cross_encoder": trained["reranker"] / "model"}
    whole = tmp_path / "whole"
    run("dense", settings(**changes, output_dir=whole))
    interrupted(whole, tmp_path / "run", step=6)
    run("dense", settings(**changes))
    assert_same_weights(tmp_path / "run", whole)
    # What the helpers said was there, and had something to say.
    folders = (whole, tmp_path / "run")
    files = [sorted(file.relative_to(folder) for file in (folder / "mined").rglob("*.parquet")) for folder in folders]
    assert files[0] == files[1] != []
    assert sum(map(bool, load_rows(whole / files[0][0])["negatives"])) > 10
    # Without them it would be another model.
    run("dense", settings(only="pairs", eval_strategy="no", output_dir=tmp_path / "plain"))
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "plain", whole)


def test_the_losses_of_a_resumed_run_count_the_same_steps(settings, tmp_path):
    """Saved between two logs: the next one counts the steps before the resume as well, of every part of the loss."""
    changes = {"logging_steps": 4, "save_steps": 6, "eval_strategy": "no"}
    whole = run("sparse", settings(**changes, output_dir=tmp_path / "whole"))
    interrupted(tmp_path / "whole", tmp_path / "run", step=6)
    resumed = run("sparse", settings(**changes))
    assert "base_loss" in whole[1] and any("train_loss" in entry for entry in whole)
    for entry, expected in zip(resumed, whole, strict=True):
        assert entry.keys() == expected.keys()
        for name in entry:
            if not name.endswith(("per_second", "runtime")):
                assert entry[name] == expected[name], (name, entry["step"])


def interrupted(trained: Path, output: Path, step: int) -> Path:
    """A copy of a run as if it had stopped after this step."""
    shutil.copytree(trained, output)
    for folder in complete_checkpoints(output):
        if step_of(folder) > step:
            shutil.rmtree(folder)
    shutil.rmtree(output / "model")
    return output


@pytest.fixture
def restored(data, encoder):
    """Files of the session's data and encoder that a test changes, restored after it."""
    files = [data / "pairs.jsonl", encoder / "model.safetensors", encoder / "tokenizer_config.json"]
    contents = [file.read_bytes() for file in files]
    yield files
    for file, content in zip(files, contents):
        file.write_bytes(content)


def test_other_settings_data_or_a_lost_file_are_refused_by_name(trained, settings, edit, restored, tmp_path):
    output = interrupted(trained["dense"], tmp_path / "run", step=6)
    with pytest.raises(CheckpointError, match="(?s)learning_rate: 0.005 there, 0.001 now.*temperature: 0.07"):
        run("dense", settings(learning_rate=1e-3, temperature=0.05))
    with pytest.raises(CheckpointError, match="other settings:\n  adam_beta1: 0.9 there, 0.8 now\nResume"):
        run("dense", settings(adam_beta1=0.8))
    file = edit(lambda content: content["train"]["pairs"].update(instruction="Another."))
    with pytest.raises(CheckpointError, match="(?s)datasets: .*Find the text.*Another"):
        run("dense", settings(datasets=file))
    # Other rows, and as many, in the same file; other weights in the same folder.
    pairs, weights_file, tokenizer_file = restored
    text = pairs.read_text()
    pairs.write_text("".join(reversed(text.splitlines(keepends=True))))
    with pytest.raises(CheckpointError, match="other settings:\n  datasets: .*\nResume"):
        run("dense", settings())
    pairs.write_text(text)
    content = weights_file.read_bytes()
    weights = load_file(weights_file)
    weights["model.layer_norm.weight"] *= 2
    save_file(weights, weights_file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="other settings:\n  weights: .*\nResume"):
        run("dense", settings())
    weights_file.write_bytes(content)
    content = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps(content | {"model_max_length": 5}))
    with pytest.raises(CheckpointError, match="other settings:\n  tokenizer_fingerprint: .*\nResume"):
        run("dense", settings())
    tokenizer_file.write_text(json.dumps(content))
    (output / "checkpoint-6" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="optimizer.pt is missing"):
        run("dense", settings())


def test_a_run_does_not_go_on_from_another_kinds_checkpoint(trained, settings, tmp_path):
    shutil.copytree(trained["sparse"], tmp_path / "run")
    with pytest.raises(CheckpointError, match="(?s)other settings.*query_weight: 5e-05 there, None now"):
        run("multi_vector", settings())


@pytest.mark.parametrize("kind", ["dense", "reranker"])
def test_two_processes_train_as_one_with_twice_the_micro_batches(settings, encoder, tmp_path, kind):
    shutil.copytree(encoder, tmp_path / "encoder")
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    # Processes draw dropout from generators of their own.
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config | {"dropout": 0.0, "classifier_dropout": 0.0}))
    changes = settings(model=tmp_path / "encoder", max_steps=6, save_steps=6)
    run(kind, changes | {"gradient_accumulation_steps": 2, "output_dir": tmp_path / "one"})
    environments = launched_environments("cpu_ddp.yaml", 2)
    processes = ScriptProcesses(to_flags(kind, changes), environments, script=KINDS[kind][0])
    assert "2 x cpu" in processes.finish()
    before = load_file(encoder / "model.safetensors")
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "run"))
    for name, tensor in one.items():
        # A new head counts whole.
        moved = (tensor - before.get(f"model.{name.removeprefix('model.')}", 0)).norm()
        # Rounding in another order, over 6 steps.
        assert (tensor - two[name]).norm() < 1e-3 * moved, name
