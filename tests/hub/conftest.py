"""The packages of npm that two tests share."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


JAVASCRIPT = Path(__file__).parent / "transformers_js"


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The pinned packages, installed once and kept."""
    installed = JAVASCRIPT / "node_modules"
    if shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    if not (installed / "playwright-core").is_dir():
        partial = JAVASCRIPT / "node_modules.partial"
        partial.mkdir(exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(JAVASCRIPT / name, partial / name)
        # Its install script would fetch CUDA libraries; the binding for the CPU is in the package.
        environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL": "skip"}
        command = ["npm", "ci", "--ignore-scripts"]
        done = subprocess.run(command, cwd=partial, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install transformers.js here: {done.stderr[-300:]}")
        shutil.rmtree(installed, ignore_errors=True)
        (partial / "node_modules").rename(installed)
        shutil.rmtree(partial)
    return installed
