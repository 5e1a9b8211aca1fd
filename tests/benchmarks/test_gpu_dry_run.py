"""`make gpu` on the branches of a GPU, which a CPU never takes, with stand-ins for driver and kernels."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.models import ROOT


# What a process of its own runs. The modules of the benchmarks read these names of forward.py when they are imported.
SCRIPT = """
import forward, torch
forward.CUDA, forward.DEVICE, forward.DTYPE = True, "cpu", torch.bfloat16
from tests.helpers import gpu_on_cpu
gpu_on_cpu.main(version=3)
"""
FLAGS = "--models NeoBERT ModernBERT-base --minutes 9 --test_minutes 0 --layers 1 --first_lengths 8 --lengths 8"
FLAGS += " --longest 16 --least_tokens 32 --most_tokens 128"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")))}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict, str]:
    """What the command has measured, and its page."""
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-c", SCRIPT, *FLAGS.split(), "--output_dir", folder]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    return json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


@pytest.mark.slow
def test_nothing_fails_on_the_branches_of_a_gpu(found):
    content, page = found
    assert not content["errors"] and not content["begun"]
    assert content["settings"]["machine"] == "NVIDIA H200" and content["settings"]["dtype"] == "bfloat16"
    assert "Nothing." in page and "data sheet says 989" in page


@pytest.mark.slow
def test_every_kind_of_number_is_measured(found):
    numbers = found[0]["numbers"]
    kernels = ("as torch chooses", "cuDNN", "flash", "varlen", "FlashAttention 3")
    for wanted in (
        *(f"attention{way} {kernel} 8" for way in ("", " with gradients") for kernel in kernels),
        "forward of 16 tokens, CUDA graph",
        "forward of 16 tokens, compiled, CUDA graph",
        "profile of a block, training, compiled",
    ):
        assert numbers[wanted]["seconds"] > 0, wanted
    assert numbers["profile of a block, forward"]["kernels"][0]["microseconds"] > 0


@pytest.mark.slow
def test_batches_grow_until_memory_ends(found):
    """The fastest counts; memory is noted, also with gradient checkpointing. Eight rows of 16 tokens never fit."""
    cells = found[0]["cells"]
    for cell in cells.values():
        if (cell["length"], cell["layout"]) == (16, "ragged"):
            assert cell["rows"] is None and cell["rounds"] == [None] and not cell["trials"]
            continue
        tokens = [trial["rows"] * cell["length"] for trial in cell["trials"]]
        assert tokens == sorted(tokens) and max(tokens) == 64, cell
        fastest = max(cell["trials"], key=lambda trial: trial["tokens"] / trial["seconds"])
        assert cell["rows"] == fastest["rows"] == cell["rounds"][0]["rows"]
        assert cell["rounds"][0]["peak_bytes"] == 2**20
    ways = {(cell["model"], cell["attention"], cell["compiled"], cell["mode"]) for cell in cells.values()}
    names = [("NeoBERT", "sdpa"), ("ModernBERT-base", "flash_attention_3"), ("ModernBERT-base", "sdpa")]
    for name in names:
        assert {(*name, way, "forward") for way in (False, True)} | {(*name, False, "training")} <= ways
    assert ("NeoBERT", "sdpa", False, "checkpointing") in ways and ("NeoBERT", "sdpa", True, "training") in ways
