"""Weights of DeepSpeed checkpoints, without DeepSpeed and without running code from pickles.

A checkpoint is a folder `<tag>/` beside a file `latest` that names the tag. If n processes wrote it, it holds

* `mp_rank_00_model_states.pt` (ZeRO 0 to 2) or `zero_pp_rank_<i>_mp_rank_00_model_states.pt` (ZeRO 3). `module` holds
  the weights that the forward pass used, often in 16 bits; with ZeRO 3 they are empty. `param_shapes` holds the name
  and shape of every parameter, as one dictionary per parameter group, in the order in which the optimizer flattened
  them;
* `[bf16_]zero_pp_rank_<i>_mp_rank_00_optim_states.pt`: process i's part of the float32 weights.

With ZeRO 1 and 2 (and bfloat16 without ZeRO), a parameter group is one flat vector with padding at its end. It is cut
into n equal parts, of which the last may be stored without the padding. With ZeRO 3, every parameter is padded to a
multiple of n and cut separately, and each process concatenates its parts of all parameters.

References:
    Rajbhandari et al., ZeRO, 2020, arXiv 1910.02054. DeepSpeed's `utils/zero_to_fp32.py` reads the same files; this
    code was compared with it on folders that DeepSpeed 0.16.3 wrote.
"""

import pickle
import re
from math import prod
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from neobert_hf.checkpoint_checks_neobert import check_archive, is_stored_in_full
from neobert_hf.common.paths import path_inside


MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class WithoutWeights:
    """Replaces DeepSpeed objects that hold no weights when a pickle is loaded; ignores all arguments."""

    def __init__(self, *args):
        pass


