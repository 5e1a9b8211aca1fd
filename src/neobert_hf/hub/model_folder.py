"""A model's folder: where it is, and how config, weights and tokenizer are read.

None of its code is run, no pickle is read, and nothing outside of the folder.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTForMaskedLM, NeoBERTModel, NeoBERTPreTrainedModel
from neobert_hf.common.paths import check_exists, held_by
from neobert_hf.common.tokenizers import VOCABULARIES, load_tokenizer


# What is downloaded of a repository on the Hub: no ONNX files, and no pickles.
DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.md"]
CONFIGS = {cls.model_type: cls for cls in (NeoBERTConfig, NeoBERTContextualConfig)}
# The names of classes in the original's code that are other names here.
ORIGINAL_NAMES = {"NeoBERT": NeoBERTModel, "NeoBERTLMHead": NeoBERTForMaskedLM}
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")


def local_folder(path: str) -> Path:
    """A local folder or file as it is, or the downloaded folder of a repository on the Hub.

    Raises:
        ValueError: if a symbolic link in the folder leads out of it.
        OSError: if it is neither.
    """
    if Path(path).exists():
        check_links(Path(path))
        return Path(path)
    check_exists(path, "model")
    with asking_the_hub(f"{path} is no local folder. Its download"):
        return Path(snapshot_download(path, allow_patterns=DOWNLOADED))


@contextmanager
def asking_the_hub(what: str) -> Iterator[None]:
    """Say in one line what the Hub refused, or that it cannot be reached.

    Raises:
        OSError: in place of every error of the Hub's client and its connection.
    """
    try:
        yield
    except (HTTPError, OSError, ValueError) as error:
        # The first line has the status, and what the server says comes last.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise OSError(f"{what} failed: {' '.join(dict.fromkeys([*lines[:1], *lines[-1:]]))}") from error


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


def read_json(file: Path) -> Any:
    """The content of a JSON file; ValueError with the file's name if it is not valid JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error


def read_config(path: Path) -> NeoBERTConfig:
    """The config of a NeoBERT model, from a `config.json` or the folder that holds one.

    Raises:
        FileNotFoundError: if the folder holds none.
        ValueError: if it is the config of another model, or has a misspelt key.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise FileNotFoundError(
            f"{path} holds no config.json; it holds {held_by(path)}: give the folder of a model, such as the `model` "
            "that a training run writes."
        )
    values = read_json(file)
    kind = values.get("model_type")
    if kind not in CONFIGS:
        raise ValueError(f"{file} is the config of a model of type {kind!r}; it must be one of {', '.join(CONFIGS)}.")
    return CONFIGS[kind].from_dict(values)


def find_class(config: NeoBERTConfig) -> type[NeoBERTPreTrainedModel]:
    """The class that `architectures` names, by its name here or in the original's code.

    Raises:
        ValueError: if there is no such class for a config of this kind.
    """
    name = (config.architectures or [None])[0]
    known = {reference.split(".")[-1] for key, reference in config.auto_classes.items() if key != "AutoConfig"}
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
    names = sorted(set(read_json(index)["weight_map"].values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} names {outside[0]!r}; shards must lie beside it.")
    return [folder / name for name in names]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by name; ValueError if it has none in safetensors."""
    files = weight_files(folder)
    if not files[0].is_file():
        raise ValueError(f"{folder} holds no {files[0].name}: give a folder that a training wrote.")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def has_tokenizer(folder: Path) -> bool:
    return any(found for pattern in ("tokenizer_config.json", *VOCABULARIES) for found in folder.glob(pattern))


def read_tokenizer(folder: Path, config: NeoBERTConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ValueError: if there is none, or it does not fit the model: its ids, or the id of padding.
    """
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} has no tokenizer: save the one that the model was trained with into it.")
    tokenizer = load_tokenizer(folder, config.vocab_size, trust_remote_code=False)
    if tokenizer.pad_token_id != config.pad_token_id:
        found = f"{tokenizer.pad_token_id} in the tokenizer and {config.pad_token_id} in config.json"
        raise ValueError(f"{folder}: `pad_token_id` is {found}; take the tokenizer that the model was trained with.")
    return tokenizer


def sentence_class(folder: Path) -> str | None:
    """The name of the Sentence Transformers class that loads the folder; None if it is another model."""
    if not (folder / "modules.json").is_file():
        return None
    file = folder / "config_sentence_transformers.json"
    # Models saved before version 5 do not say what they are.
    name = (read_json(file) if file.is_file() else {}).get("model_type", "SentenceTransformer")
    if name not in SENTENCE_CLASSES:
        raise ValueError(f"{file} has `model_type` {name!r}; it must be one of {', '.join(SENTENCE_CLASSES)}.")
    return name


def load_sentence_model(folder: Path, dtype: torch.dtype) -> Any:
    """A model of Sentence Transformers on a CPU. Of a folder that holds only an encoder, one with mean pooling.

    Args:
        dtype: of the encoder.

    Raises:
        ValueError: if a module is not of Sentence Transformers, or its files lie outside of the folder.
    """
    # Imported here: it takes ten seconds, and is not needed for other models.
    import sentence_transformers

    weight_files(folder)
    cls = getattr(sentence_transformers, sentence_class(folder) or "SentenceTransformer")
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    try:
        return cls(str(folder), device="cpu", local_files_only=True, trust_remote_code=False, model_kwargs=options)
    except (ImportError, ValueError) as error:
        raise ValueError(f"Sentence Transformers cannot load {folder}: {error}") from error
