"""Tokenised corpora on disk, as `examples/prepare_data.py` writes them and training maps them into memory.

    folder/
        manifest.json       what was prepared, from what and how
        tokenizer/          as saved by `save_pretrained`
        shard-00000.arrow   Arrow IPC streams with one column `input_ids`: special tokens included, no padding
        shard-00001.arrow

Ids are uint16 when the vocabulary has at most 65,536 entries, else int32.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerFast

from neobert_hf.common import tokenizers
from neobert_hf.common.files import atomic_write, write_json
from neobert_hf.common.fingerprints import file_checksum


MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
# Documents per record batch. A reader needs 2 kB of memory for each batch: for RefinedWeb's 968 million documents
# 2.2 GB at 1,000 and 0.3 GB at 10,000.
RECORD_BATCH = 10_000


@dataclass
class Manifest:
    """The contents of a prepared folder.

    Args:
        source: where the text was, as `--source` said.
        settings: everything that the shards depend on. `tokenizer` is its fingerprint, see `common.fingerprints`;
            `files` and `bytes` are those of a local source.
        vocab_size: one more than the largest id of the tokenizer.
        shards: of each shard, in the order of the documents, its `file`, the `documents` and `tokens` in it, how many
            documents of the source were `read` for it and `dropped` as too short, and a `checksum` of the file, by
            which runs know that they read the same documents, wherever they lie.
        finished: whether all shards are there; before that, none is listed.
    """

    source: str
    settings: dict[str, Any]
    vocab_size: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def total(self, name: str) -> int:
        """The sum of `documents`, `tokens`, `read` or `dropped` over all shards."""
        return sum(shard[name] for shard in self.shards)

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        return cls(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def write_shard(file: Path, documents: Iterable[np.ndarray], dtype: type[np.number]) -> dict[str, Any]:
    """Write documents, each an array of ids, as one Arrow IPC stream, whole or not at all.

    Returns:
        `file`, `documents`, `tokens` and `checksum` for the manifest.
    """
    documents, rows, tokens = iter(documents), 0, 0
    schema = pa.schema({"input_ids": pa.list_(pa.from_numpy_dtype(dtype))})
    with atomic_write(file) as partial:
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while batch := list(islice(documents, RECORD_BATCH)):
                offsets = np.cumsum([0, *map(len, batch)], dtype=np.int32)
                ids = pa.array(np.concatenate(batch).astype(dtype))
                writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, ids)], schema=schema))
                rows += len(batch)
                tokens += len(ids)
        checksum = file_checksum(partial)
    return {"file": file.name, "documents": rows, "tokens": tokens, "checksum": checksum}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        FileNotFoundError: if the folder is not prepared.
        ValueError: if preparation is unfinished.
    """
    if not (Path(folder) / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{folder} holds no {MANIFEST}, so it is not a tokenised corpus: run examples/prepare_data.py with "
            f"--output_dir {folder}, or name the folder of an earlier run."
        )
    manifest = Manifest.read(Path(folder))
    if not manifest.finished:
        raise ValueError(f"{folder} is not finished: run the same examples/prepare_data.py command again.")
    return manifest


def load_shards(folder: str | Path) -> Dataset:
    """The documents of a prepared folder, mapped into memory: constant memory, any number of readers.

    Returns:
        A dataset with the column `input_ids`, one list of ids per document, shards in manifest order.

    Raises:
        FileNotFoundError: naming a shard that is missing. For the rest, see `read_manifest`.

    Example:

    ```python
    >>> documents = load_shards("data/refinedweb")
    >>> tokenizer = load_tokenizer("data/refinedweb")
    >>> tokenizer.decode(documents[0]["input_ids"])
    ```
    """
    files = [str(Path(folder) / shard["file"]) for shard in read_manifest(folder).shards]
    return concatenate_datasets([Dataset.from_file(file) for file in files])


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer that made the ids of a prepared folder, with the length at which it cut texts."""
    manifest = read_manifest(folder)
    options = {"model_max_length": manifest.settings["max_length"]}
    return tokenizers.load_tokenizer(Path(folder) / TOKENIZER, manifest.vocab_size, **options)
