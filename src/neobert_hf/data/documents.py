"""The documents of prepared folders, as training reads them.

Shards are mapped into memory, few at a time. A folder may be a URL (`s3://`, `hf://`): its shards are copied to this
machine when they are first used, and the copies that were used least recently go when there are too many. They are in
the folder that the environment variable `NEOBERT_HF_CACHE` names, or else in `neobert_hf` beside the caches of
`huggingface_hub`.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock
from fsspec.core import url_to_fs
from huggingface_hub.constants import HF_HOME

from neobert_hf.common.files import atomic_write
from neobert_hf.data.shards import lengths_name, read_manifest


# Linux lets a process map 65,530 files, and RefinedWeb has more shards. Open are those of a few groups.
KEPT_OPEN = 128
AGAIN = "copy it again, or prepare the folder again."


class DocumentKey(NamedTuple):
    """One document in one epoch of one subset. With the seed, this determines its mask.

    `mlm_probability` is the share of its tokens to predict, if that changes in the course of training.
    """

    row: int
    epoch: int
    subset: int
    mlm_probability: float | None = None


class PreparedDocuments(torch.utils.data.Dataset):
    """The documents of several prepared folders, one folder after the other.

    Args:
        folders: paths or URLs.
        max_length: in tokens. Longer documents are cut as the tokenizer would: the last special token stays.
        cache_gb: most gigabytes of copies of shards at URLs that are kept on this machine.

    Attributes:
        shards: the folder of each shard, and what the manifest says of it.
        shards_in_folder: how many shards each folder has.
        ends: how many documents there are up to the end of each shard.

    Raises:
        FileNotFoundError: naming a shard that is missing. For the rest, see `read_manifest`.

    Example:

    ```python
    >>> documents = PreparedDocuments(["data/refinedweb"])
    >>> prepared_tokenizer("data/refinedweb").decode(documents[0])
    ```
    """

    def __init__(self, folders: Sequence[str | Path], max_length: int | None = None, cache_gb: float = 100):
        self.max_length = max_length
        self.cache_bytes = int(cache_gb * 1e9)
        self.shards: list[tuple[str, dict[str, Any]]] = []
        self.shards_in_folder = []
        for folder in map(str, folders):
            shards = read_manifest(folder).shards
            _check_complete(folder, [shard["file"] for shard in shards])
            self.shards += [(folder, shard) for shard in shards]
            self.shards_in_folder.append(len(shards))
        self.ends = np.cumsum([shard["documents"] for _, shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, row: int) -> np.ndarray:
        """The ids of a document, int64 (length,), special tokens included."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        shard = int(np.searchsorted(self.ends, row, side="right"))
        ids = self._open(shard)[row - self.first(shard)].values.to_numpy()
        if self.max_length is not None and len(ids) > self.max_length:
            ids = np.append(ids[: self.max_length - 1], ids[-1])
        return ids.astype(np.int64)

    def __getitems__(self, keys: list[DocumentKey]) -> list[dict[str, Any]]:
        return [{"input_ids": self[key.row], "key": key} for key in keys]

    def first(self, shard: int) -> int:
        """The row of the first document of a shard."""
        return int(self.ends[shard]) - self.shards[shard][1]["documents"]

    def lengths(self, shard: int) -> np.ndarray:
        """Tokens of each uncut document of a shard, int32. The shard itself is not opened."""
        folder, entry = self.shards[shard]
        return np.load(self._local(folder, lengths_name(entry["file"]), f"{entry['checksum']}.npy"))

    @lru_cache(maxsize=KEPT_OPEN)  # noqa: B019  documents live as long as the process
    def _open(self, shard: int) -> pa.ChunkedArray:
        folder, entry = self.shards[shard]
        file = self._local(folder, entry["file"], f"{entry['checksum']}.arrow")
        try:
            documents = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()["input_ids"]
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{folder}/{entry['file']} cannot be read ({error}): {AGAIN}") from error
        found = len(documents), sum(len(chunk.flatten()) for chunk in documents.chunks)
        if found != (entry["documents"], entry["tokens"]):
            raise ValueError(
                f"{folder}/{entry['file']} has {found[0]:,} documents with {found[1]:,} tokens, and in the manifest "
                f"{entry['documents']:,} with {entry['tokens']:,}: {AGAIN}"
            )
        return documents

    def _local(self, folder: str, name: str, name_of_copy: str) -> Path:
        """A file of a folder, or its copy if the folder is a URL, which is made if it is not there."""
        if "://" not in folder:
            return Path(folder, name)
        copy = _cache() / "copies" / name_of_copy
        # Of the processes of this machine, one copies a file; the others wait for it. There are 16 locks, by the first
        # digit of the checksum: as many files can be copied at a time.
        with _lock(name_of_copy[0]):
            if not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                files, path = url_to_fs(f"{folder}/{name}")
                with atomic_write(copy) as partial:
                    files.get_file(path, str(partial))
                _make_room(copy.parent, self.cache_bytes)
            os.utime(copy)
        return copy


def _check_complete(folder: str, names: list[str]) -> None:
    """Name a shard that is missing before training begins, not when it is first read."""
    files, root = url_to_fs(folder)
    found = {os.path.basename(path) for path in files.ls(root, detail=False)}
    for name in names:
        for wanted in (name, lengths_name(name)):
            if wanted not in found:
                raise FileNotFoundError(f"{folder}/{wanted} is missing: {AGAIN}")


def _cache() -> Path:
    return Path(os.environ.get("NEOBERT_HF_CACHE") or Path(HF_HOME, "neobert_hf")).expanduser()


def _lock(name: str) -> FileLock:
    folder = _cache() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / name)


def _make_room(folder: Path, most: int) -> None:
    """Delete the copies that were used least recently, not the newest. Who has mapped one can go on reading it."""
    with _lock("room"):
        copies = [file for file in folder.iterdir() if not file.name.endswith(".partial")]
        copies = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in copies)
        size = sum(of_copy for _, of_copy, _ in copies)
        for _, of_copy, file in copies[:-1]:
            if size <= most:
                break
            file.unlink()
            size -= of_copy
