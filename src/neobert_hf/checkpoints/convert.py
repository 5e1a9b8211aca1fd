"""Checkpoints of the original project (github.com/chandar-lab/NeoBERT) into this package's layout, and back.

The original training writes DeepSpeed folders or `state_dict.pt`; the published model is `model.safetensors` with a
`config.json`. Names, shapes and values of the tensors are the same in all of them and here, so nothing is computed:
tensors are read, checked one by one and written.
"""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTPreTrainedModel
from neobert_hf.checkpoints.deepspeed import is_deepspeed, load_pickle, read_deepspeed
from neobert_hf.checkpoints.doctor import FAIL, diagnose, has_tokenizer
from neobert_hf.checkpoints.tensors import (
    ORIGINAL_CLASSES,
    class_of_tensors,
    is_rotary_table,
    local_path,
    read_config,
    read_safetensors,
    stored_table_problems,
    tensor_problems,
)
from neobert_hf.common.atomic_writes import atomic_folder, write_json


LAYOUTS = ("neobert_hf", "original", "state_dict")
STATE_DICT = "state_dict.pt"

# Keys of a config that the original code does not know, with the only values that it can express.
ONLY_HERE = {
    "classifier_pooling": "cls",
    "dtype": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sparse_prediction": None,
    "tie_word_embeddings": False,
}
ORIGINAL_AUTO_MAP = {
    "AutoConfig": "model.NeoBERTConfig",
    "AutoModel": "model.NeoBERT",
    "AutoModelForMaskedLM": "model.NeoBERTLMHead",
    "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
}


def convert(
    source: str,
    output: Path,
    to: str = "neobert_hf",
    config: str | None = None,
    tokenizer: str | None = None,
    tag: str | None = None,
) -> str:
    """Write a checkpoint in another layout, whole or not at all. Its tensors stay the same to the bit.

    Args:
        source: a DeepSpeed folder, a folder or file with `state_dict.pt` or safetensors, or a Hub id.
        output: a new folder.
        to: `neobert_hf`, `original` (the published layout) or `state_dict` (`state_dict.pt`).
        config: `config.json`, a folder or Hub id that has one; the source's own if None.
        tokenizer: folder or Hub id; the source's own, if it has one, if None.
        tag: which checkpoint of a DeepSpeed folder; the one that its file `latest` names if None.

    Returns:
        What was written, in a line.

    Raises:
        ValueError: if the source is not a whole and sound NeoBERT checkpoint, or the layout cannot express it.
    """
    if to not in LAYOUTS:
        raise ValueError(f"`to` is {to!r}; it must be one of {', '.join(LAYOUTS)}.")
    if output.exists():
        raise ValueError(f"{output} exists. Name a new folder, or delete it.")

    # 1. Read
    path = local_path(source)
    if tag is not None and path.is_file():
        raise ValueError(f"{source} is a file; `--tag` names a checkpoint of a DeepSpeed folder.")
    folder = path if path.is_dir() else path.parent
    settings = _find_config(folder, config)
    tensors = read_tensors(path, tag)

    # 2. Check
    cls = class_of_tensors(tensors)
    weights = {name: tensor for name, tensor in tensors.items() if not is_rotary_table(name)}
    if problems := tensor_problems(weights, cls, settings) + stored_table_problems(tensors, settings):
        raise ValueError(f"{source} is no sound {cls.__name__} with this config:\n  " + "\n  ".join(problems))
    if to != "neobert_hf":
        check_expressible(cls, settings)

    # 3. Write
    with atomic_folder(output) as partial:
        dtype = write_config(settings, cls, weights, partial, original=to != "neobert_hf")
        # Copies: tied weights share their memory, which safetensors refuses.
        weights = {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in sorted(weights.items())
        }
        if to == "state_dict":
            torch.save(weights, partial / STATE_DICT)
        else:
            save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None or has_tokenizer(folder):
            AutoTokenizer.from_pretrained(tokenizer or folder, trust_remote_code=False).save_pretrained(partial)
        if to == "neobert_hf":
            failures = [f"{one.check}: {one.text}" for one in diagnose(partial) if one.status == FAIL]
            if failures:
                raise ValueError(f"{source} gives no healthy checkpoint:\n  " + "\n  ".join(failures))
    values = sum(tensor.numel() for tensor in weights.values())
    return f"{output}: {cls.__name__}, {len(weights)} tensors, {values:,} {dtype} values"


