"""A model's folder, local or from the Hub, and how its files are read. None of its code is run, and no pickle read."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTContextualModel, NeoBERTPreTrainedModel
from neobert_hf.common import tokenizers
from neobert_hf.common.files import atomic_folder
from neobert_hf.common.paths import check_links, path_inside
from neobert_hf.hub.tensors import CLASSES, class_of_tensors, tensor_problems


# The files of a Hub repository that are downloaded: no ONNX, and no pickles.
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.py", "*.md")
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Files of Sentence Transformers other than those of its modules. The first lists the modules.
MODULES, SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
SENTENCE_FILES = (MODULES, SENTENCE_CONFIG, TRANSFORMER_CONFIG)
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")
# Those of its modules that store only `config.json` and `model.safetensors`, and load no further modules.
SENTENCE_MODULES = (
    *("Transformer", "Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "WeightedLayerPooling"),
    *("SpladePooling", "MultiVectorMask"),
)
# How the libraries that write a model report a full disk; each raises a different exception.
FULL_DISK = re.compile("No space left|File too large|[Qq]uota|inline_container|iostream|write failed")
# Encoders, and contextual models, which only some tools support.
ENCODERS = (NeoBERTConfig,)
ENCODERS_AND_CONTEXTUAL = (NeoBERTConfig, NeoBERTContextualConfig)


@dataclass
class SentenceModule:
    """A module of a Sentence Transformers model.

    Args:
        type: its class, with the Python module that it is in.
        path: its folder inside the model's folder; empty if it is the model's folder itself.
    """

    type: str
    path: str

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]


@dataclass
class ModelFolder:
    """A local folder whose parts are read when they are first used. Each raises ValueError if it is damaged.

    Args:
        known: the config classes of the models that are accepted; other models are refused by name.
    """

    path: Path
    known: tuple[type[NeoBERTConfig], ...] = ENCODERS

    @cached_property
    def config(self) -> NeoBERTConfig:
        return read_config(self.path, self.known)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return read_safetensors(self.path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The folder's own tokenizer, if it has one. It lower-cases if Sentence Transformers' settings say so."""
        if not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            return None
        tokenizer = load_tokenizer(self.path)
        if self.transformer_settings.get("do_lower_case") and tokenizer.is_fast:
            own = tokenizer.backend_tokenizer.normalizer
            if "Lowercase" not in str(own):
                both = [normalizers.Lowercase(), *([own] if own else [])]
                tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(both)
        return tokenizer

    @property
    def transformer_settings(self) -> dict:
        """Sentence Transformers' settings for the encoder, if there are any."""
        file = self.path / TRANSFORMER_CONFIG
        return read_json(file) if file.is_file() else {}

    @property
    def model_class(self) -> type[NeoBERTPreTrainedModel]:
        """The class that `architectures` names, or, if it is empty, the class that fits the tensors."""
        names = self.config.architectures
        if self.is_contextual:
            if names not in (None, [], [NeoBERTContextualModel.__name__]):
                raise ValueError(f"`architectures` is {names}; with this config it must be a NeoBERTContextualModel.")
            return NeoBERTContextualModel
        if not names:
            return class_of_tensors(self.tensors)
        if not isinstance(names, list) or len(names) > 1 or str(names[0]) not in CLASSES:
            raise ValueError(f"`architectures` is {names}; it must be one of {', '.join(sorted(CLASSES))}.")
        return CLASSES[names[0]]

    @property
    def is_contextual(self) -> bool:
        """Whether the model takes a context in addition to every text."""
        return isinstance(self.config, NeoBERTContextualConfig)

    @cached_property
    def sentence_modules(self) -> list[SentenceModule]:
        """The modules of a Sentence Transformers model, in order; empty for other models."""
        file = self.path / MODULES
        if not file.is_file():
            return []
        try:
            modules = [SentenceModule(entry["type"], entry["path"]) for entry in read_json(file)]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file} must be a list of modules, each with `type` and `path`.") from error
        if not modules:
            raise ValueError(f"{file} lists no modules. Delete it, or restore it.")
        for module in modules:
            package, _, name = str(module.type).rpartition(".")
            if not package.startswith("sentence_transformers.") or name not in SENTENCE_MODULES:
                raise ValueError(
                    f"{file} lists the module {module.type}, which may load code (with `trust_remote_code`) and files "
                    f"from anywhere; only these of sentence_transformers are allowed: {', '.join(SENTENCE_MODULES)}."
                )
            inside = path_inside(self.path, module.path, f"`path` of {module.name} in {file}")
            # Normalise paths such as `.` and `a//b`.
            module.path = inside.relative_to(self.path).as_posix().removeprefix(".")
        return modules

    @property
    def sentence_class(self) -> str | None:
        """The Sentence Transformers class that loads the folder, if there is one."""
        if not self.sentence_modules:
            return None
        file = self.path / SENTENCE_CONFIG
        values = read_mapping(file) if file.is_file() else {}
        name = values.get("model_type", "SentenceTransformer")
        if name not in SENTENCE_CLASSES:
            raise ValueError(f"{file} says `model_type` {name!r}; it must be one of {', '.join(SENTENCE_CLASSES)}.")
        return name

    def check_weights(self) -> None:
        """Refuse tensors that do not fit the config and the class; the error names each of them."""
        cls = self.model_class
        if problems := tensor_problems(self.tensors, cls, self.config):
            raise ValueError(f"{self.path} is not a valid {cls.__name__} with this config:\n  " + "\n  ".join(problems))

    def check_rope(self) -> None:
        """Raise ValueError if a text's output depends on the other texts of its batch: a graph cannot express that."""
        if self.config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
            raise ValueError(
                f"{self.path} has RoPE of type {self.config.rope_parameters['rope_type']!r}, which depends on the "
                "longest text of a batch and cannot be part of a graph: use 'yarn' or 'linear'."
            )


