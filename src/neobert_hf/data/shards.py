"""Tokenised corpora, as `prepare_data` writes them, in a folder or at a URL such as `s3://bucket/corpus`.

    folder/
        manifest.json               what was prepared, from what and how
        tokenizer/                  as saved by `save_pretrained`
        shard-00000.arrow           Arrow IPC stream with one column `input_ids`: special tokens included, no padding
        shard-00000.lengths.npy     the tokens of each document, int32, so that batches are planned without the shard
        shard-00001.arrow
        ...

Ids are uint16 when the vocabulary has at most 65,536 entries, else int32. `neobert_hf.data.documents` reads them.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import xxhash
from fsspec.core import url_to_fs
from transformers import PreTrainedTokenizerFast

from neobert_hf.common.files import write_whole
from neobert_hf.common.tokenizers import load_tokenizer


MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
# Documents per record batch. A reader needs 2 kB of memory for each batch: for RefinedWeb's 968 million documents
# 2.2 GB at 1,000 and 0.3 GB at 10,000.
RECORD_BATCH = 10_000
# Tokens of the shortest document, special ones included: with one of two masked, the other remains to predict it from.
SHORTEST = 4


@dataclass
class Manifest:
    """The contents of a prepared folder.

    Args:
        source: where the text was, as `--source` said.
        identity: everything that the shards depend on. `tokenizer` is its fingerprint, see `common.fingerprints`;
            `files` and `bytes` are those of a local source.
        vocab_size: one more than the largest id of the tokenizer.
        shards: of each shard, in the order of the documents, its `file`, the `documents` and `tokens` in it, and a
            `checksum` of the file, by which runs know that they read the same documents, wherever they lie.
        counts: what became of the rows of the source, see `preparing.COUNTS`.
        finished: whether all shards are there; before that, none is listed.
    """

    source: str
    identity: dict[str, Any]
    vocab_size: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    finished: bool = False

    def save(self, folder: str | Path) -> None:
        content = json.dumps(asdict(self), indent=2).encode()
        write_whole(f"{folder}/{MANIFEST}", lambda file: file.write(content))

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest | None":
        """The manifest of a folder, also of one that is not finished; None if there is none."""
        try:
            with fsspec.open(f"{folder}/{MANIFEST}") as file:
                return cls(**json.load(file))
        except (FileNotFoundError, NotADirectoryError):  # The latter if it is a file of texts.
            return None


def check_max_length(max_length: int) -> None:
    """Refuse a `max_length` that leaves nothing of a document."""
    if max_length < SHORTEST:
        raise ValueError(f"`max_length` is {max_length}; it must be {SHORTEST} or more, since two are special tokens.")


def lengths_name(shard: str) -> str:
    """The name of the file with the lengths of a shard's documents."""
    return shard.replace(".arrow", ".lengths.npy")


def write_shard(path: str, documents: Iterable[np.ndarray], vocab_size: int) -> dict[str, Any]:
    """Write documents, each an array of ids, as one Arrow IPC stream, and their lengths; whole or not at all.

    Args:
        path: path or URL, which ends in `.arrow`.
        vocab_size: one more than the largest id.

    Returns:
        `file`, `documents`, `tokens` and `checksum` for the manifest.
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    documents, lengths = iter(documents), []
    schema = pa.schema({"input_ids": pa.list_(pa.from_numpy_dtype(dtype))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(documents, RECORD_BATCH)):
            lengths += map(len, batch)
            offsets = np.cumsum([0, *map(len, batch)], dtype=np.int32)
            ids = pa.array(np.concatenate(batch).astype(dtype))
            writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, ids)], schema=schema))
    content = sink.getvalue()
    write_whole(lengths_name(path), lambda file: np.save(file, np.array(lengths, dtype=np.int32)))
    write_whole(path, lambda file: file.write(content))
    checksum = xxhash.xxh3_64(content).hexdigest()
    return {"file": os.path.basename(path), "documents": len(lengths), "tokens": sum(lengths), "checksum": checksum}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        FileNotFoundError: if the folder is not prepared.
        NotADirectoryError: if it is a file.
        ValueError: if preparation is unfinished.
    """
    manifest = Manifest.read(folder)
    if manifest is None and os.path.isfile(folder):
        raise NotADirectoryError(
            f"{folder} is a file, and not yet a tokenised corpus: run `prepare_data` with it as `source`, and give the "
            "`output_dir` of that."
        )
    if manifest is None:
        raise FileNotFoundError(
            f"{folder} holds no {MANIFEST}, so it is not a tokenised corpus: give the `output_dir` of `prepare_data`, "
            "which is run first, with raw text as its `source`."
        )
    if not manifest.finished:
        raise ValueError(f"{folder} is not finished: run `prepare_data` with the same settings again.")
    return manifest


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str) -> None:
    files, root = url_to_fs(f"{folder}/{TOKENIZER}")
    with tempfile.TemporaryDirectory() as local:
        tokenizer.save_pretrained(local)
        files.put(f"{local}/", root, recursive=True)


def prepared_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer that made the ids of a prepared folder, with the length at which it cut texts."""
    manifest = read_manifest(folder)
    options = {"model_max_length": manifest.identity["max_length"]}
    if "://" not in str(folder):
        return load_tokenizer(Path(folder) / TOKENIZER, manifest.vocab_size, **options)
    files, root = url_to_fs(f"{folder}/{TOKENIZER}")
    with tempfile.TemporaryDirectory() as local:
        files.get(f"{root}/", local, recursive=True)
        return load_tokenizer(local, manifest.vocab_size, **options)
