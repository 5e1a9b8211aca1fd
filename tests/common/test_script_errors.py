"""What a user did wrong ends a script with one message; every other error keeps its traceback."""

import pytest
import torch

from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.tables import read_rows
from neobert_hf.embeddings.arguments import RecipeArguments
from tests.helpers.examples import load_example


WRONG_MODEL = "--model /nowhere/model --data rows.csv --output_dir run --use_cpu".split()


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (lambda: parse_config(RecipeArguments, args=["--model", "m", "--datset", "d"]), "--datset"),
        (lambda: list(read_rows("/nowhere.jsonl")), "/nowhere.jsonl"),
        (lambda: load_example("run_classification").main(WRONG_MODEL), "/nowhere/model"),
    ],
)
def test_what_the_package_refuses_is_one_message(main, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        run_script(main)


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError),
        (lambda: torch.tensor([[1], [1, 2]]), ValueError),
        (lambda: {}["x"], KeyError),
    ],
)
def test_what_nobody_refuses_keeps_its_traceback(main, kind):
    with pytest.raises(kind):
        run_script(main)


def test_an_interruption_before_training_has_the_status_of_one(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_script(interrupted)
    assert ended.value.code == 130 and "the same command goes on" in capsys.readouterr().err