def _find_config(folder: Path, config: str | None) -> NeoBERTConfig:
    if config is None and not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json. Name one with --config: a file, a folder or a Hub id; that of the published "
            "model is in chandar-lab/NeoBERT."
        )
    return read_config(local_path(config) if config is not None else folder)


def read_tensors(path: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in any layout, under the names that they have without DDP and `torch.compile`.

    Args:
        path: a folder or a file.
        tag: as for `convert`.

    Raises:
        ValueError: if it is damaged, or holds anything but tensors.
    """
    file = path / STATE_DICT if path.is_dir() else path
    if path.is_dir() and is_deepspeed(path) or tag is not None:
        tensors = read_deepspeed(path, tag)
    elif file.suffix in (".pt", ".pth", ".bin") and file.is_file():
        tensors = load_pickle(file)
    else:
        tensors = read_safetensors(path)
    if others := [str(name) for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise ValueError(f"{path} holds more than tensors: {', '.join(others)}.")
    # These wrappers are in the names that the original's `model.state_dict()` gives.
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in tensors.items()}


def check_expressible(cls: type[NeoBERTPreTrainedModel], config: NeoBERTConfig) -> None:
    """Raises:
    ValueError: if the original code has no such class, or would compute something else from this config.
    """
    if cls not in ORIGINAL_CLASSES.values():
        known = ", ".join(one.__name__ for one in ORIGINAL_CLASSES.values())
        raise ValueError(f"The original code has no {cls.__name__}; it has {known}.")
    for key, value in ONLY_HERE.items():
        if value is not None and (found := getattr(config, key)) != value:
            raise ValueError(f"The original code cannot express `{key}` {found!r}; it always has {value!r}.")


def write_config(
    config: NeoBERTConfig,
    cls: type[NeoBERTPreTrainedModel],
    tensors: dict[str, torch.Tensor],
    folder: Path,
    original: bool,
) -> str:
    """Write `config.json` for a class and its tensors; returns their dtype."""
    config.dtype = next(iter(tensors.values())).dtype
    config.architectures = [cls.__name__]
    # It may name the original's code, which is not in the folder.
    config.__dict__.pop("auto_map", None)
    config.to_json_file(folder / "config.json")
    dtype = str(config.dtype).removeprefix("torch.")
    if original:
        values = {key: value for key, value in config.to_diff_dict().items() if key not in ONLY_HERE}
        name = next(name for name, one in ORIGINAL_CLASSES.items() if one is cls)
        values |= {"architectures": [name], "auto_map": ORIGINAL_AUTO_MAP, "torch_dtype": dtype}
        write_json(folder / "config.json", values)
    return dtype


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", help="DeepSpeed folder, state_dict.pt, safetensors, a folder of these, or a Hub id")
    parser.add_argument("output", type=Path, help="new folder")
    parser.add_argument("--to", choices=LAYOUTS, default=LAYOUTS[0], help="layout of the output (%(default)s)")
    parser.add_argument("--config", help="config.json, or a folder or Hub id that has one; the source's own if unset")
    parser.add_argument("--tokenizer", help="folder or Hub id; the source's own, if it has one, if unset")
    parser.add_argument("--tag", help="checkpoint of a DeepSpeed folder; what its file `latest` says if unset")


def run(arguments: Namespace) -> None:
    print(convert(**{name: value for name, value in vars(arguments).items() if name != "run"}))
