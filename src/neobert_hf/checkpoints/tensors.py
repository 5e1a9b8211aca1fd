"""The tensors of a checkpoint on disk, against what its config asks for."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    NeoBERTPreTrainedModel,
)
from neobert_hf.modeling_neobert import TASK_HEADS, rotary_table


INDEX = "model.safetensors.index.json"

# The original's names of the classes that it has.
ORIGINAL_CLASSES = {
    "NeoBERT": NeoBERTModel,
    "NeoBERTLMHead": NeoBERTForMaskedLM,
    "NeoBERTForSequenceClassification": NeoBERTForSequenceClassification,
}
# Modules on top of the backbone: the class that they tell. Multiple choice has those of sequence classification.
CLASS_OF_HEADS = {
    frozenset(): NeoBERTModel,
    frozenset({"decoder"}): NeoBERTForMaskedLM,
    frozenset({"dense", "classifier"}): NeoBERTForSequenceClassification,
    frozenset({"classifier"}): NeoBERTForTokenClassification,
    frozenset({"qa_outputs"}): NeoBERTForQuestionAnswering,
}
CLASSES = {cls.__name__: cls for cls in (*CLASS_OF_HEADS.values(), NeoBERTForMultipleChoice)}


def local_folder(path: str, revision: str | None = None) -> Path:
    """As `local_path`, and no file.

    Raises:
        ValueError, OSError: if it is anything else.
    """
    folder = local_path(path, revision)
    if folder.is_file():
        raise ValueError(f"{path} is a file; name the folder.")
    return folder


def local_path(path: str, revision: str | None = None) -> Path:
    """A local folder or file as it is; of a Hub repository, its files without ONNX and pickles, downloaded.

    Raises:
        ValueError, OSError: if it is neither.
    """
    if Path(path).exists():
        return Path(path)
    if path.count("/") > 1 or path.startswith((".", "~", "/")):
        raise ValueError(f"{path} does not exist.")
    patterns = ["*.json", "*.safetensors", "*.txt", "*.py", "*.md"]
    return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))


def read_config(path: Path) -> NeoBERTConfig:
    """A `config.json`, or that of a folder, of a NeoBERT model.

    Raises:
        ValueError: if it is of another model or has keys that mean nothing.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist.")
    values = _read_json(file)
    if not isinstance(values, dict) or values.get("model_type") != "neobert":
        found = values.get("model_type") if isinstance(values, dict) else None
        raise ValueError(f"{file} is the config of a model of type {found!r}; it must be 'neobert'.")
    try:
        return NeoBERTConfig.from_dict(values)
    except StrictDataclassError as error:
        raise ValueError(f"{file}: {error}") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, or of a folder with `model.safetensors` or shards and their index.

    Raises:
        ValueError: naming the file that is absent or damaged.
    """
    files = [path / "model.safetensors" if path.is_dir() else path]
    # Loading takes the one file, where there are both.
    if (path / INDEX).is_file() and not files[0].is_file():
        index = _read_json(path / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"{path / INDEX} has no `weight_map`: it must name the file of every tensor.")
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
    tensors = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist.")
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}). Download or write it again.") from error
    return tensors


def class_of_tensors(names: Iterable[str]) -> type[NeoBERTPreTrainedModel]:
    """The class whose heads the tensors are of.

    Raises:
        ValueError: if no class has these heads.
    """
    names = list(names)
    heads = frozenset(name.split(".")[0] for name in names) & {"decoder", *TASK_HEADS}
    if not heads and any(name.startswith("model.") for name in names):
        # A backbone alone has no prefix: what is on top of this one is missing.
        heads = frozenset({"decoder"})
    if heads not in CLASS_OF_HEADS:
        known = "; ".join(" + ".join(sorted(heads)) for heads in CLASS_OF_HEADS if heads)
        raise ValueError(f"The heads {' + '.join(sorted(heads))} belong to no class; known are {known}, or none.")
    return CLASS_OF_HEADS[heads]


def tensor_problems(
    tensors: dict[str, torch.Tensor], cls: type[NeoBERTPreTrainedModel], config: NeoBERTConfig
) -> list[str]:
    """What is wrong with names, shapes, dtypes and values; nothing if the list is empty."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
    if config.tie_word_embeddings and "decoder.weight" not in tensors:
        expected.pop("decoder.weight", None)
    known = {name: tensor for name, tensor in tensors.items() if name in expected}
    shapes = {name: tuple(tensor.shape) for name, tensor in known.items()}
    dtypes = [tensor.dtype for tensor in known.values()]
    usual = max(set(dtypes), key=dtypes.count, default=torch.float32)
    if usual not in (torch.float32, torch.bfloat16, torch.float16):
        return [f"dtype {usual}; it must be float32, bfloat16 or float16"]
    kinds = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of another shape": [
            f"{name} {shape} instead of {expected[name]}" for name, shape in shapes.items() if shape != expected[name]
        ],
        f"of another dtype than {usual}": [f"{name} {x.dtype}" for name, x in known.items() if x.dtype != usual],
        "not finite": [name for name, tensor in known.items() if not tensor.isfinite().all()],
        # A bias starts as zero, nothing else ever is.
        "all zero": [name for name, tensor in known.items() if name.endswith(".weight") and not tensor.any()],
    }
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def rope_problems(config: NeoBERTConfig) -> list[str]:
    """What is wrong with the rotary table that the model computes from its config.

    References:
        https://arxiv.org/abs/2104.09864 (RoPE), section 3.2.2.
    """
    length = config.max_length
    # Queries and keys are turned by the same angles: one of the two is enough.
    table = torch.view_as_complex(rotary_table(config, torch.arange(length)[None], length).double())[0, :, 0, 0]
    if config.rope_parameters["rope_type"] == "default":
        return _differences("the rotary table", table, config)
    norm = table.abs().square()
    # Scaled types turn by other angles, but they all turn.
    if not ((norm - norm[0, 0]).abs().max() <= 1e-5 * norm[0, 0]):
        return ["the rotary table: cosines and sines are not of one rotation"]
    return []


def is_rotary_table(name: str) -> bool:
    """Whether a tensor is the table of the original code, which some versions may store."""
    return name.split(".")[-1] == "freqs_cis"


def stored_table_problems(tensors: dict[str, torch.Tensor], config: NeoBERTConfig) -> list[str]:
    """What is wrong with rotary tables among the tensors: (positions, dim_head / 2), complex or real pairs."""
    problems = []
    for name, table in tensors.items():
        if not is_rotary_table(name):
            continue
        if not table.is_complex() and table.shape[-1:] == (2,):
            table = torch.view_as_complex(table.float().contiguous())
        if not config.rope or not table.is_complex() or table.shape[1:] != (config.head_dim // 2,):
            problems.append(f"{name} {tuple(table.shape)} is no rotary table of this config")
        else:
            problems += _differences(name, table, config)
    return problems


def _differences(name: str, table: torch.Tensor, config: NeoBERTConfig) -> list[str]:
    """From exp(i position theta^(-2j / dim_head)) in float64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(len(table))[:, None] * config.rope_parameters["rope_theta"] ** -exponents
    difference = (table - torch.polar(torch.ones_like(angles), angles)).abs().max().item()
    # Float32 rounds an angle of p radians and its frequency by up to p 2^-24 each.
    allowed = max(len(table) * 2**-22, 1e-5)
    # Written so that NaN is an error.
    if difference <= allowed:
        return []
    return [f"{name} is off by {difference:.1e} from that of the config; rounding allows {allowed:.1e}"]
