"""Checks of a checkpoint's tensors when a model is loaded or saved: errors name the tensor.

The plan by which tensors are divided among processes is also checked.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from .configuration_neobert import MODEL_CLASSES


# Modules on top of the backbone, for tasks that a checkpoint need not have been trained for.
TASK_HEADS = ("dense", "classifier", "qa_outputs")

BLOCKS = "transformer_encoder.*."
# Pairs of matrices in a block that a plan must divide together: on each process, the part of the second matrix takes
# the output of the part of the first.
DIVIDED_TOGETHER = (("qkv", "wo"), ("ffn.w12", "ffn.w3"))

STORED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Checked first: nearly every tensor with different values has them among these already.
FIRST_VALUES = 1024
LOADING = RLock()


@contextmanager
def loading(where: object) -> Iterator[None]:
    """Let one thread load at a time, and name the checkpoint in errors about damaged files.

    While a model loads, Transformers changes torch's default dtype and switches off the tying of weights, both for the
    whole process. If two threads load at once, each restores the state that it found. The process could then keep a
    default dtype of float16, and later models a decoder of random numbers (seen with transformers 5.23.0).
    """
    with LOADING:
        try:
            yield
        except SafetensorError as error:
            raise ValueError(f"The weights of {where} are damaged: {error}.") from error


def check_division(model: nn.Module) -> None:
    """Refuse tensor parallelism that splits heads, or splits a fused matrix in a way that does not match its layout.

    Some of these plans would run, but give wrong results.

    Raises:
        ValueError: naming the processes and heads, or the rules of the plan.
    """
    config, processes = model.config, model.tp_size or 1
    if processes == 1:
        return
    plan = {name[name.find(BLOCKS) :]: style for name, style in model.tp_plan.items() if BLOCKS in name}
    for parts in DIVIDED_TOGETHER:
        names = [f"{BLOCKS}{part}" for part in parts]
        given = {name: plan.pop(name, "replicate") for name in names}
        wanted = {name: config.base_model_tp_plan[name] for name in names}
        whole = dict.fromkeys(names, "replicate")
        if given not in (wanted, whole):
            raise ValueError(
                f"`tp_plan` has {given}; it must have {wanted}, or {whole}: the columns of the second matrix belong to "
                "the rows of the first, which are ordered by head in `qkv`, and by gate and input in `w12`."
            )
    if plan:
        raise ValueError(f"`tp_plan` has {plan}; inside a block it may name {sum(DIVIDED_TOGETHER, ())} only.")
    heads = config.num_attention_heads
    if heads % processes:
        allowed = [number for number in range(2, heads + 1) if heads % number == 0]
        raise ValueError(
            f"`tp_size` is {processes}, but the model has {heads} attention heads. Each head must belong to one "
            f"process, so `tp_size` must be one of {allowed}."
        )


def tensor_fault(name: str, tensor: torch.Tensor) -> str | None:
    """What is wrong with a stored tensor; None if nothing is.

    Every value that a trained model stores is a finite floating-point number. A bias starts at zero and may stay zero.
    A weight of zeros has no effect, and a matrix of one repeated value cannot tell its inputs apart: both come from
    files that were allocated but never filled, not from training.
    """
    if tensor.dtype not in STORED_DTYPES:
        return f"of dtype {tensor.dtype}"
    if name.endswith(".weight") and _is_one_value(tensor):
        zero = tensor.flatten()[0] == 0
        if zero or tensor.ndim > 1:
            return "all zero" if zero else "one value only"
    # If the sum is finite, all terms are, and summing takes a tenth of the time. A sum that overflows proves nothing.
    if tensor.sum(dtype=torch.float32).isfinite() or tensor.isfinite().all():
        return None
    return "not finite"


def _is_one_value(tensor: torch.Tensor) -> bool:
    values = tensor.flatten()
    return len(values) > 1 and all(bool((part == values[0]).all()) for part in (values[:FIRST_VALUES], values))


def is_stored_in_full(value: Any) -> bool:
    """Whether the file holds all values of an unpickled tensor. A stride of 0 can turn four bytes into terabytes."""
    if not isinstance(value, torch.Tensor):
        return True
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


def check_archive(file: str | Path) -> None:
    """Refuse a pickle whose archive is compressed: a few bytes may unpack to more than fits into memory.

    Raises:
        ValueError: if the entries are larger than the file. `torch.save` does not compress them.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > Path(file).stat().st_size:
            raise ValueError(
                f"{file} is compressed and would unpack to {size:,} bytes. Only files that `torch.save` wrote are read."
            )