# Classes that DeepSpeed's files name besides tensors and plain values, each with the class that replaces it.
READ_INSTEAD = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (WithoutWeights, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (WithoutWeights, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (WithoutWeights, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load_pickle(file: Path) -> dict[str, Any]:
    """Load what `torch.save` wrote, without running any code that the file names.

    Raises:
        ValueError: if it names functions or classes other than those of tensors, is damaged, or unpacks to more values
            than are stored in it.
    """
    check_archive(file)
    try:
        with torch.serialization.safe_globals(READ_INSTEAD):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it names {name[1]}, which is not part of a tensor" if name else "it is not a pickle of tensors"
        raise ValueError(f"{file} is refused, and no code in it was run: {reason}.") from error
    except Exception as error:  # If the file is not a pickle at all, the unpickler may raise anything.
        raise ValueError(f"{file} is damaged: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; it must hold a dictionary of tensors.")
    _check_stored(file, content)
    return content


def _check_stored(file: Path, content: dict[str, Any]) -> None:
    """Check that all tensors are stored in full, also those in nested dictionaries and lists."""
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        # A pickled list may hold itself.
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            entries = value if isinstance(value, dict) else dict(enumerate(value))
            waiting += entries.values()
            if partly := [str(name) for name, entry in entries.items() if not is_stored_in_full(entry)]:
                raise ValueError(f"{file} does not store all values of {partly[0]}: sparse, or with a stride of 0.")


def is_deepspeed(folder: Path) -> bool:
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


def read_deepspeed(folder: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    """The weights of a DeepSpeed checkpoint, in float32 if it has them in float32.

    Args:
        folder: the folder with the file `latest`, or one checkpoint itself.
        tag: the checkpoint of the folder to read; the one that `latest` names if None.

    Returns:
        Tensors by name. If training used neither ZeRO nor bfloat16, they are those of `module`, in its dtype.

    Raises:
        ValueError: if files are missing, damaged or of an unknown layout, or if the float32 weights are not those that
            the forward pass used.
    """
    folder = _checkpoint_folder(folder, tag)
    models, optimizers = _files_of_processes(folder)
    state = load_pickle(models[0])
    if not isinstance(state.get("module"), dict):
        raise ValueError(f"{models[0]} has no weights (`module`); it holds {', '.join(map(str, state))}.")
    if not optimizers:
        if state.get("param_shapes"):
            raise ValueError(
                f"{folder} lacks the optimizer states (*_optim_states.pt), which hold the float32 weights."
            )
        return dict(state["module"])
    for key in ("frozen_param_shapes", "shared_params"):
        if state.get(key):
            raise ValueError(
                f"{models[0]} has `{key}` ({', '.join(state[key])}), which NeoBERT's training does not write."
            )
    if not state.get("param_shapes"):
        raise ValueError(
            f"{models[0]} has no `param_shapes`: DeepSpeed before 0.4 wrote it, whose files are not supported."
        )
    parts, stage = _read_parts(optimizers)
    tensors = {name: state["module"][name].float() for name in state.get("buffer_names", ())}
    if stage == 3:
        return tensors | _merge_parameters(parts, state["param_shapes"], folder)
    tensors |= _merge_groups(parts, state["param_shapes"], folder)
    _check_against_module(tensors, state["module"], folder)
    return tensors


def _checkpoint_folder(folder: Path, tag: str | None) -> Path:
    if tag is None and (folder / "latest").is_file():
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
    chosen = path_inside(folder, tag, f"The tag of {folder}") if tag is not None else folder
    if not chosen.is_dir():
        tags = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise ValueError(f"{folder} has no checkpoint {tag!r}; it has {', '.join(tags) or 'none'}.")
    return chosen


def _files_of_processes(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of model states and those of optimizer states, in order of their processes."""
    models, optimizers = {}, {}
    for file in sorted(folder.glob("*.pt")):
        for pattern, files in ((MODEL_STATES, models), (OPTIMIZER_STATES, optimizers)):
            match = pattern.fullmatch(file.name)
            if match and int(match[2]) == 0:
                files[int(match[1] or 0)] = file
                break
        else:
            raise ValueError(
                f"{file} is not a file of plain or ZeRO data parallelism (pipelines, tensor parallelism, experts and "
                "universal checkpoints are not supported, since NeoBERT was not trained with them)."
            )
    for kind, files in (("model", models), ("optimizer", optimizers)):
        if absent := sorted(set(range(max(files, default=-1) + 1)) - set(files)):
            raise ValueError(f"{folder} lacks the {kind} states of process {', '.join(map(str, absent))}.")
    if not models:
        raise ValueError(f"{folder} holds no model states (mp_rank_00_model_states.pt).")
    return [models[i] for i in sorted(models)], [optimizers[i] for i in sorted(optimizers)]


def _read_parts(files: list[Path]) -> tuple[list[list[torch.Tensor]], int]:
    """The flat float32 vectors, as one list per process, and the ZeRO stage."""
    parts = []
    for file in tqdm(files, desc="reading DeepSpeed's parts", disable=None):
        state = load_pickle(file).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise ValueError(f"{file} holds no optimizer states.")
        # The optimizer for bfloat16 without ZeRO writes no stage.
        stage = state.get("zero_stage", 0)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        if key not in state or "partition_count" not in state:
            raise ValueError(f"{file} of ZeRO {stage} has no `{key}` or no `partition_count`: its layout is unknown.")
        count = state["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(files):
            raise ValueError(f"{file} was written by {count} processes, but there are files of {len(files)}.")
        parts.append([part.detach() for part in state[key]])
    return parts, stage


def _merge_groups(parts: list[list[torch.Tensor]], groups: list[dict], folder: Path) -> dict[str, torch.Tensor]:
    """ZeRO 1 and 2: a parameter group's flat vector is cut into equal parts."""
    if len(groups) != len(parts[0]):
        raise ValueError(
            f"{folder}: `param_shapes` has {len(groups)} parameter groups, but the parts have {len(parts[0])}."
        )
    tensors = {}
    for group, shapes in enumerate(groups):
        flat = torch.cat([part[group] for part in parts])
        sizes = [prod(shape) for shape in shapes.values()]
        padding = len(flat) - sum(sizes)
        # DeepSpeed rounds the size up to a multiple of 2 x processes.
        if not 0 <= padding < 2 * len(parts):
            raise ValueError(
                f"{folder}: group {group} has {len(flat):,} values, but its parameters have {sum(sizes):,}."
            )
        pieces = flat[: sum(sizes)].split(sizes)
        # Copied, since otherwise each tensor would keep the whole group in memory.
        tensors |= {name: piece.reshape(shape).clone() for (name, shape), piece in zip(shapes.items(), pieces)}
    return tensors


def _merge_parameters(parts: list[list[torch.Tensor]], groups: list[dict], folder: Path) -> dict[str, torch.Tensor]:
    """ZeRO 3: every parameter is cut into equal parts."""
    flat = [torch.cat(part) for part in parts]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    sizes = [-(-prod(shape) // len(flat)) for shape in shapes.values()]
    if wrong := [len(part) for part in flat if len(part) != sum(sizes)]:
        raise ValueError(
            f"{folder}: a process has {wrong[0]:,} values, but its part of the parameters has {sum(sizes):,}."
        )
    pieces = zip(*(process.split(sizes) for process in flat))
    return {
        name: torch.cat(piece)[: prod(shape)].reshape(shape).clone()
        for (name, shape), piece in zip(shapes.items(), pieces)
    }


def _check_against_module(tensors: dict[str, torch.Tensor], module: dict[str, torch.Tensor], folder: Path) -> None:
    """Check that the weights of the forward pass are the rounded float32 ones; parts in a wrong order would fail."""
    for name, tensor in tensors.items():
        used = module.get(name)
        if used is None or used.shape != tensor.shape:
            raise ValueError(f"{folder}: {name} is not in `module` with the shape {tuple(tensor.shape)}.")
        eps = torch.finfo(used.dtype).eps
        if not torch.allclose(tensor, used.float(), rtol=eps, atol=torch.finfo(used.dtype).tiny, equal_nan=True):
            raise ValueError(
                f"{folder}: the float32 values of {name}, rounded, are not those of `module`. The files are of "
                "different steps, or of an unknown layout."
            )
