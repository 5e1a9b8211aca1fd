"""What a user did wrong ends a script with one message; every other error keeps its traceback."""

import pytest
import torch

from neobert_hf.common.script_errors import run_script
from neobert_hf.data.sources import read_rows
from tests.helpers.examples import load_example


def interrupted() -> None:
    raise KeyboardInterrupt


WRONG_MODEL = "--model /nowhere/model --data rows.csv --output_dir run --use_cpu".split()


@pytest.mark.parametrize(
    ("main", "found"),
    [
        (lambda: list(read_rows("/nowhere.jsonl")), "/nowhere.jsonl"),
        (lambda: load_example("run_classification").main(WRONG_MODEL), "/nowhere/model"),
        (interrupted, "130"),
        (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError),
        (lambda: torch.tensor([[1], [1, 2]]), ValueError),
        (lambda: {}["x"], KeyError),
    ],
)
def test_only_what_the_package_refuses_is_one_message(main, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit if isinstance(found, str) else found) as ended:
        run_script(main)
    assert not isinstance(found, str) or found in str(ended.value)
