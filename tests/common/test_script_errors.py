"""Which errors of a script are a message for its user, and which are a traceback for a bug report."""

import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch

from neobert_hf.common.results import ResultError
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.tables import read_rows
from neobert_hf.embeddings.arguments import RecipeArguments
from neobert_hf.search.index import open_index
from tests.helpers.models import ROOT, small_model


def test_what_the_package_refuses_is_one_message(tmp_path):
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "x").touch()
    for refuse, message in (
        (lambda: parse_config(RecipeArguments, args=["--model", "m", "--datset", "d"]), "--datset"),
        (lambda: list(read_rows(str(tmp_path / "nowhere.jsonl"))), "nowhere.jsonl' matches no file"),
        (lambda: open_index(str(tmp_path / "junk")).create({"dimension": 2}), "choose a folder only for the index"),
    ):
        with pytest.raises(SystemExit, match=message) as ended:
            run_script(refuse)
        assert "\n" not in str(ended.value)


def test_an_error_of_ours_from_another_process_is_one_message():
    """It arrives without its traceback."""
    answer = Future()
    answer.set_exception(ResultError("The file is damaged."))
    with pytest.raises(SystemExit, match="The file is damaged."):
        run_script(answer.result)


def test_what_nobody_refuses_keeps_its_traceback():
    """Errors of libraries, of Python, and of this package's own assumptions."""
    for fail, kind in (
        (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError),
        (lambda: int("x"), ValueError),
        (lambda: small_model().get_submodule("nowhere"), AttributeError),
        (lambda: {}["x"], KeyError),
    ):
        with pytest.raises(kind):
            run_script(fail)


def test_a_recipe_with_a_wrong_model_prints_no_traceback(tmp_path):
    flags = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.csv"), "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "examples" / "run_classification.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"run_classification.py: `model` is '{tmp_path}', a folder without")
