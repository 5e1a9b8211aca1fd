"""The demo at reduced size."""

import json
import runpy
import shlex

import pytest
from datasets import enable_progress_bar

from neobert_hf_cli import load
from tests.helpers.models import ROOT


@pytest.mark.slow
def test_all_steps_run(tmp_path, monkeypatch, capfd):
    """With a smaller model and fewer texts."""
    monkeypatch.chdir(ROOT)
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(
        f"extends: {ROOT}/configs/pretrain/demo.yaml\nmax_steps: 8\nnum_hidden_layers: 1\nhidden_size: 48\n"
        "warmup_steps: 0\nuse_cpu: true\n"
    )
    folder = tmp_path / "demo"
    flags = f"--config configs/demo.yaml --output_dir {folder} --max_documents 400 --pretraining {tiny}"
    runpy.run_path("examples/demo.py")["main"]([*flags.split(), "--no_require_learning"])
    enable_progress_bar()
    run = capfd.readouterr()
    assert all(f"\n{step}. " in "\n" + run.out for step in range(1, 8))
    numbers = json.loads((folder / "numbers.json").read_text())
    assert 4 < numbers["unigram_entropy"] < 9 and numbers["held_out_loss"] > 0
    assert all(len(guesses) == 5 for guesses in numbers["fill_mask"].values()) and len(numbers["search"]) == 3
    assert (folder / "demo.png").stat().st_size > 10_000
    # Readable in a log: no progress bars, one line a logged step.
    assert "it/s" not in run.err and "\r" not in run.err and "   step 8 of 8: " in run.out

    # The commands to try next work as they are printed.
    programs = []
    for line in run.out.split("Try next:\n")[1].strip().split("\n"):
        program, command, *words = shlex.split(line)
        programs.append(f"{program} {command}")
        load(command).main(words)
    assert programs == ["neobert-hf doctor", "neobert-hf index", "neobert-hf query"]