def merge_shards(tensors: dict[str, torch.Tensor], further: dict[str, torch.Tensor], file: str | Path) -> None:
    """Add the tensors of one more file to those of earlier files.

    Raises:
        ValueError: if files hold different values under one name. Transformers would use those of the last file.
    """
    for name in tensors.keys() & further.keys():
        if tensors[name].dtype != further[name].dtype or not torch.equal(tensors[name], further[name]):
            raise ValueError(f"{file}: {name} occurs twice, with different values. Write the checkpoint again.")
    tensors |= further


def indexed_files(index: Path) -> list[Path]:
    """The files of a sharded checkpoint, from its index: a JSON file that names the file of every tensor.

    Raises:
        ValueError: if the index is damaged, or names a file that does not exist or does not lie beside the index.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not valid JSON: {error}.") from error
    for key, use in (("weight_map", "it must name the file of every tensor"), ("metadata", "loading needs it")):
        if not isinstance(content, dict) or not isinstance(content.get(key), dict):
            raise ValueError(f"{index} has no `{key}`: {use}.")
    for tensor, name in content["weight_map"].items():
        if not isinstance(name, str) or name in ("", "..") or any(separator in name for separator in "/\\:\0"):
            raise ValueError(f"{index}: the file of {tensor} is {name!r}; it must be the name of a file beside it.")
    files = sorted({index.parent / name for name in content["weight_map"].values()})
    if absent := [str(file) for file in files if not file.is_file()]:
        raise ValueError(f"{', '.join(absent)}, which {index.name} names, does not exist.")
    return files


def check_indexes(checkpoint: Any, subfolder: str) -> None:
    """Check the shard index of a local folder that Transformers would read, if it would read one."""
    folder = Path(str(checkpoint)) / subfolder
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return
        if (folder / f"{name}.index.json").is_file():
            indexed_files(folder / f"{name}.index.json")
            return


def read_checkpoint(files: list[str], read_pickle: Callable[[str], dict]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's files. Those of safetensors are memory-mapped, not yet read.

    Args:
        read_pickle: how to read a file that is not in the safetensors format.

    Raises:
        ValueError: if a file holds less than it seems to, or contradicts another one.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as content:
                further = {name: content.get_tensor(name) for name in content.keys()}
        else:
            check_archive(file)
            content = read_pickle(file)
            if not isinstance(content, dict):
                raise ValueError(f"{file} holds a {type(content).__name__}; it must hold a dictionary of tensors.")
            further = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        if partly := [name for name, tensor in further.items() if not is_stored_in_full(tensor)]:
            raise ValueError(f"{file} does not store all values of {', '.join(partly)}: sparse, or with a stride of 0.")
        merge_shards(tensors, further, file)
    return tensors


def check_size(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse a config that asks for far more values than the files hold, before the missing tensors are allocated.

    Up to twice as many pass here: there is memory for them, and `check_names` then names the missing tensors.
    """
    parameters = model.named_parameters()
    asked = sum(parameter.numel() for name, parameter in parameters if name.split(".")[0] not in TASK_HEADS)
    there = sum(tensor.numel() for tensor in tensors.values())
    if asked > 2 * there:
        raise ValueError(
            f"The config asks for {asked:,} values, but the files hold {there:,}: they belong to different models."
        )


def check_values(tensors: dict[str, torch.Tensor], info: Any) -> None:
    """Refuse damaged tensors among those that a model was loaded with; unused tensors of the files do not matter.

    Args:
        info: the loading info of Transformers, with the names that it did not use.
    """
    unused = {*info.unexpected_keys, *(key for key, *_ in info.mismatched_keys)}
    for name, tensor in tensors.items():
        # Loading may have added or removed the prefix of the backbone.
        used = unused.isdisjoint((name, f"model.{name}", name.removeprefix("model.")))
        if used and (fault := tensor_fault(name, tensor)):
            raise ValueError(f"The weights are damaged. The tensor {name} is {fault}. Download or write them again.")


