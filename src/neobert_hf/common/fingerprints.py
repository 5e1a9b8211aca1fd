"""Hashes that identify models, checkpoints and data, since a name is not enough: a folder's model may be trained on."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from datasets import Dataset
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from neobert_hf.common.paths import check_model_exists


# The files of a checkpoint that determine the weights, the architecture and the token ids of texts.
CHECKPOINT_FILES = ("*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json")
SPECIAL_TOKENS = ("cls_token", "sep_token", "pad_token", "mask_token", "unk_token")


def files_fingerprint(files: dict[str, str | Path], also: str = "") -> str:
    """A hash of files with their names, and of the text `also`."""
    digest = hashlib.sha256(also.encode())
    for name, file in sorted(files.items()):
        digest.update(name.encode())
        with open(file, "rb") as handle:
            for block in iter(lambda: handle.read(2**20), b""):
                digest.update(block)
    return digest.hexdigest()[:16]


def file_checksum(file: Path) -> str:
    """A checksum that detects damage to a file. It is xxh3, which is faster than a disk reads.

    It is no defence against somebody who changes files on purpose.
    """
    digest = xxhash.xxh3_64()
    # One block is reused, and stays in the CPU cache. With a memory-mapped file, a bad sector would kill the process.
    block = memoryview(bytearray(2**18))
    with open(file, "rb", buffering=0) as handle:
        while size := handle.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def texts_checksum(texts: Iterable[str]) -> str:
    """A checksum of texts that depends on their order."""
    digest = xxhash.xxh3_128()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def is_held_out(text: str, share: float, seed: int = 0) -> bool:
    """Whether a document is among the held-out `share` of all documents.

    This depends on the text alone: equal documents are always on the same side, and adding or removing other documents
    changes nothing.
    """
    return int(texts_checksum([str(seed), text])[:15], 16) / 16**15 < share


def value_checksum(value: Any) -> str:
    """Like `file_checksum`, for any value that JSON can hold."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def checkpoint_fingerprint(model: str, patterns: Iterable[str] = CHECKPOINT_FILES) -> str:
    """A hash of a folder's weights, configuration and tokenizer; for a Hub id, its commit.

    Raises:
        OSError: if `model` is neither a folder nor a Hub id, or a folder without such files.
    """
    folder = Path(model)
    if folder.is_dir():
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        if not files:
            raise FileNotFoundError(f"{model} holds no model: it has none of {', '.join(patterns)}.")
        return files_fingerprint({str(file.relative_to(folder)): file for file in files})
    check_model_exists(model, "model")
    # The Hub's cache keeps each commit in a folder that is named after it.
    return Path(cached_file(model, "config.json")).parent.name


def model_files_fingerprint(model: str) -> str:
    """Like `checkpoint_fingerprint`, over all files that a model of several modules depends on."""
    return checkpoint_fingerprint(model, ("**/*.safetensors", "**/*.bin", "**/*.json", "**/*.txt", "**/*.model"))


def data_fingerprint(data: Dataset) -> str:
    """A hash of all rows in order, independent of the files that they came from. It takes constant memory."""
    digest = hashlib.sha256(str(data.features.arrow_schema.remove_metadata()).encode())
    for table in data.with_format("arrow").iter(10_000):
        # The bytes of a slice depend on the table it was cut from; `take` copies the rows, so that theirs do not.
        for batch in table.take(list(range(len(table)))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()[:16]


def add_weights(digest, model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Add every tensor of a model, with its name and type, to a hash of `hashlib` or xxHash.

    Args:
        dtype: hash the weights as if the model had been loaded in this dtype.
    """
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.to(dtype or tensor.dtype)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def identifying_config(config: PreTrainedConfig) -> dict:
    """A config without the path it was loaded from and the Transformers version that saved it."""
    incidental = ("_name_or_path", "transformers_version")
    return {key: value for key, value in config.to_dict().items() if key not in incidental}


def reading_fingerprint(tokenizer: PreTrainedTokenizerBase, also: str = "") -> str:
    """A hash of everything that determines a text's token ids as the model gets them, including where texts are cut.

    Args:
        also: anything else that determines them, such as settings of Sentence Transformers.
    """
    if tokenizer.is_fast:
        content = tokenizer_fingerprint(tokenizer)
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs]
    values = [content, tokenizer.model_max_length, tokenizer.truncation_side, also]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash that is the same for two tokenizers exactly if they turn every text into the same ids.

    It covers vocabulary, normaliser, pre-tokenizer, post-processor and the ids of the special tokens. It leaves out
    truncation, padding and `model_max_length`, which calling a tokenizer changes. The tokenizer is not modified.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    content["special_ids"] = {name: getattr(tokenizer, f"{name}_id") for name in SPECIAL_TOKENS}
    # Keys are sorted, since saving sorts a vocabulary that a freshly trained tokenizer lists in another order. Merges
    # are a list and keep their order.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