def copy_files(names: Iterable[str], source: Path, target: Path) -> None:
    """Copy the files of these names that exist in a folder."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder that becomes `path` when the block ends without an exception.

    Raises:
        OSError: if the disk has no room for what the block writes; nothing is left behind.
    """
    try:
        with atomic_folder(path) as partial:
            yield partial
    except Exception as error:
        if isinstance(error, ValueError) or not FULL_DISK.search(str(error)):
            raise
        raise OSError(f"{path} cannot be written, the disk may be full: {error}") from error


def local_folder(path: str, revision: str | None = None) -> Path:
    """A local folder as it is, or the downloaded folder of a Hub repository.

    Raises:
        ValueError, OSError: if the path is neither.
    """
    folder = local_path(path, revision)
    if folder.is_file():
        raise ValueError(f"{path} is a file; give the folder.")
    return folder


def local_path(path: str, revision: str | None = None, patterns: tuple[str, ...] = DOWNLOADED) -> Path:
    """A local folder or file as it is, or a folder with the downloaded files of a Hub repository that match `patterns`.

    Raises:
        ValueError, OSError: if the path is neither.
    """
    local = Path(path)
    if local.exists():
        if local.is_dir():
            check_links(local)
        else:
            # These files beside the given one are also read, so they are checked. The user chose the given file itself.
            names = {"config.json", *TOKENIZER_FILES} - {local.name}
            check_links(local.parent, [local.parent / name for name in sorted(names)])
        return local
    # `runs/model` looks like a Hub id as well.
    if path.count("/") > 1 or path.startswith((".", "~", "/")) or (local.parts[1:] and local.parent.is_dir()):
        raise ValueError(f"{path} does not exist.")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))
    except (ValueError, OSError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(f"{path} is neither a local folder nor found as a Hub id: {reason}") from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hub id; ValueError or OSError if it cannot be loaded."""
    if Path(path).is_dir():
        check_links(Path(path))
    return tokenizers.load_tokenizer(path, trust_remote_code=False)


def text_length(settings: dict, config: NeoBERTConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens at which Sentence Transformers silently truncates a text.

    Args:
        settings: the content of `sentence_bert_config.json`.
    """
    return settings.get("max_seq_length") or min(tokenizer.model_max_length, config.max_length)


def read_json(file: Path) -> Any:
    """The content of a JSON file; ValueError if it is not valid JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error


def read_mapping(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; ValueError if it holds something else."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}; it must hold an object.")
    return values


def read_config(path: Path, known: tuple[type[NeoBERTConfig], ...] = ENCODERS) -> NeoBERTConfig:
    """The config of a NeoBERT model, from a `config.json` or the folder that has one.

    Args:
        known: the config classes that are accepted.

    Raises:
        ValueError: if it is the config of another model, or has misspelt or unsupported keys.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist.")
    values = read_mapping(file)
    classes = {cls.model_type: cls for cls in known}
    if not isinstance(found := values.get("model_type"), str) or found not in classes:
        allowed = " or ".join(map(repr, classes))
        raise ValueError(f"{file} is the config of a model of type {found!r}; it must be {allowed}.")
    try:
        return classes[found].from_dict(values)
    except Exception as error:  # Values of a wrong type may raise anything.
        raise ValueError(f"{file}: {error}") from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, or of a folder with `model.safetensors` or shards and their index.

    Raises:
        ValueError: naming the file that is missing or damaged.
    """
    files = [path / "model.safetensors" if path.is_dir() else path]
    # If there are both, Transformers loads the single file.
    if (path / INDEX).is_file() and not files[0].is_file():
        names = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        # A file of the folder, and of no other.
        files = [path / Path(name).name for name in sorted(names)]
    tensors = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist.")
        # Opened first, since safetensors reports an unreadable file as missing.
        file.open("rb").close()
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}). Download or write it again.") from error
    return tensors
