"""What runs on a GPU needs torch and Transformers only: images of GPUs have no more, and no network to install it."""

import os
import subprocess
import sys

from tests.helpers.models import ROOT


# Of a process in which every other package is hidden.
ONLY_TORCH = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in ("tests/helpers/gpu_image", "benchmarks")),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
SCRIPT = """
import importlib.util, sys
import pytest

assert not any(map(importlib.util.find_spec, ("datasets", "accelerate", "matplotlib", "xxhash")))
assert all(map(importlib.util.find_spec, ("torch", "transformers", "neobert_hf", "tqdm")))
import forward, throughput, throughput_report
try:
    throughput.main(["--help"])
except SystemExit as end:
    assert not end.code
sys.exit(pytest.main("--collect-only -q -m gpu -p no:cacheprovider".split()))
"""


def test_speed_is_measured_and_gpu_tests_are_found_with_torch_and_transformers_alone():
    found = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=ONLY_TORCH, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert "--training_lengths" in found.stdout and "test_gpu_gradients_and_leaks" in found.stdout
    assert " error" not in found.stdout
