"""The demo at reduced size."""

import json
import shlex
import subprocess
import sys

import pytest

from neobert_hf_cli import load
from tests.helpers.models import ROOT


@pytest.mark.slow
def test_all_steps_run(tmp_path, monkeypatch):
    """With a smaller model and fewer texts."""
    monkeypatch.chdir(ROOT)
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(
        f"extends: {ROOT}/configs/pretrain/demo.yaml\nmax_steps: 8\nnum_hidden_layers: 1\nhidden_size: 48\n"
        "warmup_steps: 0\nuse_cpu: true\n"
    )
    folder = tmp_path / "demo"
    flags = f"--config configs/demo.yaml --output_dir {folder} --max_documents 400 --pretraining {tiny}"
    command = [sys.executable, "examples/demo.py", *flags.split(), "--no_require_learning"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert all(f"\n{step}. " in "\n" + run.stdout for step in range(1, 8))
    numbers = json.loads((folder / "numbers.json").read_text())
    assert 4 < numbers["unigram_entropy"] < 9 and numbers["held_out_loss"] > 0
    assert all(len(guesses) == 5 for guesses in numbers["fill_mask"].values()) and len(numbers["search"]) == 3
    assert (folder / "demo.png").stat().st_size > 10_000
    # Readable in a log: no progress bars, one line a logged step.
    assert "it/s" not in run.stderr and "\r" not in run.stderr and "   step 8 of 8: " in run.stdout

    # The commands to try next work as they are printed.
    programs = []
    for line in run.stdout.split("Try next:\n")[1].strip().split("\n"):
        program, command, *words = shlex.split(line)
        programs.append(f"{program} {command}")
        load(command).main(words)
    assert programs == ["neobert-hf doctor", "neobert-hf index", "neobert-hf query"]
