"""What a user did wrong ends a script with one message; every other error keeps its traceback."""

import subprocess
import sys

import pytest
import torch

from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.tables import read_rows
from neobert_hf.embeddings.arguments import RecipeArguments
from tests.helpers.models import ROOT, small_model


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (lambda: parse_config(RecipeArguments, args=["--model", "m", "--datset", "d"]), "--datset"),
        (lambda: list(read_rows("/nowhere.jsonl")), "/nowhere.jsonl"),
    ],
)
def test_what_the_package_refuses_is_one_message(main, message):
    with pytest.raises(SystemExit, match=message):
        run_script(main)


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError),
        (lambda: small_model().get_submodule("nowhere"), AttributeError),
        (lambda: torch.tensor([[1], [1, 2]]), ValueError),
        (lambda: {}["x"], KeyError),
    ],
)
def test_what_nobody_refuses_keeps_its_traceback(main, kind):
    with pytest.raises(kind):
        run_script(main)


def test_a_recipe_with_a_wrong_model_prints_no_traceback(tmp_path):
    flags = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.csv"), "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "examples" / "run_classification.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr.splitlines()[-1]
