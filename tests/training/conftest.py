import shutil
from pathlib import Path

import pytest

from tests.helpers.pretraining_runs import run, small_flags


@pytest.fixture(scope="session")
def held_out(prepared, tmp_path_factory) -> dict:
    """Two folders of held-out text, the second a copy of the first, read after steps 6 and 12."""
    second = shutil.copytree(prepared / "validation", tmp_path_factory.mktemp("held_out") / "second")
    return {"validation_data": f"{prepared / 'validation'} {second}", "eval_strategy": "steps", "eval_steps": 6}


@pytest.fixture(scope="session")
def finished(prepared, held_out, tmp_path_factory) -> Path:
    """The folder of a small run to the end, for all tests: to be copied and compared with, never changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(small_flags(prepared, folder, **held_out))
    return folder
