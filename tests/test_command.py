"""The command `neobert-hf`: what a user did wrong is one message, and its help answers at once."""

import os
import subprocess
import sys

import pytest
import torch

import neobert_hf_cli
from neobert_hf.common.help import help_of
from neobert_hf.data.sources import read_rows
from tests.helpers.examples import command_of
from tests.helpers.models import ROOT


def interrupted(args) -> None:
    raise KeyboardInterrupt


WRONG_MODEL = "--model /nowhere/model --data rows.csv --output_dir run --use_cpu".split()


@pytest.mark.parametrize(
    ("main", "found"),
    [
        (lambda args: list(read_rows("/nowhere.jsonl")), "/nowhere.jsonl"),
        (None, "/nowhere/model"),
        (interrupted, "130"),
        (lambda args: torch.zeros(2) @ torch.zeros(3), RuntimeError),
        (lambda args: torch.tensor([[1], [1, 2]]), ValueError),
        (lambda args: {}["x"], KeyError),
    ],
)
def test_only_what_the_package_refuses_is_one_message(main, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if main is not None:
        function = type("Function", (), {"main": staticmethod(main)})
        monkeypatch.setattr(neobert_hf_cli, "load", lambda command: function)
    with pytest.raises(SystemExit if isinstance(found, str) else found) as ended:
        neobert_hf_cli.run("classify", WRONG_MODEL)
    assert not isinstance(found, str) or found in str(ended.value)


@pytest.mark.parametrize("command", neobert_hf_cli.PLACES)
def test_the_stored_help_is_that_of_the_settings(command):
    stored = neobert_hf_cli.PACKAGE / "help" / f"{command}.txt"
    assert stored.read_text() == help_of(neobert_hf_cli.load(command)), "run `make help`"


@pytest.mark.parametrize("arguments", [["-m", "neobert_hf_cli", "--help"], ["examples/run_classification.py", "-h"]])
def test_the_help_takes_less_than_a_second_of_cpu(arguments):
    before = os.times()
    found = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    after = os.times()
    assert "classify" in found.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1


def test_every_example_but_the_demonstrations_is_a_command():
    others = {"demo", "sample_data", "onnx_inference", "semantic_search"}
    scripts = {file.stem for file in (ROOT / "examples").glob("*.py")} - others
    assert {command_of(script) for script in scripts} <= neobert_hf_cli.PLACES.keys()
