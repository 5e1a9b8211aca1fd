"""Tokenised corpora on disk: `manifest.json`, `tokenizer/` and Arrow files that training maps into memory.

    folder/
        manifest.json       what was prepared, and from what and how; written last: a folder that has it is complete
        tokenizer/          as saved by `save_pretrained`
        shard-00000.arrow   Arrow IPC streams with one column `input_ids`: special tokens included, no padding
        shard-00001.arrow

Ids are uint16 when the vocabulary has at most 65,536 entries, else int32. `examples/prepare_data.py` writes such
folders.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerFast

from neobert_hf.common import tokenizers
from neobert_hf.common.files import atomic_write, write_json
from neobert_hf.common.fingerprints import file_checksum, tokenizer_fingerprint


MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
# Documents per record batch. A reader needs 2 kB of memory for each batch: for RefinedWeb's 968 million documents
# 2.2 GB at 1,000 and 0.3 GB at 10,000.
RECORD_BATCH = 10_000


class Shard(TypedDict):
    """A shard's entry in the manifest."""

    file: str
    documents: int
    tokens: int
    bytes: int
    checksum: str
    """Of the file: by this runs know that they read the same documents, wherever they lie."""


@dataclass
class Manifest:
    """The contents of a prepared folder.

    Args:
        source: the settings that chose the documents, and the number and bytes of its files if they are local.
        column: the column of the source that held the text.
        tokenizer_fingerprint: see `common.fingerprints`.
        vocab_size: one more than the largest id of the tokenizer.
        max_length: most tokens of a document, [CLS] and [SEP] included.
        long_documents: `"truncate"` (the rest is left out) or `"split"` (each window is a document of its own).
        dtype: of the ids, `"uint16"` or `"int32"`.
        documents_per_shard: documents of the source (not of the shard) that went into each shard.
        source_documents: documents read.
        documents: documents (rows) written.
        tokens: ids written, special tokens included.
        dropped_short: documents left out because they have fewer than 2 ordinary tokens.
        length_histogram: documents by length in tokens. The key is the lower edge of a bin, a power of two; its bin
            reaches to twice that, exclusively.
        shards: `{"file", "documents", "tokens", "bytes", "checksum"}` in the order of the documents.
        texts: a checksum of the texts behind each shard, including texts that gave no shard.
        files_state: a hash of names, sizes and times of the source's files; None if the source is not local.
    """

    source: dict[str, Any]
    column: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_length: int
    long_documents: Literal["truncate", "split"]
    dtype: Literal["uint16", "int32"]
    documents_per_shard: int
    source_documents: int = 0
    documents: int = 0
    tokens: int = 0
    dropped_short: int = 0
    length_histogram: dict[int, int] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    files_state: str | None = None

    def save(self, file: Path) -> None:
        write_json(file, asdict(self))

    @classmethod
    def read(cls, file: Path) -> "Manifest":
        """Read what `save` wrote."""
        values = json.loads(file.read_text(encoding="utf-8"))
        # The keys of JSON are texts.
        values["length_histogram"] = {int(edge): count for edge, count in values["length_histogram"].items()}
        return cls(**values)


def write_shard(path: Path, documents: Iterable[list[int]], dtype: str) -> dict[str, Any] | None:
    """Write documents, given as their ids, as one Arrow IPC stream, whole or not at all.

    Returns:
        The shard's entry in the manifest; None (and no file) if there are no documents.

    Raises:
        OverflowError: if an id does not fit the dtype.
    """
    # An array takes a tenth of the memory of a list of numbers.
    documents = (np.array(document, dtype) for document in documents)
    batch = list(islice(documents, RECORD_BATCH))
    if not batch:
        return None
    entry = {"file": path.name, "documents": 0, "tokens": 0}
    schema = pa.schema({"input_ids": pa.list_(pa.from_numpy_dtype(dtype))})
    with atomic_write(path) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            while batch:
                offsets = np.cumsum([0, *map(len, batch)], dtype=np.int32)
                ids = pa.array(np.concatenate(batch))
                writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, ids)], schema=schema))
                entry["documents"] += len(batch)
                entry["tokens"] += len(ids)
                batch = list(islice(documents, RECORD_BATCH))
        entry |= {"bytes": partial.stat().st_size, "checksum": file_checksum(partial)}
    return entry


def check_shard(folder: Path, shard: dict[str, Any]) -> None:
    """Raises:
    FileNotFoundError: if the shard's file is not there.
    """
    file = folder / shard["file"]
    if not file.is_file():
        again = f"delete {folder} and run examples/prepare_data.py again."
        raise FileNotFoundError(f"{file}, a shard that was written there, is missing: restore it, or {again}")


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a prepared folder, after a look for every shard.

    Raises:
        FileNotFoundError: if the folder is not prepared, or a shard is missing.
        ValueError: if preparation is unfinished.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        if any(folder.glob("progress/*")):
            raise ValueError(f"{folder} is not finished: run the same examples/prepare_data.py command again.")
        raise FileNotFoundError(
            f"{folder} holds no {MANIFEST}, so it is not a tokenised corpus: run examples/prepare_data.py with "
            f"--output_dir {folder}, or name the folder of an earlier run."
        )
    manifest = Manifest.read(folder / MANIFEST)
    for shard in manifest.shards:
        check_shard(folder, shard)
    return manifest


def load_shards(folder: str | Path, manifest: Manifest | None = None) -> Dataset:
    """The documents of a prepared folder, mapped into memory: constant memory, any number of readers.

    Args:
        manifest: what `read_manifest` returned, if it has been called, so that it need not look at every shard again.

    Returns:
        A dataset with the column `input_ids`, one list of ids per document, shards in manifest order.

    Example:

    ```python
    >>> documents = load_shards("data/refinedweb")
    >>> tokenizer = load_tokenizer("data/refinedweb")
    >>> tokenizer.decode(documents[0]["input_ids"])
    ```
    """
    folder = Path(folder)
    manifest = manifest or read_manifest(folder)
    return concatenate_datasets([Dataset.from_file(str(folder / shard["file"])) for shard in manifest.shards])


def load_tokenizer(folder: str | Path, manifest: Manifest | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer that made the ids of a prepared folder. For the arguments, see `load_shards`.

    Raises:
        ValueError: if `tokenizer/` holds another tokenizer. For the rest, see `read_manifest`.
    """
    folder = Path(folder)
    manifest = manifest or read_manifest(folder)
    if not (folder / TOKENIZER).is_dir():
        raise FileNotFoundError(f"{folder / TOKENIZER} is missing: restore it, or prepare {folder} again.")
    # Cut texts at the same length as those of the shards, whatever tokenizer_config.json says by now.
    tokenizer = tokenizers.load_tokenizer(folder / TOKENIZER, model_max_length=manifest.max_length)
    found = tokenizer_fingerprint(tokenizer)
    if found != manifest.tokenizer_fingerprint:
        raise ValueError(
            f"{folder / TOKENIZER} has the fingerprint {found[:12]}, but the ids of {folder} were made by "
            f"{manifest.tokenizer_fingerprint[:12]}: restore that tokenizer, or prepare the text again."
        )
    tokenizers.check_tokenizer(tokenizer, manifest.vocab_size, f"{folder / TOKENIZER}, with {folder / MANIFEST},")
    return tokenizer
