"""A model's folder, local or of the Hub, and reading its files. None of its code is run, and no pickle is read."""

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
from torch import nn
from transformers import PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTContextualModel, NeoBERTPreTrainedModel
from neobert_hf.checkpoint_checks_neobert import indexed_files, merge_shards
from neobert_hf.checkpoints.tensors import CLASSES, class_of_tensors, tensor_problems
from neobert_hf.common import tokenizers
from neobert_hf.common.atomic_writes import atomic_folder
from neobert_hf.common.paths import check_links, path_inside
from neobert_hf.packing_neobert import needs_longest_document


# Of a Hub repository: no ONNX, and no pickles.
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.py", "*.md")
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Files of Sentence Transformers beside those of its modules. The first lists the modules.
MODULES, SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
SENTENCE_FILES = (MODULES, SENTENCE_CONFIG, TRANSFORMER_CONFIG)
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")
# Their modules that store no other files than `config.json` and `model.safetensors`, and load no further modules.
SENTENCE_MODULES = (
    *("Transformer", "Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "WeightedLayerPooling"),
    *("SpladePooling", "MultiVectorMask"),
)
# What the libraries that write a model say of a disk that is full, each with another exception.
FULL_DISK = re.compile("No space left|File too large|[Qq]uota|inline_container|iostream|write failed")
# Keys of a config by which Transformers loads other weights or another kind of them, and a file that does it as well.
OTHER_WEIGHTS = ("quantization_config", "transformers_weights", "fusion_config", "distributed_config")
ADAPTER = "adapter_config.json"
# Encoders, and contextual models, which only some tools know.
ENCODERS = (NeoBERTConfig,)
ENCODERS_AND_CONTEXTUAL = (NeoBERTConfig, NeoBERTContextualConfig)


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
    """A local folder whose parts are read when they are first asked for. Each raises ValueError if it is damaged.

    Args:
        known: the configs of the models that may lie there; others are refused by name.
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
        """The folder's own, if it has one; with lower case where Sentence Transformers' settings ask for it."""
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
        """Those of Sentence Transformers for the encoder, if there are any."""
        file = self.path / TRANSFORMER_CONFIG
        return read_json(file) if file.is_file() else {}

    @property
    def model_class(self) -> type[NeoBERTPreTrainedModel]:
        """The class that `architectures` names, or, where it is empty, that of the tensors."""
        names = self.config.architectures
        if self.is_contextual:
            if names not in (None, [], [NeoBERTContextualModel.__name__]):
                raise ValueError(f"`architectures` is {names}; of this config it must be a NeoBERTContextualModel.")
            return NeoBERTContextualModel
        if not names:
            return class_of_tensors(self.tensors)
        if not isinstance(names, list) or len(names) > 1 or str(names[0]) not in CLASSES:
            raise ValueError(f"`architectures` is {names}; it must be one of {', '.join(sorted(CLASSES))}.")
        return CLASSES[names[0]]

    @property
    def is_contextual(self) -> bool:
        """Whether the model reads a context beside every text."""
        return isinstance(self.config, NeoBERTContextualConfig)

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
        if not modules:
            raise ValueError(f"{file} names no module. Delete it, or restore it.")
        for module in modules:
            package, _, name = str(module.type).rpartition(".")
            if not package.startswith("sentence_transformers.") or name not in SENTENCE_MODULES:
                raise ValueError(
                    f"{file} names the module {module.type}, which may load code (with `trust_remote_code`) and files "
                    f"from anywhere; allowed are those of sentence_transformers: {', '.join(SENTENCE_MODULES)}."
                )
            inside = path_inside(self.path, module.path, f"`path` of {module.name} in {file}")
            # `.` and `a//b` are written in one way.
            module.path = inside.relative_to(self.path).as_posix().removeprefix(".")
        return modules

    @property
    def sentence_class(self) -> str | None:
        """The class of Sentence Transformers that loads the folder, if one does."""
        if not self.sentence_modules:
            return None
        file = self.path / SENTENCE_CONFIG
        values = read_mapping(file) if file.is_file() else {}
        name = values.get("model_type", "SentenceTransformer")
        if name not in SENTENCE_CLASSES:
            raise ValueError(f"{file} says `model_type` {name!r}; it must be one of {', '.join(SENTENCE_CLASSES)}.")
        return name

    def check_weights(self) -> None:
        """Refuse tensors that do not fit the config and the class; the error names each."""
        cls = self.model_class
        if problems := tensor_problems(self.tensors, cls, self.config):
            raise ValueError(f"{self.path} is no sound {cls.__name__} with this config:\n  " + "\n  ".join(problems))

    def load_model(self, cls: type[NeoBERTPreTrainedModel], **options: Any) -> NeoBERTPreTrainedModel:
        """Load a model of the folder with the tensors that were checked.

        Args:
            options: of `from_pretrained`.

        Raises:
            ValueError: if Transformers takes others: it has several ways to be sent to another file or model.
        """
        if (self.path / ADAPTER).exists():
            raise ValueError(f"{self.path / ADAPTER} makes Transformers load other weights. Merge or delete it.")
        try:
            model = cls.from_pretrained(self.path, **options)
        except (ValueError, OSError):
            raise
        except Exception as error:  # Of a key that asks for a package or a kind of loading anything may come.
            raise ValueError(f"{self.path} cannot be loaded: {error}") from error
        self.check_loaded(model)
        return model

    def check_rope(self) -> None:
        """Raise ValueError if what a text gives depends on others of its batch: that cannot stand in a graph."""
        if needs_longest_document(self.config):
            raise ValueError(
                f"{self.path} has RoPE of type {self.config.rope_parameters['rope_type']!r}, which depends on the "
                "longest text of a batch and cannot stand in a graph: use 'yarn' or 'linear'."
            )

    def check_loaded(self, model: nn.Module) -> None:
        """Compare what a loader made of the folder with the tensors of its files; ValueError if they differ."""
        for name, tensor in model.state_dict().items():
            # The encoder alone has no prefix, and a tied decoder may not be stored.
            stored = self.tensors.get(name, self.tensors.get(f"model.{name}"))
            if stored is not None and not torch.equal(tensor, stored.to(tensor.dtype)):
                raise ValueError(f"{self.path}: Transformers loads another {name} than that of model.safetensors.")


def copy_files(names: Iterable[str], source: Path, target: Path) -> None:
    """Copy those files of a folder that it has."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder that becomes `path` when the block ends without an exception.

    Raises:
        OSError: if the disk has no room for what the block writes; nothing is left there.
    """
    try:
        with atomic_folder(path) as partial:
            yield partial
    except Exception as error:
        if isinstance(error, ValueError) or not FULL_DISK.search(str(error)):
            raise
        raise OSError(f"{path} cannot be written, the disk may be full: {error}") from error


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
    local = Path(path)
    if local.exists():
        if local.is_dir():
            check_links(local)
        else:
            # Of the folder around a file these are read, too. The file itself is the user's choice.
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
        raise OSError(f"{path} is no folder here, and not found as a Hub id: {reason}") from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hub id; ValueError or OSError if it cannot be read."""
    if Path(path).is_dir():
        check_links(Path(path))
    return tokenizers.load_tokenizer(path, trust_remote_code=False)


def text_length(settings: dict, config: NeoBERTConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a text that Sentence Transformers reads: it cuts there, without a word.

    Args:
        settings: what is in its `sentence_bert_config.json`.
    """
    return settings.get("max_seq_length") or min(tokenizer.model_max_length, config.max_length)


def read_json(file: Path) -> Any:
    """What a file holds; ValueError if that is no JSON, or says something twice."""
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers take the last of two values, and people the first."""
    values = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"it says {key!r} twice")
        values[key] = value
    return values


def read_mapping(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; ValueError if it holds something else."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}; it must hold an object.")
    return values


def read_config(path: Path, known: tuple[type[NeoBERTConfig], ...] = ENCODERS) -> NeoBERTConfig:
    """A `config.json`, or that of a folder, of a NeoBERT model.

    Args:
        known: the classes that it may be of.

    Raises:
        ValueError: if it is of another model or has keys that mean nothing.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist.")
    values = read_mapping(file)
    classes = {cls.model_type: cls for cls in known}
    if not isinstance(found := values.get("model_type"), str) or found not in classes:
        allowed = " or ".join(map(repr, classes))
        raise ValueError(f"{file} is the config of a model of type {found!r}; it must be {allowed}.")
    for key, value in values.items():
        # An attention with a slash is code on the Hub.
        if value and (key in OTHER_WEIGHTS or ("attn_implementation" in key and "/" in str(value))):
            raise ValueError(
                f"{file} holds `{key}`: {str(value)[:100]}. Only plain weights and code are read; remove it."
            )
    try:
        return classes[found].from_dict(values)
    except Exception as error:  # Of values of another type anything may come.
        raise ValueError(f"{file}: {error}") from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, or of a folder with `model.safetensors` or shards and their index.

    Raises:
        ValueError: naming the file that is absent or damaged.
    """
    files = [path / "model.safetensors" if path.is_dir() else path]
    # Loading takes the one file, where there are both.
    if (path / INDEX).is_file() and not files[0].is_file():
        files = indexed_files(path / INDEX)
    tensors = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist.")
        # Of a file that may not be read, safetensors says that there is none.
        file.open("rb").close()
        try:
            merge_shards(tensors, load_file(file), file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}). Download or write it again.") from error
    return tensors
