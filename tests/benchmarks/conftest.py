from types import SimpleNamespace

import pretraining
import pytest

from tests.helpers.preloaded_scripts import run_preloaded


@pytest.fixture(autouse=True)
def preloaded_scripts(monkeypatch):
    """What benchmarks run by `pretraining.run`; tests/evaluation/pseudo_perplexity has the same without."""
    stand_in = SimpleNamespace(run=run_preloaded, STDOUT=pretraining.subprocess.STDOUT)
    monkeypatch.setattr(pretraining, "subprocess", stand_in)
