"""The demo at reduced size, from its command line, in a process of its own."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT


def run_demo(tmp_path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "examples/demo.py", "--config", "configs/demo.yaml", "--output_dir", str(tmp_path)]
    tiny = ["--max_documents", "400", "--num_hidden_layers", "1", "--hidden_size", "64", "--num_attention_heads", "2"]
    return subprocess.run([*command, *tiny, *flags], cwd=ROOT, capture_output=True, text=True)


def test_all_steps_run(tmp_path):
    run = run_demo(tmp_path, "--max_steps", "8", "--no_require_learning")
    assert run.returncode == 0, run.stderr
    assert all(f"\n{step}. " in "\n" + run.stdout for step in range(1, 9))
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert 4 < numbers["unigram_entropy"] < 9 and numbers["held_out_loss"] > 0
    assert all(len(guesses) == 5 for guesses in numbers["fill_mask"].values())
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert (tmp_path / "model" / "model.safetensors").exists() and not (tmp_path / "model.partial").exists()
    tokenizer = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]


def test_a_model_that_learnt_nothing_is_a_failure(tmp_path):
    run = run_demo(tmp_path, "--max_steps", "1")
    assert run.returncode == 1 and "not below the unigram entropy" in run.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_step", "8"], "did you mean '--max_steps'"),
        (["--max_documents", "3"], "raise `max_documents`"),
    ],
)
def test_bad_settings(tmp_path, flags, message):
    run = run_demo(tmp_path, "--max_steps", "1", *flags)
    assert run.returncode == 1 and message in run.stderr
