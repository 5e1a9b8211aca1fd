"""The demo at reduced size, from its command line, in a process of its own."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


demo = load_example("demo")


def test_all_steps_run(tmp_path):
    """From the command line, in a process of its own, with a smaller model and fewer texts."""
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(
        f"extends: {ROOT}/configs/pretrain/demo.yaml\nmax_steps: 8\nnum_hidden_layers: 1\nhidden_size: 48\n"
        "warmup_steps: 0\nuse_cpu: true\n"
    )
    folder = tmp_path / "demo"
    flags = f"--config configs/demo.yaml --output_dir {folder} --max_documents 400 --pretraining {tiny}"
    command = [sys.executable, "examples/demo.py", *flags.split(), "--no_require_learning"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(f"\n{step}. " in "\n" + run.stdout for step in range(1, 8))
    numbers = json.loads((folder / "numbers.json").read_text())
    assert 4 < numbers["unigram_entropy"] < 9 and numbers["held_out_loss"] > 0
    assert all(len(guesses) == 5 for guesses in numbers["fill_mask"].values()) and len(numbers["search"]) == 3
    assert (folder / "demo.png").stat().st_size > 10_000
    # Readable in a log: no progress bars, one line a logged step.
    assert "it/s" not in run.stderr and "\r" not in run.stderr and "   step 8 of 8: " in run.stdout
    tokenizer = json.loads((folder / "pretraining" / "model" / "tokenizer_config.json").read_text())
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]

    # The commands to try next work as they are printed.
    for line in run.stdout.split("Try next:\n")[1].strip().split("\n"):
        program, *words = shlex.split(line)
        command = [Path(sys.executable).with_name(program), *words]
        tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert tried.returncode == 0, tried.stderr


def test_a_model_that_learnt_nothing_is_a_failure():
    demo.check_learning(4.0, 4.1, "settings.yaml")
    with pytest.raises(SystemExit, match="not below the unigram entropy"):
        demo.check_learning(4.1, 4.1, "settings.yaml")


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("--max_document", "8", "did you mean '--max_documents'"),
        ("--max_documents", "3", "raise `max_documents`"),
    ],
)
def test_bad_settings(tmp_path, flag, value, message):
    settings = ["--config", str(ROOT / "configs" / "demo.yaml"), "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=message):
        demo.main([*settings, flag, value])
