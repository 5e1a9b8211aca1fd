import subprocess
from pathlib import Path
from types import SimpleNamespace

import pretraining
import pytest

from tests.helpers.pretraining_runs import start


def run_forked(command: list[str], *, stdout, stderr, env: dict[str, str]) -> subprocess.CompletedProcess:
    """In place of `subprocess.run` for `[python, script, *flags]`; see `pretraining_runs`."""
    process = start(command[2:], script=Path(command[1]).stem)
    (code,) = process.end()
    stdout.write(process.output)
    return subprocess.CompletedProcess(command, code)


@pytest.fixture(autouse=True)
def forked_scripts(monkeypatch):
    """What benchmarks run by `pretraining.run`; tests/evaluation/pseudo_perplexity has the same in a new Python."""
    stand_in = SimpleNamespace(run=run_forked, STDOUT=pretraining.subprocess.STDOUT)
    monkeypatch.setattr(pretraining, "subprocess", stand_in)
