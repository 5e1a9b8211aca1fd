"""Promise 8: every file of configs/accelerate says what Accelerate understands, and starts the engine of its name.

Accelerate refuses unknown keys at the top of a file only: below, under fsdp_config and deepspeed_config, it drops them.
"""

import dataclasses
import re

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import CONFIGS


# What Accelerate's launcher calls differently from its plugin, which reads it from the environment.
FSDP_NAMES = {"version": "fsdp_version", "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}


def load(path):
    """The launcher's settings from a file; an error for whatever it would ignore."""
    config = load_config_from_file(str(path))
    settings = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    nested = {"fsdp_config": FullyShardedDataParallelPlugin, "deepspeed_config": DeepSpeedPlugin}
    for section, plugin in nested.items():
        fields = {field.name for field in dataclasses.fields(plugin)}
        for key in getattr(config, section):
            name = FSDP_NAMES.get(key.removeprefix("fsdp_"), key.removeprefix("fsdp_"))
            assert name in fields and hasattr(settings, key), f"{path.name}: Accelerate never reads {section}.{key}"
    assert all(hasattr(settings, key) for key in config.dynamo_config)
    # Left out, these become "auto", which the Trainer fills in from its own arguments.
    assert not {"gradient_accumulation_steps", "gradient_clipping"} & set(config.deepspeed_config)
    return _validate_launch_command(settings)[0]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_starts_the_engine_of_its_name(path):
    settings = load(path)
    fsdp, deepspeed = path.stem.startswith("fsdp"), path.stem.startswith("deepspeed")
    assert (settings.use_fsdp, settings.use_deepspeed) == (fsdp, deepspeed)
    assert settings.multi_gpu == (settings.num_processes > 1 and not (fsdp or deepspeed))
    assert settings.num_processes == {"cpu": 1, "cpu_ddp": 2, "gpu": 1, "multi_node": 64}.get(path.stem, 8)
    compiled = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True, "dynamo_use_dynamic": True}
    compiled = compiled if path.stem in ("gpu", "ddp", "fsdp2") else {"dynamo_backend": "no"}
    assert {name: getattr(settings, name) for name in compiled} == compiled
    # The recipe says which precision it wants; these engines want it from the launcher as well.
    assert settings.mixed_precision == ("bf16" if fsdp or deepspeed else "no")


def test_sbatch_asks_for_what_the_file_says():
    text = (ROOT / "examples" / "slurm" / "pretrain.sbatch").read_text()
    slurm = dict(re.findall("^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    settings = load(CONFIGS / "multi_node.yaml")
    assert int(slurm["nodes"]) == settings.num_machines
    assert int(slurm["nodes"]) * int(slurm["gpus-per-node"]) == settings.num_processes
    assert (slurm["ntasks-per-node"], slurm["signal"], "requeue" in slurm) == ("1", "TERM@120", True)
