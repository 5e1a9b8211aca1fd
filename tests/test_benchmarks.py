"""The benchmark runs from its command line; what it measures is never asserted."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_forward_benchmark(tmp_path):
    flags = ["--layers", "1", "--repeats", "1", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/forward.py", *flags], cwd=ROOT, check=True)
    results = json.loads(next(tmp_path.glob("forward_*.json")).read_text())
    assert {"Full batches", "Ragged batches", "Training step"} < set(results)
    text = next(tmp_path.glob("forward_*.md")).read_text()
    assert "--layers 1" in text and text.count("## ") == 3
