"""The demonstrations: the demo at reduced size, and the data of the guides."""

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import sample_data

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

    # The commands work as they are printed: of the steps, whose folders are there, and to try next.
    commands = [line.strip().removeprefix("$ ") for line in run.stdout.splitlines() if "neobert-hf" in line]
    names = ["train_tokenizer", "prepare_data", "prepare_data", "pretrain", "doctor", "index", "query"]
    assert [shlex.split(line)[1] for line in commands] == names
    shutil.rmtree(folder / "tokenizer")
    for line in commands[:1] + commands[4:]:
        program, name, *words = shlex.split(line)
        load(name).main(words)


def test_sample_data_replaces_nothing_of_the_users(tmp_path, monkeypatch):
    for package in ("asyncio", "email"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, tmp_path / "library" / package)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    monkeypatch.chdir(tmp_path)
    sample_data.main()
    written = {path: path.read_text() for path in tmp_path.glob("[cd]*/**/*") if path.is_file()}
    assert len(written) == 7
    sample_data.main()
    mine = tmp_path / "data" / "returned.jsonl"
    mine.write_text("mine")
    (tmp_path / "corpus" / "docstrings.jsonl").unlink()
    with pytest.raises(SystemExit, match="data/returned.jsonl is there and holds something else"):
        sample_data.main()
    assert mine.read_text() == "mine" and not (tmp_path / "corpus" / "docstrings.jsonl").exists()
