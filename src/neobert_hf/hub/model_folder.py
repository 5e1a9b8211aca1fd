"""How the files of a model's folder are read. None of its code is run, and nothing outside of the folder is read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTForMaskedLM, NeoBERTModel, NeoBERTPreTrainedModel
from neobert_hf.common.paths import check_exists
from neobert_hf.common.tokenizers import VOCABULARIES, load_tokenizer


# What is downloaded of a repository on the Hub: no ONNX files, and no pickles.
DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.md"]
# The names of classes in the original's code that are other names here.
ORIGINAL_NAMES = {"NeoBERT": NeoBERTModel, "NeoBERTLMHead": NeoBERTForMaskedLM}

# Files of Sentence Transformers beside those of its modules, which `modules.json` lists.
MODULES, SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")
# Its modules that load no others: `Router` may name classes, and with them code, from anywhere.
SENTENCE_MODULES = (
    *("Transformer", "Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "WeightedLayerPooling"),
    *("SpladePooling", "MultiVectorMask"),
)


def local_folder(path: str, revision: str | None = None, patterns: list[str] = DOWNLOADED) -> Path:
    """A local folder or file as it is, or the downloaded folder of a repository on the Hub.

    Raises:
        ValueError: if a symbolic link in the folder leads out of it.
        OSError: if it is neither.
    """
    if Path(path).exists():
        if Path(path).is_dir():
            check_links(Path(path))
        return Path(path)
    check_exists(path, "model")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise OSError(f"{path} is neither a local folder nor found on the Hub: {error}") from error


def check_links(folder: Path) -> None:
    """Refuse symbolic links that lead out of a model's folder: what they lead to could be published.

    In the Hub's cache, links may lead to other folders of the same repository.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        home = home.parent.parent
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise ValueError(f"{path} leads out of {folder}, to {path.resolve()}. Replace it with a copy of the file.")


def path_inside(folder: Path, name: str, where: object) -> Path:
    """The path that a file gives relative to its folder; ValueError if it leads out of the folder."""
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise ValueError(f"{where} is {name!r}; it must be a path inside {folder}.")
    return folder / name


def read_json(file: Path) -> Any:
    """The content of a JSON file; ValueError if it is not valid JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error


def read_config(path: Path, contextual: bool = False) -> NeoBERTConfig:
    """The config of a NeoBERT model, from a `config.json` or the folder that holds one.

    Args:
        contextual: whether it may also be that of a contextual model.

    Raises:
        ValueError: if it is the config of another model, or has a misspelt key.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: give the folder of a model.")
    values = read_json(file)
    classes = {cls.model_type: cls for cls in (NeoBERTConfig, *([NeoBERTContextualConfig] if contextual else []))}
    if values.get("model_type") not in classes:
        allowed = " or ".join(map(repr, classes))
        raise ValueError(f"{file} is the config of a model of type {values.get('model_type')!r}; it must be {allowed}.")
    return classes[values["model_type"]].from_dict(values)


def find_class(config: NeoBERTConfig) -> type[NeoBERTPreTrainedModel]:
    """The class that `architectures` names, by its name here or in the original's code.

    Raises:
        ValueError: if there is no such class for a config of this kind.
    """
    name = (config.architectures or [None])[0]
    known = {reference.rsplit(".", 1)[-1] for key, reference in config.auto_classes.items() if key != "AutoConfig"}
    if name in known:
        return getattr(neobert_hf, name)
    if name in ORIGINAL_NAMES and config.model_type == "neobert":
        return ORIGINAL_NAMES[name]
    raise ValueError(f"`architectures` in config.json is {config.architectures}; it must be one of {sorted(known)}.")


def load_model(cls: type[NeoBERTPreTrainedModel], folder: Path | None, **options) -> NeoBERTPreTrainedModel:
    """A model in evaluation mode, all of whose tensors are in its files. Training may start with a new head; this not.

    Args:
        folder: None for a model that is made of the options `config` and `state_dict`.
        options: of `from_pretrained`.

    Raises:
        ValueError: naming the tensors that are missing, left over, of another shape or not finite.
    """
    if folder is not None:
        weight_files(folder)
    # A mismatched shape would otherwise be named in a log only.
    model, info = cls.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if wrong := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ValueError(f"{folder} does not hold a {cls.__name__}. Tensors missing or misshaped: {', '.join(wrong)}.")
    return model.eval()


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards that an index names; ValueError if one lies outside of the folder."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    # If there are both, Transformers loads the single file.
    if single.is_file() or not index.is_file():
        return [single]
    return [path_inside(folder, name, index) for name in sorted(set(read_json(index)["weight_map"].values()))]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def has_tokenizer(folder: Path) -> bool:
    return any(found for pattern in ("tokenizer_config.json", *VOCABULARIES) for found in folder.glob(pattern))


def read_tokenizer(folder: Path, config: NeoBERTConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ValueError: if there is none, or it does not fit the model: its ids, or the id of padding.
    """
    tokenizer = load_tokenizer(folder, config.vocab_size, trust_remote_code=False)
    if tokenizer.pad_token_id != config.pad_token_id:
        found = f"{tokenizer.pad_token_id} in the tokenizer and {config.pad_token_id} in config.json"
        raise ValueError(f"{folder}: `pad_token_id` is {found}; take the tokenizer that the model was trained with.")
    return tokenizer


@dataclass
class SentenceModule:
    """A module of a Sentence Transformers model.

    Args:
        name: of its class.
        folder: where its files are; that of the model itself for the encoder.
    """

    name: str
    folder: Path


def read_modules(folder: Path) -> list[SentenceModule]:
    """The modules of a Sentence Transformers model, in order; empty for other models.

    Raises:
        ValueError: if a module is not of Sentence Transformers, or its files lie elsewhere.
    """
    file = folder / MODULES
    modules = []
    for entry in read_json(file) if file.is_file() else []:
        package, _, name = entry["type"].rpartition(".")
        if not package.startswith("sentence_transformers.") or name not in SENTENCE_MODULES:
            known = ", ".join(SENTENCE_MODULES)
            raise ValueError(f"{file} lists a module {entry['type']}; of sentence_transformers only {known} are known.")
        modules.append(SentenceModule(name, path_inside(folder, entry["path"], f"`path` of {name} in {file}")))
    return modules


def read_sentence_config(folder: Path) -> dict[str, Any]:
    file = folder / SENTENCE_CONFIG
    return read_json(file) if file.is_file() else {}


def sentence_class(folder: Path) -> str | None:
    """The Sentence Transformers class that loads the folder; None if it is another model."""
    if not read_modules(folder):
        return None
    name = read_sentence_config(folder).get("model_type", "SentenceTransformer")
    if name not in SENTENCE_CLASSES:
        raise ValueError(f"{folder / SENTENCE_CONFIG} has `model_type` {name!r}; it must be one of {SENTENCE_CLASSES}.")
    return name


def text_length(folder: Path, config: NeoBERTConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens at which a text is cut, by Sentence Transformers or by the tokenizer."""
    file = folder / TRANSFORMER_CONFIG
    settings = read_json(file) if file.is_file() else {}
    return settings.get("max_seq_length") or min(tokenizer.model_max_length, config.max_length)
