"""Promises 8 and 9: a run whose blocks are compiled, as configs/accelerate asks for on GPUs, is the same run.

`aot_eager` makes the graphs, forward and backward, and generates no code.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import task_runs
from tests.helpers.examples import load_example
from tests.helpers.models import save_encoder
from tests.helpers.pretraining_runs import (
    ScriptProcesses,
    assert_same_weights,
    interrupted_copy,
    launched_environments,
    run,
    small_flags,
    weights,
)
from tests.helpers.small_tokenizer import small_tokenizer
from tests.pretraining.test_distributed import assert_close, train_sharded


COMPILED = ("--dynamo_backend", "aot_eager", "--dynamo_use_regional_compilation", "--dynamo_use_dynamic")
SETTINGS = {"dropout": 0.0, "max_steps": 20, "save_steps": 10}


@pytest.fixture
def flags(prepared, tmp_path):
    """The command line of a run in a folder of this name."""

    def build(name: str, **changes) -> list[str]:
        return small_flags(prepared, tmp_path / name, validation_data=prepared / "validation", **SETTINGS | changes)

    return build


def compiled(flags: list[str], config: str = "cpu_ddp.yaml", processes: int = 1, **options) -> str:
    """Train in compiled blocks and return what was printed."""
    return ScriptProcesses(flags, launched_environments(config, processes, *COMPILED), **options).finish()


def test_twenty_steps_are_those_of_a_plain_run(flags, tmp_path):
    """In float32. What is compiled is said, and a checkpoint has the names of any other."""
    run(flags("plain"))
    output = compiled(flags("compiled"))
    assert "compiled block by block (aot_eager)" in output
    assert re.search(r"The first step with its compiling took \d+ s", output)
    assert_close(tmp_path / "compiled", tmp_path / "plain", weights=1e-5)
    names = [set(load_file(tmp_path / name / "checkpoint-10/model.safetensors")) for name in ("compiled", "plain")]
    assert names[0] == names[1]
    # A run may go on without being compiled.
    interrupted_copy(tmp_path / "compiled", tmp_path / "mixed", after=10)
    run(flags("mixed"))
    assert_close(tmp_path / "mixed", tmp_path / "plain", weights=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiled_run_resumes_with_the_same_bits(processes, flags, tmp_path):
    """With dropout, in one process and in two with DDP."""
    changes = {"dropout": 0.1, "max_steps": 6, "save_steps": 3}
    compiled(flags("whole", **changes), processes=processes)
    interrupted_copy(tmp_path / "whole", tmp_path / "resumed", after=3)
    assert "resuming from" in compiled(flags("resumed", **changes), processes=processes)
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["cpu_ddp", "fsdp2"])
def test_two_processes_are_the_same_run(engine, flags, tmp_path):
    """With DDP and FSDP2, which goes on without being compiled."""
    changes = {"max_steps": 6, "save_steps": 3}
    run(flags("plain", **changes))
    script = {"script": train_sharded} if engine == "fsdp2" else {}
    output = compiled(flags("compiled", **changes), f"{engine}.yaml", processes=2, **script)
    assert "compiled block by block" in output and ("are sharded" in output) == (engine == "fsdp2")
    assert_close(tmp_path / "compiled", tmp_path / "plain", weights=2e-5)
    interrupted_copy(tmp_path / "compiled", tmp_path / "mixed", after=3)
    plain = launched_environments(f"{engine}.yaml", 2)
    assert "resuming from" in ScriptProcesses(flags("mixed", **changes), plain, **script).finish()
    assert_close(tmp_path / "mixed", tmp_path / "plain", weights=2e-5)


@pytest.mark.slow
def test_fine_tuning_is_the_same_run(tmp_path):
    """Whose loss of a micro-batch depends on whether the model trains, which after an evaluation it does again."""
    encoder = save_encoder(tmp_path / "encoder", small_tokenizer())
    rows = task_runs.write_json_lines(tmp_path / "rows.jsonl", task_runs.tagged_rows(60, seed=0, length=5))
    # Adam would make much of what float32 rounds.
    changes = {"classifier_dropout": 0, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 100.0, "eval_steps": 3}
    changes |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
    load_example("run_token_classification").main(task_runs.flags(tmp_path / "plain", encoder, rows, **changes))
    compiled(task_runs.flags(tmp_path / "compiled", encoder, rows, **changes), script="run_token_classification")
    found, expected = weights(tmp_path / "compiled"), weights(tmp_path / "plain")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
