"""Convert checkpoints of the original project (github.com/chandar-lab/NeoBERT) to this package's layout, and back.

The original training writes `state_dict.pt` or DeepSpeed folders, each with a script `zero_to_fp32.py` that makes one
file of it; the published model is `model.safetensors` with a `config.json`. Names, shapes and values of the tensors are
the same in all these files, so nothing is computed: tensors are read, checked one by one and written.
"""

import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from neobert_hf import NeoBERTConfig, NeoBERTPreTrainedModel
from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.doctor import FAIL, diagnose
from neobert_hf.hub.model_folder import (
    ModelFolder,
    load_tokenizer,
    local_path,
    new_folder,
    read_config,
    read_safetensors,
)
from neobert_hf.hub.tensors import (
    ORIGINAL_CLASSES,
    class_of_tensors,
    is_rotary_table,
    stored_table_problems,
    tensor_problems,
)


# `original` is the layout of the published model, and `state_dict` is `state_dict.pt`.
Layout = Literal["neobert_hf", "original", "state_dict"]
STATE_DICT = "state_dict.pt"

# Config keys that the original code does not know, with the value that it always has; None if any value is fine.
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


@dataclass
class ConvertSettings:
    """What is converted, and to what."""

    source: str = field(
        metadata={"help": "state_dict.pt, safetensors, a folder that has one of these, or Hub id", "path": "or Hub id"}
    )
    output: str = field(metadata={"help": "new folder", "path": True})
    to: Layout = field(default="neobert_hf", metadata={"help": "layout of the output"})
    config: str | None = field(
        default=None,
        metadata={
            "help": "config.json, or a folder or Hub id that has one; the source's own if unset",
            "path": "or Hub id",
        },
    )
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "folder or Hub id; if unset, the source's own, if it has one", "path": "or Hub id"},
    )


def main(args: list[str] | None = None) -> None:
    options = {"positional": ("source", "output"), "prog": "neobert-hf convert"}
    (settings,) = parse_config(ConvertSettings, args=args, **options)
    with folder_lock(Path(settings.output)):
        print(convert(settings))


def convert(settings: ConvertSettings) -> str:
    """Write a checkpoint in another layout, whole or not at all. Its tensors stay bit-identical.

    Returns:
        One line that says what was written.

    Raises:
        ValueError: if the source is not a complete and undamaged NeoBERT checkpoint, or the layout cannot express it.
        OSError: if it cannot be written; nothing is left behind.
    """
    output = Path(settings.output)
    if settings.to not in get_args(Layout):
        raise ValueError(f"`to` is {settings.to!r}; it must be one of {', '.join(get_args(Layout))}.")
    if output.exists():
        raise ValueError(f"{output} exists. Choose a new folder, or delete it.")

    # 1. Read
    path = local_path(settings.source)
    source = ModelFolder(path if path.is_dir() else path.parent)
    config = _find_config(source, settings.config)
    tensors = read_tensors(path)

    # 2. Check
    cls = class_of_tensors(tensors)
    weights = {name: tensor for name, tensor in tensors.items() if not is_rotary_table(name)}
    if problems := tensor_problems(weights, cls, config) + stored_table_problems(tensors, config):
        raise ValueError(f"{path} is not a valid {cls.__name__} with this config:\n  " + "\n  ".join(problems))
    if settings.to != "neobert_hf":
        check_expressible(cls, config)

    # 3. Write
    with new_folder(output) as partial:
        config.dtype = next(iter(weights.values())).dtype
        _write_config(config, cls, settings.to, partial)
        _write_weights(weights, settings.to, partial)
        if tokenizer := load_tokenizer(settings.tokenizer) if settings.tokenizer else source.tokenizer:
            tokenizer.save_pretrained(partial)
        if settings.to == "neobert_hf":
            failures = [f"{finding.check}: {finding.text}" for finding in diagnose(partial) if finding.status == FAIL]
            if failures:
                raise ValueError(f"{path} does not result in a healthy checkpoint:\n  " + "\n  ".join(failures))
    values = sum(tensor.numel() for tensor in weights.values())
    return f"{output}: {cls.__name__}, {len(weights)} tensors, {values:,} {_name(config.dtype)} values"


def _find_config(source: ModelFolder, config: str | None) -> NeoBERTConfig:
    if config is not None:
        return read_config(local_path(config, patterns=("config.json",)))
    if not (source.path / "config.json").is_file():
        raise ValueError(
            f"{source.path} has no config.json. Give one with --config: a file, a folder or a Hub id. That of the "
            "published model is in chandar-lab/NeoBERT."
        )
    return source.config


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in any layout, under their names without the prefixes of DDP and `torch.compile`.

    Args:
        path: a folder or a file.

    Raises:
        ValueError: if it is damaged, or holds anything but tensors.
    """
    file = path / STATE_DICT if path.is_dir() else path
    if file.suffix in (".pt", ".pth", ".bin") and file.is_file():
        tensors = load_pickle(file)
    else:
        tensors = read_safetensors(path)
    if others := [str(name) for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise ValueError(f"{path} holds values that are not tensors: {', '.join(others)}.")
    unwrapped = {}
    for name, tensor in tensors.items():
        # The names that the original's `model.state_dict()` returns have the prefixes of these wrappers.
        unwrapped[re.sub(r"^(module\.|_orig_mod\.)+", "", str(name))] = tensor
    return unwrapped


def load_pickle(file: Path) -> dict[str, Any]:
    """Load a dictionary that `torch.save` wrote, without running any code that the file names.

    Raises:
        ValueError: if it is damaged or holds anything but tensors and plain values.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is not a file of tensors alone, and no code in it was run: {error}") from error
    except Exception as error:  # If the file is not a pickle at all, the unpickler may raise anything.
        raise ValueError(f"{file} is damaged: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; it must hold a dictionary of tensors.")
    return content


def check_expressible(cls: type[NeoBERTPreTrainedModel], config: NeoBERTConfig) -> None:
    """Refuse models that the original code has no class for, or would compute differently."""
    if cls not in ORIGINAL_CLASSES.values():
        known = ", ".join(original.__name__ for original in ORIGINAL_CLASSES.values())
        raise ValueError(f"The original code has no {cls.__name__}, only {known}.")
    for key, value in ONLY_HERE.items():
        if value is not None and (found := getattr(config, key)) != value:
            raise ValueError(f"The original code cannot express `{key}` {found!r}; it always has {value!r}.")


def _write_config(config: NeoBERTConfig, cls: type[NeoBERTPreTrainedModel], layout: Layout, folder: Path) -> None:
    if layout == "neobert_hf":
        config.architectures = [cls.__name__]
        # `auto_map` may name the original's code, which is not in the folder.
        config.__dict__.pop("auto_map", None)
        config.to_json_file(folder / "config.json")
        return
    # Only the keys and names that the original code knows.
    values = {key: value for key, value in config.to_diff_dict().items() if key not in ONLY_HERE}
    name = next(name for name, original in ORIGINAL_CLASSES.items() if original is cls)
    values |= {"architectures": [name], "auto_map": ORIGINAL_AUTO_MAP, "torch_dtype": _name(config.dtype)}
    write_json(folder / "config.json", values)


def _write_weights(weights: dict[str, torch.Tensor], layout: Layout, folder: Path) -> None:
    # Copied, since tied weights share their memory, which safetensors refuses.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in sorted(weights.items())}
    if layout == "state_dict":
        torch.save(copies, folder / STATE_DICT)
    else:
        save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
