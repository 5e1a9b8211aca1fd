"""What tells models, checkpoints and data from others under the same name: a folder may be trained on."""

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


# Of a checkpoint's folder: what the weights, the architecture and the ids of texts depend on.
CHECKPOINT_FILES = ("*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json")
SPECIAL_TOKENS = ("cls_token", "sep_token", "pad_token", "mask_token", "unk_token")


def files_fingerprint(files: dict[str, str | Path], also: str = "") -> str:
    """A hash of files by name, and of a text beside them."""
    digest = hashlib.sha256(also.encode())
    for name, file in sorted(files.items()):
        digest.update(name.encode())
        with open(file, "rb") as handle:
            for block in iter(lambda: handle.read(2**20), b""):
                digest.update(block)
    return digest.hexdigest()[:16]


def file_checksum(file: Path) -> str:
    """A checksum that tells a damaged file from the one that was written: xxh3, faster than a disk reads.

    No defence against somebody who changes files on purpose.
    """
    digest = xxhash.xxh3_64()
    # One block for all, which stays in the processor's cache. A map of the file would end the process on a bad sector.
    block = memoryview(bytearray(2**18))
    with open(file, "rb", buffering=0) as handle:
        while size := handle.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def texts_checksum(texts: Iterable[str]) -> str:
    """A checksum that tells texts from others and from the same ones in another order."""
    digest = xxhash.xxh3_128()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def is_held_out(text: str, share: float, seed: int = 0) -> bool:
    """Whether a document is among this share of all, which are held out.

    By the text alone: equal documents are on one side, and others that are added or removed change nothing.
    """
    return int(texts_checksum([str(seed), text])[:15], 16) / 16**15 < share


def value_checksum(value: Any) -> str:
    """As `file_checksum`, of anything that JSON can hold."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def checkpoint_fingerprint(model: str, patterns: Iterable[str] = CHECKPOINT_FILES) -> str:
    """A hash of a folder's weights, configuration and tokenizer; of a Hub id, its commit.

    Raises:
        OSError: if it is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        return files_fingerprint({str(file.relative_to(folder)): file for file in files})
    check_model_exists(model, "model")
    # The cache keeps each commit in a folder of its own.
    return Path(cached_file(model, "config.json")).parent.name


def model_files_fingerprint(model: str) -> str:
    """As `checkpoint_fingerprint`, of all files that a model of several modules depends on."""
    return checkpoint_fingerprint(model, ("**/*.safetensors", "**/*.bin", "**/*.json", "**/*.txt", "**/*.model"))


def data_fingerprint(data: Dataset) -> str:
    """A hash of all rows in their order, in constant memory, whatever files they came from."""
    digest = hashlib.sha256(str(data.features.arrow_schema.remove_metadata()).encode())
    for table in data.with_format("arrow").iter(10_000):
        # The bytes of a slice depend on what it was cut from; those of rows that are taken out do not.
        for batch in table.take(list(range(len(table)))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()[:16]


def add_weights(digest, model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Add every tensor of a model, with its name and type, to a hash of `hashlib` or xxHash.

    Args:
        dtype: as if the model had been loaded in it.
    """
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.to(dtype or tensor.dtype)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def identifying_config(config: PreTrainedConfig) -> dict:
    """A config without where it lay and by what it was saved."""
    incidental = ("_name_or_path", "transformers_version")
    return {key: value for key, value in config.to_dict().items() if key not in incidental}


def reading_fingerprint(tokenizer: PreTrainedTokenizerBase, also: str = "") -> str:
    """A hash of all that decides which ids a model reads of a text: what they are, and where a text is cut.

    Args:
        also: what else decides it, such as settings of Sentence Transformers.
    """
    if tokenizer.is_fast:
        content = tokenizer_fingerprint(tokenizer)
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs]
    values = [content, tokenizer.model_max_length, tokenizer.truncation_side, also]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash that two tokenizers share exactly if they turn every text into the same ids.

    It covers vocabulary, normaliser, pre-tokenizer, post-processor and the ids of the special tokens, and leaves out
    truncation, padding and `model_max_length`, which calling a tokenizer changes. The tokenizer stays as it is.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    content["special_ids"] = {name: getattr(tokenizer, f"{name}_id") for name in SPECIAL_TOKENS}
    # Saving sorts a vocabulary that a freshly trained tokenizer lists in another order; merges stay a list.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
