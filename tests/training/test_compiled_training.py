"""`torch_compile: true` of a recipe compiles the model: the same run, on one process and on several."""

import json
import re

import pytest
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from tests.helpers.pretraining_runs import run, small_flags, start_sharded, start_together


SETTINGS = {"dropout": 0.0, "max_steps": 4, "save_steps": 4}
# Without code generation: that takes minutes on a CPU.
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


def assert_same_run(first, second) -> None:
    tensors, others = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    assert tensors.keys() == others.keys()
    assert all((tensors[name] - others[name]).abs().max() <= 2e-5 for name in tensors)
    losses = [
        [entry.get("loss") for entry in json.loads((folder / "log.json").read_text())] for folder in (first, second)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.fixture
def flags(prepared, tmp_path):
    return lambda name, **changes: small_flags(prepared, tmp_path / name, **SETTINGS | changes)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_run_is_the_same_run(flags, tmp_path, checkpointing):
    run(flags("plain"))
    counters.clear()
    run(flags("compiled", **COMPILED, gradient_checkpointing=checkpointing))
    assert counters["stats"]["unique_graphs"] >= 1
    assert_same_run(tmp_path / "compiled", tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("start", [start_together, start_sharded])
def test_several_processes_compile(flags, tmp_path, start):
    """DDP and FSDP2."""
    run(flags("plain"))
    output = start(flags("compiled", **COMPILED)).finish()
    graphs = [int(number) for number in re.findall(r"(\d+) graphs were compiled", output)]
    assert len(graphs) == 2 and min(graphs) >= 1
    assert_same_run(tmp_path / "compiled", tmp_path / "plain")
