"""`make gpu` on the branches of a GPU, which a CPU never takes, with stand-ins for driver and kernels."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models import ROOT


# What a process of its own runs. The modules of the benchmarks read these names of forward.py when they are imported.
SCRIPT = """
import forward, torch
forward.CUDA, forward.DEVICE, forward.DTYPE = True, "cpu", torch.bfloat16
from tests.helpers import gpu_on_cpu
gpu_on_cpu.main(version={version})
"""
FLAGS = "--models NeoBERT ModernBERT-base --minutes 9 --test_minutes 0 --layers 1 --first_lengths 8 --lengths 8"
FLAGS += " --longest 16 --least_tokens 32 --most_tokens 128"
NO_BACKWARD = "NotImplementedError: FlexAttention does not support backward on CPU"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")))}


def measure(folder: Path, version: int, *flags: str) -> tuple[dict, str]:
    """What the command has measured with this version of FlashAttention, and its page."""
    command = [sys.executable, "-c", SCRIPT.format(version=version), *FLAGS.split(), "--output_dir", str(folder)]
    subprocess.run([*command, *flags], cwd=ROOT, env=ENVIRONMENT, check=True)
    return json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict, str]:
    return measure(tmp_path_factory.mktemp("gpu"), 3)


@pytest.mark.slow
def test_nothing_fails_on_the_branches_of_a_gpu(found):
    content, page = found
    assert not content["errors"] and not content["begun"]
    assert content["settings"]["machine"] == "NVIDIA H200" and content["settings"]["dtype"] == "bfloat16"
    assert "Nothing." in page and "data sheet says 989" in page


@pytest.mark.slow
def test_nothing_fails_where_no_package_of_flash_attention_is_there(tmp_path):
    """As on a bare image: NeoBERT runs torch's own, ModernBERT `flex_attention`, whose backward pass needs a GPU."""
    # With two layers ModernBERT has one of local attention.
    content, _ = measure(tmp_path, 0, "--layers", "2", "--models", "NeoBERT", "ModernBERT-base")
    assert not content["begun"]
    for name, failure in content["errors"].items():
        assert name.startswith("ModernBERT-base flex_attention") and NO_BACKWARD in failure["error"], (name, failure)
    for compiled, layout in itertools.product((False, True), ("full", "ragged")):
        assert f"ModernBERT-base flex_attention {compiled} forward 8 {layout}" in content["cells"]
        for mode in ("forward", "training"):
            assert f"NeoBERT sdpa {compiled} {mode} 8 {layout}" in content["cells"]
    assert content["numbers"]["attention varlen 8"]["seconds"] > 0
    assert not any("FlashAttention 3" in name for name in content["numbers"])


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
