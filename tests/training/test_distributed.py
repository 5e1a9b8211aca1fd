"""Several processes: the same loss and weights as one, exact resumption, and engines that run as asked for."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neobert_hf.training.run_checkpoints import complete_checkpoints
from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import SMALL, to_flags


ACCELERATE = Path(sys.executable).with_name("accelerate")
CONFIGS = ROOT / "configs" / "accelerate"
PRETRAIN = ROOT / "examples" / "pretrain.py"
FSDP2 = ROOT / "tests" / "helpers" / "fsdp2_on_cpu.py"


@pytest.fixture
def flags(prepared, tmp_path):
    def build(**changes) -> list[str]:
        settings = {"output_dir": tmp_path / "run", "train_data": prepared / "train"} | SMALL
        # Processes draw dropout from generators of their own.
        settings |= {"validation_data": prepared / "validation", "dropout": 0.0, "max_steps": 6, "seed": 0}
        return to_flags(settings | changes)

    return build


def launch(flags: list[str], *options: str, script: Path = PRETRAIN, cpu: str = "true") -> subprocess.Popen:
    return subprocess.Popen(
        [str(ACCELERATE), "launch", *options, str(script), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"ACCELERATE_USE_CPU": cpu, "PYTHONPATH": str(ROOT)},
    )


def ddp(processes: int) -> list[str]:
    # Port 0: a free one.
    ports = ["--main_process_port", "0"]
    return ["--config_file", str(CONFIGS / "cpu_ddp.yaml"), "--num_processes", str(processes), *ports]


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output[-4000:]
    return output


def result(folder: Path) -> tuple[dict, list[dict]]:
    return load_file(folder / "model" / "model.safetensors"), json.loads((folder / "log.json").read_text())


def assert_close(first: Path, second: Path, weights: float, loss: float = 1e-5, but: float = 0.0) -> None:
    """Largest difference of weights, but for a share of each tensor, and of training and held-out losses."""
    (tensors, log), (other_tensors, other_log) = result(first), result(second)
    assert tensors.keys() == other_tensors.keys()
    for name in tensors:
        beyond = ~((tensors[name] - other_tensors[name]).abs() <= weights)  # so are numbers that are none
        assert beyond.float().mean() <= but, name
    for entry, other in zip(log, other_log, strict=True):
        for key in ("loss", "eval_loss", "grad_norm"):
            assert entry.get(key) == pytest.approx(other.get(key), abs=loss)
        for key in ("tokens_seen", "accuracy", "eval_accuracy", "padding_share", "epoch"):
            assert entry.get(key) == pytest.approx(other.get(key), abs=1e-9)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_processes_and_accumulation_give_the_same_weights(flags, tmp_path, layout):
    """1 process x 4 micro-batches, 2 x 2 and 4 x 1. Adam divides by gradients near 0, which magnifies rounding."""
    outputs = {}
    for processes in (1, 2, 4) if layout == "packed" else (1, 2):
        folder = tmp_path / str(processes)
        options = ddp(processes) if processes > 1 else ["--num_processes", "1"]
        outputs[processes] = finish(launch(flags(layout=layout, output_dir=folder), *options))
        assert (
            f"{processes} x cpu, engine {'MULTI_CPU' if processes > 1 else 'NO'}; {4 // processes} micro-batches"
            in (outputs[processes])
        )
        assert_close(folder, tmp_path / "1", weights=2e-5)


def test_killed_twice_on_two_processes(flags, tmp_path):
    # Dropout, too: each process restores its own generator.
    changes = {"dropout": 0.1, "max_steps": 40, "save_steps": 4}
    finish(launch(flags(**changes, output_dir=tmp_path / "whole"), *ddp(2)))
    folder = tmp_path / "run"
    for kill in range(2):
        process = launch(flags(**changes), *ddp(2))
        seen = last_step(folder)
        while process.poll() is None and last_step(folder) < seen + 4 + 4 * kill:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0][-4000:]
        kill_all(process)
    assert "resuming from" in finish(launch(flags(**changes), *ddp(2)))
    assert_close(folder, tmp_path / "whole", weights=0.0, loss=0.0)


def kill_all(process: subprocess.Popen) -> None:
    """The launcher and its workers, which may have sessions of their own."""
    import psutil

    for victim in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
        os.kill(victim, signal.SIGKILL)
    process.communicate()


def last_step(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in complete_checkpoints(folder)), default=0)


def test_sigterm_to_the_launcher_stops_all_processes_at_one_step(flags, tmp_path):
    changes = {"max_steps": 2000, "save_steps": 100_000, "dataloader_num_workers": 1}
    process = launch(flags(**changes), *ddp(2))
    output = ""
    for line in process.stdout:
        output += line
        if "'loss'" in line:
            break
    process.terminate()
    output += process.communicate(timeout=100)[0]
    assert "Stopped by SIGTERM after step" in output, output[-4000:]
    assert last_step(tmp_path / "run") == int(re.search(r"after step (\d+)", output)[1])


def test_fsdp2_equals_one_process_and_resumes(flags, tmp_path):
    options = ["--config_file", str(CONFIGS / "fsdp2.yaml"), "--num_processes", "2", "--mixed_precision", "no"]
    finish(launch(flags(output_dir=tmp_path / "one"), "--num_processes", "1"))
    output = finish(launch(flags(), *options, script=FSDP2))
    sharded, parameters = map(int, re.search(r"(\d+) of (\d+) parameters are sharded", output).groups())
    assert sharded == parameters and "engine FSDP" in output
    assert_close(tmp_path / "run", tmp_path / "one", weights=2e-5)
    last = complete_checkpoints(tmp_path / "run")[-1]
    (last / "complete.json").rename(last / "hidden")
    assert "resuming from" in finish(launch(flags(), *options, script=FSDP2))
    assert_close(tmp_path / "run", tmp_path / "one", weights=2e-5)
    # Another engine is refused while there is something to train, and takes the finished weights over.
    last = complete_checkpoints(tmp_path / "run")[-1]
    (last / "complete.json").rename(last / "hidden")
    process = launch(flags(), "--num_processes", "1")
    assert "was written by the engine FSDP, and this run has plain" in process.communicate(timeout=100)[0]
    (last / "hidden").rename(last / "complete.json")
    shutil.rmtree(tmp_path / "run" / "model")
    assert "Run the command once more on one process" in launch(flags(), *options, script=FSDP2).communicate()[0]
    finish(launch(flags(), "--num_processes", "1"))
    written, expected = result(tmp_path / "run")[0], result(tmp_path / "one")[0]
    torch.testing.assert_close(written, expected, rtol=0, atol=2e-5)


def test_fsdp2_in_bf16_is_the_autocast_of_one_process(flags, tmp_path):
    """Accelerate's own mixed precision for FSDP2 would round loss, residual stream and gradients to bf16."""
    finish(launch(flags(bf16=True, output_dir=tmp_path / "one"), "--num_processes", "1"))
    options = ["--config_file", str(CONFIGS / "fsdp2.yaml"), "--num_processes", "2"]
    finish(launch(flags(bf16=True), *options, script=FSDP2))
    # AdamW makes a step of full length of a gradient that is nothing but rounding: 2 of 19,200 embeddings.
    assert_close(tmp_path / "run", tmp_path / "one", weights=1e-4, loss=1e-4, but=1e-3)


