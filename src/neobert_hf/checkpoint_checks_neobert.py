"""Checks of the tensors that a checkpoint stores, before they become a model: an error that names the tensor.

The same holds before a model becomes a checkpoint.

And of the plan by which they are divided among processes.

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
# Matrices of a block that a plan divides together: each process gives the second what it has of the first.
DIVIDED_TOGETHER = (("qkv", "wo"), ("ffn.w12", "ffn.w3"))

STORED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# A tensor that is not all zero nearly always shows it here already.
FIRST_VALUES = 1024
LOADING = RLock()


@contextmanager
def loading(where: object) -> Iterator[None]:
    """Let one thread load at a time, and say of a damaged file which checkpoint has it.

    While a model loads, Transformers changes torch's default dtype and switches the tying of weights off, both for the
    whole process. Two threads at once each put back what they found, so that the process could keep a default dtype of
    float16, and later models a decoder of random numbers (seen with transformers 5.23.0).
    """
    with LOADING:
        try:
            yield
        except SafetensorError as error:
            raise ValueError(f"The weights of {where} are damaged: {error}.") from error


def check_division(model: nn.Module) -> None:
    """Refuse tensor parallelism that cuts through heads, or through a fused matrix in another way than it is laid out.

    Some of these plans would run, and give wrong numbers.

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
                f"`tp_plan` has {given}; it must have {wanted}, or {whole}: the columns of the second belong to the "
                "rows of the first, which lie head by head in `qkv` and are gate and input in `w12`."
            )
    if plan:
        raise ValueError(f"`tp_plan` has {plan}; inside a block it may name {sum(DIVIDED_TOGETHER, ())} only.")
    heads = config.num_attention_heads
    if heads % processes:
        allowed = [number for number in range(2, heads + 1) if heads % number == 0]
        raise ValueError(
            f"`tp_size` is {processes} and the model has {heads} attention heads. A head belongs to one process: "
            f"`tp_size` must be one of {allowed}."
        )


def tensor_fault(name: str, tensor: torch.Tensor) -> str | None:
    """What a stored tensor is that none of a model may be; None if nothing is wrong with it.

    Every value that a trained model stores is a finite floating-point number. A bias starts as zero and may stay it.
    A weight of zeros has no effect, and a matrix of one repeated value cannot tell its inputs apart: both come from
    files that were allocated and never filled, not from training.
    """
    if tensor.dtype not in STORED_DTYPES:
        return f"of dtype {tensor.dtype}"
    if name.endswith(".weight") and _is_one_value(tensor):
        zero = tensor.flatten()[0] == 0
        if zero or tensor.ndim > 1:
            return "all zero" if zero else "one value only"
    # A finite sum has finite terms, and takes a tenth of the time. A sum that overflows says nothing.
    if tensor.sum(dtype=torch.float32).isfinite() or tensor.isfinite().all():
        return None
    return "not finite"


def _is_one_value(tensor: torch.Tensor) -> bool:
    values = tensor.flatten()
    return len(values) > 1 and all(bool((part == values[0]).all()) for part in (values[:FIRST_VALUES], values))


def is_stored_in_full(value: Any) -> bool:
    """Whether an unpickled tensor has its numbers in the file. A stride of 0 makes terabytes of four bytes."""
    if not isinstance(value, torch.Tensor):
        return True
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


def check_archive(file: str | Path) -> None:
    """Refuse a pickle whose archive is compressed: a few bytes may unpack to more than there is memory.

    Raises:
        ValueError: if the entries are larger than the file. `torch.save` stores them as they are.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > Path(file).stat().st_size:
            raise ValueError(f"{file} is compressed: {size:,} bytes in it. Only what `torch.save` writes is read.")


def merge_shards(tensors: dict[str, torch.Tensor], further: dict[str, torch.Tensor], file: str | Path) -> None:
    """Add the tensors of one more file to those of others.

    Raises:
        ValueError: if the files hold different values under one name. Transformers would take those of the last file.
    """
    for name in tensors.keys() & further.keys():
        if tensors[name].dtype != further[name].dtype or not torch.equal(tensors[name], further[name]):
            raise ValueError(f"{file}: {name} is there twice, with different values. Write the checkpoint again.")
    tensors |= further


def indexed_files(index: Path) -> list[Path]:
    """The files of a checkpoint in several, from the JSON file that names the file of every tensor.

    Raises:
        ValueError: if it is damaged, names a file that is not there, or one elsewhere than beside itself.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is no JSON: {error}.") from error
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
    """Check the indexes of a local folder, of which Transformers reads the first that it needs."""
    folder = Path(str(checkpoint)) / subfolder
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return
        if (folder / f"{name}.index.json").is_file():
            indexed_files(folder / f"{name}.index.json")
            return


