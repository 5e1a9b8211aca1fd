"""A model's folder, local or of the Hub, and reading its files. None of its code is run, and no pickle is read."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTPreTrainedModel
from neobert_hf.checkpoints.tensors import CLASSES, class_of_tensors, tensor_problems


# Of a Hub repository: no ONNX, and no pickles.
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.py", "*.md")
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Files of Sentence Transformers beside those of its modules. The first lists the modules.
MODULES, SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
SENTENCE_FILES = (MODULES, SENTENCE_CONFIG, "sentence_bert_config.json")
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")


@dataclass
class SentenceModule:
    """A module of a Sentence Transformers model.

    Args:
        type: its class, with the Python module that it is in.
        path: its folder inside the model's; empty if it is that folder itself.
    """

    type: str
    path: str

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]


@dataclass
class ModelFolder:
    """A local folder whose parts are read when they are first asked for. Each raises ValueError if it is damaged."""

    path: Path

    @cached_property
    def config(self) -> NeoBERTConfig:
        return read_config(self.path)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return read_safetensors(self.path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The folder's own, if it has one."""
        if not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            return None
        return load_tokenizer(self.path)

    @property
    def model_class(self) -> type[NeoBERTPreTrainedModel]:
        """The class that `architectures` names, or, where it is empty, that of the tensors."""
        names = self.config.architectures
        if not names:
            return class_of_tensors(self.tensors)
        if len(names) > 1 or names[0] not in CLASSES:
            raise ValueError(f"`architectures` is {names}; it must be one of {', '.join(sorted(CLASSES))}.")
        return CLASSES[names[0]]

    @cached_property
    def sentence_modules(self) -> list[SentenceModule]:
        """The modules of a Sentence Transformers model, in order; none of another model."""
        file = self.path / MODULES
        if not file.is_file():
            return []
        try:
            modules = [SentenceModule(entry["type"], entry["path"]) for entry in read_json(file)]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file} must be a list of modules, each with `type` and `path`.") from error
        if foreign := [module.type for module in modules if not module.type.startswith("sentence_transformers.")]:
            raise ValueError(
                f"{file} names the module {foreign[0]}, which loads with `trust_remote_code` only; allowed are "
                "sentence_transformers.*"
            )
        return modules

    @property
    def sentence_class(self) -> str | None:
        """The class of Sentence Transformers that loads the folder, if one does."""
        if not self.sentence_modules:
            return None
        file = self.path / SENTENCE_CONFIG
        values = read_json(file) if file.is_file() else {}
        name = values.get("model_type", "SentenceTransformer")
        if name not in SENTENCE_CLASSES:
            raise ValueError(f"{file} says `model_type` {name!r}; it must be one of {', '.join(SENTENCE_CLASSES)}.")
        return name

    def check_weights(self) -> None:
        """Refuse tensors that do not fit the config and the class; the error names each."""
        cls = self.model_class
        if problems := tensor_problems(self.tensors, cls, self.config):
            raise ValueError(f"{self.path} is no sound {cls.__name__} with this config:\n  " + "\n  ".join(problems))


def local_folder(path: str, revision: str | None = None) -> Path:
    """A local folder as it is, or the downloaded one of a Hub repository.

    Raises:
        ValueError, OSError: if it is anything else.
    """
    folder = local_path(path, revision)
    if folder.is_file():
        raise ValueError(f"{path} is a file; name the folder.")
    return folder


def local_path(path: str, revision: str | None = None, patterns: tuple[str, ...] = DOWNLOADED) -> Path:
    """A local folder or file as it is; of a Hub repository, the files that match a pattern, downloaded.

    Raises:
        ValueError, OSError: if it is neither.
    """
    if Path(path).exists():
        return Path(path)
    if path.count("/") > 1 or path.startswith((".", "~", "/")):
        raise ValueError(f"{path} does not exist.")
    return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hub id; ValueError or OSError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:  # Of a damaged file anything may come, and few of them name it.
        raise ValueError(f"The tokenizer of {path} cannot be read: {error}") from error


def read_json(file: Path) -> Any:
    """What a file holds; ValueError if that is no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error


def read_config(path: Path) -> NeoBERTConfig:
    """A `config.json`, or that of a folder, of a NeoBERT model.

    Raises:
        ValueError: if it is of another model or has keys that mean nothing.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist.")
    values = read_json(file)
    if not isinstance(values, dict) or values.get("model_type") != "neobert":
        found = values.get("model_type") if isinstance(values, dict) else None
        raise ValueError(f"{file} is the config of a model of type {found!r}; it must be 'neobert'.")
    try:
        return NeoBERTConfig.from_dict(values)
    except StrictDataclassError as error:
        raise ValueError(f"{file}: {error}") from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, or of a folder with `model.safetensors` or shards and their index.

    Raises:
        ValueError: naming the file that is absent or damaged.
    """
    files = [path / "model.safetensors" if path.is_dir() else path]
    # Loading takes the one file, where there are both.
    if (path / INDEX).is_file() and not files[0].is_file():
        index = read_json(path / INDEX)
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