def test_another_number_of_processes_resumes_and_continues(flags, tmp_path):
    """From 1 process to 2 in the middle; then a second stage on 2, with the optimizer of the first."""
    finish(launch(flags(output_dir=tmp_path / "one"), "--num_processes", "1"))
    shutil.copytree(tmp_path / "one", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    shutil.rmtree(tmp_path / "run" / "model")
    assert "resuming from" in finish(launch(flags(), *ddp(2)))
    assert_close(tmp_path / "run", tmp_path / "one", weights=2e-5)
    stage = {"init_from": tmp_path / "one", "continue_optimizer": True, "schedule": "constant", "warmup_steps": 0}
    for processes, options in ((1, ["--num_processes", "1"]), (2, ddp(2))):
        finish(launch(flags(**stage, output_dir=tmp_path / f"second_{processes}"), *options))
    assert_close(tmp_path / "second_2", tmp_path / "second_1", weights=2e-5)


@pytest.mark.parametrize(
    ("options", "cpu"),
    [
        (["--config_file", "cpu_ddp.yaml"], "false"),
        (["--config_file", "fsdp2.yaml", "--num_processes", "2", "--mixed_precision", "no"], "true"),
    ],
    ids=["two alone", "DDP instead of FSDP"],
)
def test_a_launch_that_did_not_happen_is_an_error(flags, tmp_path, options, cpu):
    options = [str(CONFIGS / word) if word.endswith(".yaml") else word for word in options]
    changes = {"use_cpu": True} if cpu == "true" else {"use_cpu": False}
    process = launch(flags(**changes), *options, cpu=cpu)
    output = process.communicate(timeout=100)[0]
    assert process.returncode != 0
    assert "were asked for, but this process runs" in output, output[-3000:]
    assert not list((tmp_path / "run").glob("checkpoint-*"))
