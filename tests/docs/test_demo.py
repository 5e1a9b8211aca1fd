"""The demo at reduced size, from its command line, in a process of its own."""

import json
import subprocess
import sys

import pytest

from tests.helpers.models import ROOT


def run_demo(tmp_path, *flags: str, max_steps: int = 1) -> subprocess.CompletedProcess:
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(
        f"extends: {ROOT}/configs/pretrain/demo.yaml\nmax_steps: {max_steps}\nnum_hidden_layers: 1\nhidden_size: 48\n"
        "warmup_steps: 0\nuse_cpu: true\n"
    )
    command = [
        sys.executable,
        "examples/demo.py",
        "--config",
        "configs/demo.yaml",
        "--output_dir",
        str(tmp_path / "demo"),
    ]
    reduced = ["--max_documents", "400", "--pretraining", str(tiny)]
    return subprocess.run([*command, *reduced, *flags], cwd=ROOT, capture_output=True, text=True)


def test_all_steps_run(tmp_path):
    run = run_demo(tmp_path, "--no_require_learning", max_steps=8)
    assert run.returncode == 0, run.stderr
    assert all(f"\n{step}. " in "\n" + run.stdout for step in range(1, 8))
    folder = tmp_path / "demo"
    numbers = json.loads((folder / "numbers.json").read_text())
    assert 4 < numbers["unigram_entropy"] < 9 and numbers["held_out_loss"] > 0
    assert all(len(guesses) == 5 for guesses in numbers["fill_mask"].values()) and len(numbers["search"]) == 3
    assert (folder / "pretraining" / "curves.png").stat().st_size > 10_000
    tokenizer = json.loads((folder / "pretraining" / "model" / "tokenizer_config.json").read_text())
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]


def test_a_model_that_learnt_nothing_is_a_failure(tmp_path):
    run = run_demo(tmp_path)
    assert run.returncode == 1 and "not below the unigram entropy" in run.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_document", "8"], "did you mean '--max_documents'"),
        (["--max_documents", "3"], "raise `max_documents`"),
    ],
)
def test_bad_settings(tmp_path, flags, message):
    run = run_demo(tmp_path, *flags)
    assert run.returncode == 1 and message in run.stderr
