"""Fingerprints of data and models: hashes of their content, wherever they lie."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from huggingface_hub import snapshot_download
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import cached_file

from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.run import MARKER


# The files of a model that weights, architecture, token ids and prompts depend on. The others tell how it was trained.
FINGERPRINTED_FILES = ("*.safetensors", "*.json", "vocab.txt", "merges.txt", "*.model")
# Weights of a module that has none in safetensors.
OLD_WEIGHTS = "*.bin"
TRAINING_FILES = ("complete.json", "trainer_state.json", "training_args.bin", "golden.json", "log.json", MARKER)
SPECIAL_TOKENS = ("cls_token", "sep_token", "pad_token", "mask_token", "unk_token")


def fingerprint(*values: Any) -> str:
    """A hash of the content of values: a `Dataset`, arrays, tensors, a `Path` (of a file), and what JSON can hold."""
    digest = xxhash.xxh3_128()
    for value in values:
        _add(digest, value)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, Mapping):
        _add(digest, len(value))
        for name in sorted(value):
            _add(digest, name)
            _add(digest, value[name])
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value))
    elif isinstance(value, Path):
        _add(digest, file_checksum(value))
    elif hasattr(value, "features"):  # A `Dataset`; its library is not needed for anything else here.
        digest.update(str(value.features.arrow_schema.remove_metadata()).encode())
        for table in value.with_format("arrow").iter(10_000):
            # The bytes of a slice depend on the table it was cut from; `take` copies the rows, so that theirs do not.
            for batch in table.take(list(range(len(table)))).combine_chunks().to_batches():
                digest.update(batch.serialize())
    else:
        content = json.dumps(value, sort_keys=True, default=str).encode()
        digest.update(len(content).to_bytes(8, "little") + content)


def file_checksum(file: Path) -> str:
    """A checksum of the content of a file; xxh3 is faster than a disk reads."""
    digest = xxhash.xxh3_64()
    with open(file, "rb", buffering=0) as handle:
        while block := handle.read(2**18):
            digest.update(block)
    return digest.hexdigest()


def texts_checksum(texts: Iterable[str]) -> str:
    """A checksum of texts that depends on their order. They need not be in memory at once."""
    digest = xxhash.xxh3_128()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def model_fingerprint(model: str | Path) -> str:
    """A hash of a model's weights, configuration, tokenizer and prompts, in a folder or on the Hub, wherever it lies.

    Raises:
        OSError: if `model` is neither a folder with a model nor a Hub id.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        check_model_exists(str(model), "model")
        folder = _download(str(model))
    files = _files_of(folder, FINGERPRINTED_FILES)
    if not files:
        raise FileNotFoundError(
            f"{model} holds no model: it has none of {', '.join([*FINGERPRINTED_FILES, OLD_WEIGHTS])}."
        )
    return fingerprint(files)


def weights_fingerprint(model: str | Path) -> str:
    """A hash of the files with a model's weights, in a folder or in the Hub's cache, and of nothing beside them."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        missing = {"_raise_exceptions_for_missing_entries": False}
        found = cached_file(str(model), "modules.json", **missing) or cached_file(str(model), "config.json")
        folder = Path(found).parent
    return fingerprint(_files_of(folder, ("*.safetensors",)))


def _files_of(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The files of a model and its modules that match, by path; weights of the older kind if there are no others."""
    modules = folder / "modules.json"
    parts = json.loads(modules.read_text(encoding="utf-8")) if modules.exists() else []
    files = {}
    for part in {folder, *(folder / part["path"] for part in parts)}:
        found = [file for pattern in patterns for file in part.glob(pattern)]
        if not any(file.suffix == ".safetensors" for file in found):
            found += part.glob(OLD_WEIGHTS)
        files |= {str(file.relative_to(folder)): file for file in found if file.name not in TRAINING_FILES}
    return files


def _download(model: str) -> Path:
    """The folder in the cache with the files of a model of the Hub: its fingerprint is that of any copy."""
    # Modules of Sentence Transformers, such as `2_Dense`, may have old weights beside others in safetensors.
    patterns = [*FINGERPRINTED_FILES, f"[0-9]_*/{OLD_WEIGHTS}"]
    folder = Path(snapshot_download(model, allow_patterns=patterns))
    if not list(folder.glob("*.safetensors")):
        snapshot_download(model, allow_patterns=OLD_WEIGHTS, ignore_patterns="*/*")
    return folder


def loaded_fingerprint(model: nn.Module, config: PreTrainedConfig, *also: Any) -> str:
    """A hash of a loaded model, in the dtype of its weights: weights, config, and what else its outputs depend on."""
    # The path that it was loaded from and the version of Transformers that saved it change nothing.
    incidental = ("_name_or_path", "transformers_version")
    settings = {name: value for name, value in config.to_dict().items() if name not in incidental}
    return fingerprint(model.state_dict(), json.loads(json.dumps(settings, default=str)), *also)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of what the ids of a text depend on; not of truncation and padding, which calling a tokenizer changes."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    content["special_ids"] = {name: getattr(tokenizer, f"{name}_id") for name in SPECIAL_TOKENS}
    # Keys are sorted, since saving sorts a vocabulary that a freshly trained tokenizer lists in another order. Merges
    # are a list and keep their order.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
