import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def forked_scripts(monkeypatch):
    """What benchmarks run by `pretraining.run`; tests/evaluation/pseudo_perplexity has the same in a new Python."""
    # Not at the top: tests for a GPU are found without the packages of training.
    import pretraining

    from tests.helpers.pretraining_runs import start

    def run_forked(command: list[str], *, stdout, stderr, env: dict[str, str]) -> subprocess.CompletedProcess:
        process = start(command[2:], script=Path(command[1]).stem)
        (code,) = process.end()
        stdout.write(process.output)
        return subprocess.CompletedProcess(command, code)

    stand_in = SimpleNamespace(run=run_forked, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(pretraining, "subprocess", stand_in)
