import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def forked_scripts(monkeypatch):
    """What benchmarks run by `runner.run_script`, in forked processes."""
    # Not at the top: tests for a GPU are found without the packages of training.
    import runner

    from tests.helpers.pretraining_runs import start

    def run_forked(command: list[str], *, stdout, stderr, env: dict[str, str]) -> subprocess.CompletedProcess:
        process = start(command[2:], script=Path(command[1]).stem)
        (code,) = process.end()
        stdout.write(process.output)
        return subprocess.CompletedProcess(command, code)

    stand_in = SimpleNamespace(run=run_forked, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(runner, "subprocess", stand_in)