def read_checkpoint(files: list[str], read_pickle: Callable[[str], dict]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's files: of safetensors mapped, not yet read.

    Args:
        read_pickle: how to read a file that is none of safetensors.

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
    """Refuse a config that asks for far more than the files hold, before the missing tensors are allocated.

    Up to twice as much passes here: that much memory is there, and `check_names` then names the tensors.
    """
    parameters = model.named_parameters()
    asked = sum(parameter.numel() for name, parameter in parameters if name.split(".")[0] not in TASK_HEADS)
    there = sum(tensor.numel() for tensor in tensors.values())
    if asked > 2 * there:
        raise ValueError(f"The config asks for {asked:,} values and the files hold {there:,}: they are of two models.")


def check_values(tensors: dict[str, torch.Tensor], info: Any) -> None:
    """Refuse damaged tensors among those that a model was loaded with; others of the files are nobody's business.

    Args:
        info: of Transformers' loading, with the names that it did not use.
    """
    unused = {*info.unexpected_keys, *(key for key, *_ in info.mismatched_keys)}
    for name, tensor in tensors.items():
        # Loading may have added or removed the prefix of the backbone.
        used = unused.isdisjoint((name, f"model.{name}", name.removeprefix("model.")))
        if used and (fault := tensor_fault(name, tensor)):
            raise ValueError(f"The weights are damaged. The tensor {name} is {fault}. Download or write them again.")


def check_names(model: nn.Module, info: dict[str, Any], where: object) -> None:
    """Refuse a checkpoint that lacks or adds tensors, but for heads as `from_pretrained` says.

    Args:
        info: of Transformers' loading.
        where: the checkpoint, for the message.
    """
    own = {name for name, _ in model.named_children()}
    head = {name for name, _ in model.named_parameters() if name.split(".")[0] in TASK_HEADS}
    wrong = {"missing": set(info["missing_keys"])}
    new_head = head <= wrong["missing"]
    if new_head:
        wrong["missing"] -= head
    # A classifier that was trained on top of a layer which this head does not have is not this head's.
    foreign = {"decoder"} if head and not new_head else {"decoder", *TASK_HEADS}
    wrong["unknown"] = {key for key in info["unexpected_keys"] if key.split(".")[0] not in foreign - own}
    # Only with ignore_mismatched_sizes=True, which is meant for heads with another number of labels.
    wrong["of another shape"] = {key for key, *_ in info["mismatched_keys"] if key.split(".")[0] not in TASK_HEADS}
    if any(wrong.values()):
        found = "; ".join(f"{kind}: {', '.join(sorted(keys))}" for kind, keys in wrong.items() if keys)
        raise ValueError(
            f"{where} does not hold a {type(model).__name__}. Tensors {found}. Load it "
            "with a class that fits; for a new decoder on a backbone build the model from the config, set `.model`."
        )
    check_tying(model)


def save_pretrained(model: PreTrainedModel, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
    """As in Transformers, but a model that could not be loaded is refused before anything is written.

    Raises:
        ValueError: naming the key of the config or the tensors.
    """
    # With an adapter neither the config nor the model's own weights are written.
    if not getattr(model, "_hf_peft_config_loaded", False):
        check_saved_names(model, model.state_dict() if state_dict is None else state_dict, state_dict is not None)
    return PreTrainedModel.save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)


def check_tying(model: PreTrainedModel) -> None:
    """Refuse a decoder that shares its weight with the embeddings, or does not, unlike the config says."""
    if (decoder := model.get_output_embeddings()) is None:
        return
    weights, tied = (decoder.weight, model.get_input_embeddings().weight), model.config.tie_word_embeddings
    # Quantised or divided weights and those that lie elsewhere are for their libraries to tie.
    if any(type(weight) is not nn.Parameter or weight.is_meta for weight in weights):
        return
    if (weights[0] is weights[1]) != tied:
        has, instead = ("a weight of its own", False) if tied else ("the weight of the embeddings", True)
        raise ValueError(
            f"`tie_word_embeddings` is {tied}, and the decoder has {has}: set it to {instead}, or change the decoder."
        )


def check_saved_names(model: PreTrainedModel, tensors: dict[str, Any], given: bool) -> None:
    """Refuse a model that has other tensors than its config asks for, or damaged ones.

    Args:
        tensors: what is to be saved, by name.
        given: they are the caller's own choice and may be a part of the model.
    """
    config = model.config.as_loaded()
    if type(model).__name__ not in MODEL_CLASSES.values():
        return  # A class of the user's, whose weights may depend on more than the config.
    if not given:
        check_tying(model)
    with torch.device("meta"):
        asked = {name: tuple(tensor.shape) for name, tensor in type(model)(config).state_dict().items()}
    parts = {name.rpartition(".")[0] for name in tensors}
    if parts & asked.keys() or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        return  # Quantised: each weight is stored in several parts, for the loader of the library that did it.
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = {
        f"{name} is {there[name]}, not {asked[name]}" for name in asked.keys() & there if asked[name] != there[name]
    }
    wrong |= {f"{name} is unknown" for name in there.keys() - asked}
    wrong |= set() if given else {f"{name} is missing" for name in asked.keys() - there}
    if wrong:
        raise ValueError(
            f"The weights are not those that the config asks for, so that what is saved could not be loaded: "
            f"{'; '.join(sorted(wrong))}. Change the model together with `model.config`, or build one from the config."
        )
    for name, tensor in tensors.items():
        # Those of other classes are divided among processes, those on the meta device lie elsewhere.
        if type(tensor) is torch.Tensor and not tensor.is_meta and (fault := tensor_fault(name, tensor)):
            raise ValueError(f"The tensor {name} is {fault}; what is saved could not be loaded. Nothing is written.")
