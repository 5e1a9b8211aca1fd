"""Small runs of examples/pretrain.py, in this process or one of their own, for the tests of the recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


pretrain = load_example("pretrain")


# Mixture and dropout, so that a resume has to restore every source of randomness.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "dropout": 0.1,
    "decoder_init_range": 0.2,
    "embedding_init_range": 1.0,
    "max_length": 64,
    "micro_batch_tokens": 256,
    "global_batch_tokens": 1024,
    "min_lengths": "0 60",
    "probabilities": "0.5 0.5",
    "shuffle_shards": 2,
    "max_steps": 12,
    "warmup_steps": 2,
    "seed": 0,
    "learning_rate": 5e-3,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_steps": 3,
    "report_to": "none",
    "peak_tflops": 0.1,
}


def to_flags(settings: dict) -> list[str]:
    return [
        word for name, value in settings.items() if value is not None for word in (f"--{name}", *str(value).split())
    ]


def run(flags: list[str]) -> list[dict]:
    """Train in this process and return the log."""
    pretrain.main(flags)
    return json.loads((Path(flags[1]) / "log.json").read_text())


def start(flags: list[str], prefix: str = "", **environment) -> subprocess.Popen:
    """Train in a process of its own."""
    command = f"{prefix} exec {sys.executable} {ROOT / 'examples' / 'pretrain.py'} {' '.join(flags)}"
    return subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
