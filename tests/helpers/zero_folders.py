"""Checkpoint folders as DeepSpeed 0.16.3 writes them, made by plain `torch.save` from given weights."""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from types import ModuleType

import pytest
import torch


class ZeroStageEnum(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self):
        self.cur_scale = 1.0


@dataclass
class fragment_address:
    numel: int
    start: int


# The files name these by DeepSpeed's modules, which are not there when they are read.
MODULES = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


def save(content, file):
    with pytest.MonkeyPatch.context() as patch:
        for cls, name in MODULES.items():
            for end in [index for index, letter in enumerate(name + ".") if letter == "."]:
                patch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
            setattr(sys.modules[name], cls.__name__, cls)
            patch.setattr(cls, "__module__", name)
        torch.save(content, file)


def write_zero_folder(folder, weights, stage, world, dtype=torch.float32, groups=1, tag="7"):
    """Write `folder / tag` and `latest` for ZeRO `stage` of `world` processes.

    Args:
        dtype: of the forward pass. With bfloat16 and stage 0, DeepSpeed's own optimizer for it keeps float32 parts.
        groups: 2 puts norms and biases in a parameter group of their own.
    """
    target = folder / tag
    target.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    flat_names = [list(weights)]
    if groups == 2:
        flat_names = [[name for name in weights if (weights[name].ndim > 1) == wide] for wide in (True, False)]
    has_parts = stage > 0 or dtype == torch.bfloat16
    shapes = [OrderedDict((name, weights[name].shape) for name in names) for names in flat_names]
    module = OrderedDict((name, torch.empty(0) if stage == 3 else x.to(dtype)) for name, x in weights.items())
    state = {
        "module": module,
        "buffer_names": [],
        "optimizer": None if has_parts else {"state": {}, "param_groups": []},
        "param_shapes": shapes if has_parts else None,
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "sparse_tensor_module_names": set(),
        "global_steps": 7,
        "dp_world_size": world,
        "ds_version": "0.16.3",
    }
    for rank in range(world if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        save(state, target / f"{name}mp_rank_00_model_states.pt")
    if has_parts:
        parts = cut_parameters(weights, flat_names, world) if stage == 3 else cut_groups(weights, flat_names, world)
        prefix = "bf16_" if dtype == torch.bfloat16 else ""
        for rank, part in enumerate(parts):
            file = target / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            save({"optimizer_state_dict": optimizer_state(part, stage, world), "ds_version": "0.16.3"}, file)


def optimizer_state(part, stage, world):
    part = [torch.nn.Parameter(vector.clone()) for vector in part]
    state = {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}
    if stage == 3:
        return state | {"zero_stage": ZeroStageEnum.weights, "partition_count": world, "fp32_flat_groups": part}
    state |= {
        "base_optimizer_state": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": []},
        "single_partition_of_fp32_groups": part,
        "partition_count": [world] * len(part),
        "param_slice_mappings": [OrderedDict(any=fragment_address(numel=1, start=0))],
    }
    return state | ({"zero_stage": ZeroStageEnum(stage)} if stage else {})


def cut_groups(weights, flat_names, world):
    """Of each group, one vector in `world` equal parts; padding, at the end of the last, is not stored."""
    parts = [[] for _ in range(world)]
    for names in flat_names:
        flat = torch.cat([weights[name].flatten() for name in names])
        aligned = -(-len(flat) // (2 * world)) * 2 * world
        for rank in range(world):
            parts[rank].append(flat[rank * aligned // world : (rank + 1) * aligned // world])
    return parts


def cut_parameters(weights, flat_names, world):
    """Every parameter in `world` equal parts, the last one padded; a process's parts in two sub-groups."""
    parts = [[] for _ in range(world)]
    for name in sum(flat_names, []):
        tensor = weights[name]
        size = -(-prod(tensor.shape) // world)
        padded = torch.cat([tensor.flatten(), torch.full((size * world - tensor.numel(),), 99.0)])
        for rank in range(world):
            parts[rank].append(padded[rank * size : (rank + 1) * size])
    half = len(weights) // 2
    return [[torch.cat(part[:half]), torch.cat(part[half:])] for part in parts]