def check_names(model: nn.Module, info: dict[str, Any], where: object) -> None:
    """Refuse a checkpoint with missing or additional tensors, except for heads, as described in `from_pretrained`.

    Args:
        info: the loading info of Transformers.
        where: the checkpoint, for the message.
    """
    own = {name for name, _ in model.named_children()}
    head = {name for name, _ in model.named_parameters() if name.split(".")[0] in TASK_HEADS}
    wrong = {"missing": set(info["missing_keys"])}
    new_head = head <= wrong["missing"]
    if new_head:
        wrong["missing"] -= head
    # A classifier that was trained on top of a layer that this model lacks does not belong to this model's head.
    foreign = {"decoder"} if head and not new_head else {"decoder", *TASK_HEADS}
    wrong["unknown"] = {key for key in info["unexpected_keys"] if key.split(".")[0] not in foreign - own}
    # Occurs only with ignore_mismatched_sizes=True, which is meant for heads with another number of labels.
    wrong["of another shape"] = {key for key, *_ in info["mismatched_keys"] if key.split(".")[0] not in TASK_HEADS}
    if any(wrong.values()):
        found = "; ".join(f"{kind}: {', '.join(sorted(keys))}" for kind, keys in wrong.items() if keys)
        raise ValueError(
            f"{where} does not hold a {type(model).__name__}. Tensors {found}. Load it with a class that fits; for a "
            "new decoder on a backbone, build the model from the config and set its `.model`."
        )
    check_tying(model)


def save_pretrained(model: PreTrainedModel, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
    """As in Transformers, but a model that could not be loaded is refused before anything is written.

    Raises:
        ValueError: naming the key of the config or the tensors.
    """
    # If the model has an adapter, neither the config nor the model's own weights are written.
    if not getattr(model, "_hf_peft_config_loaded", False):
        check_saved_names(model, model.state_dict() if state_dict is None else state_dict, state_dict is not None)
    return PreTrainedModel.save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)


def check_tying(model: PreTrainedModel) -> None:
    """Refuse a decoder whose weight is shared with the embeddings although the config says it is not, or vice versa."""
    if (decoder := model.get_output_embeddings()) is None:
        return
    weights, tied = (decoder.weight, model.get_input_embeddings().weight), model.config.tie_word_embeddings
    # Quantised, sharded or offloaded weights are tied by the libraries that made them so.
    if any(type(weight) is not nn.Parameter or weight.is_meta for weight in weights):
        return
    if (weights[0] is weights[1]) != tied:
        has, instead = ("a weight of its own", False) if tied else ("the weight of the embeddings", True)
        raise ValueError(
            f"`tie_word_embeddings` is {tied}, but the decoder has {has}: set it to {instead}, or change the decoder."
        )


def check_saved_names(model: PreTrainedModel, tensors: dict[str, Any], given: bool) -> None:
    """Refuse a model that has other tensors than its config asks for, or damaged ones.

    Args:
        tensors: the tensors to save, by name.
        given: whether the caller chose them, so that they may be only a part of the model.
    """
    config = model.config.as_loaded()
    if type(model).__name__ not in MODEL_CLASSES.values():
        return  # A class of the user, whose weights may depend on more than the config.
    if not given:
        check_tying(model)
    with torch.device("meta"):
        asked = {name: tuple(tensor.shape) for name, tensor in type(model)(config).state_dict().items()}
    parts = {name.rpartition(".")[0] for name in tensors}
    if parts & asked.keys() or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        return  # Quantised: each weight is stored in several parts, which the quantisation library loads.
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = {
        f"{name} is {there[name]}, not {asked[name]}" for name in asked.keys() & there if asked[name] != there[name]
    }
    wrong |= {f"{name} is unknown" for name in there.keys() - asked}
    wrong |= set() if given else {f"{name} is missing" for name in asked.keys() - there}
    if wrong:
        raise ValueError(
            f"The weights are not those that the config asks for, so the saved model could not be loaded: "
            f"{'; '.join(sorted(wrong))}. Change the model together with `model.config`, or build one from the config."
        )
    for name, tensor in tensors.items():
        # Tensors of other classes are sharded among processes, and those on the meta device are offloaded.
        if type(tensor) is torch.Tensor and not tensor.is_meta and (fault := tensor_fault(name, tensor)):
            raise ValueError(f"The tensor {name} is {fault}: the model could not be loaded again. Nothing was written.")
