from pathlib import Path

import pytest

from tests.helpers.pretraining_runs import run, small_flags


@pytest.fixture(scope="session")
def finished(prepared, tmp_path_factory) -> Path:
    """The folder of a small run to the end, for all tests: to be copied and compared with, never changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(small_flags(prepared, folder))
    return folder
