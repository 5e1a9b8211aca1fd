"""The documents of prepared folders, as training reads them.

Shards are mapped into memory, few at a time. A folder may be a URL (`s3://`, `hf://`): its shards are copied to this
machine when they are first used, and the copies that were used least recently go when there are too many. The checksum
of each shard is compared with the manifest once on every machine, however many processes and epochs read it.

Copies, and marks of what was compared, are in the folder that the environment variable `NEOBERT_HF_CACHE` names, or
else in `neobert_hf` beside the caches of `huggingface_hub`.
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
from neobert_hf.common.fingerprints import file_checksum
from neobert_hf.data.shards import lengths_name, read_manifest


# Linux lets a process map 65,530 files, and RefinedWeb has more shards. Open are those of a few groups.
KEPT_OPEN = 128


class DocumentKey(NamedTuple):
    """One document in one epoch of one subset. With the seed, this determines its mask."""

    row: int
    epoch: int
    subset: int


class Documents(torch.utils.data.Dataset):
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
    >>> documents = Documents(["data/refinedweb"])
    >>> load_tokenizer("data/refinedweb").decode(documents[0])
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
        name = lengths_name(entry["file"])
        if "://" not in folder:
            return np.load(Path(folder, name))
        with _alone(entry["checksum"]):
            return np.load(self._copy(f"{folder}/{name}", f"{entry['checksum']}.npy"))

    @lru_cache(maxsize=KEPT_OPEN)  # noqa: B019  documents live as long as the process
    def _open(self, shard: int) -> pa.ChunkedArray:
        folder, entry = self.shards[shard]
        url, checksum = f"{folder}/{entry['file']}", entry["checksum"]
        with _alone(checksum):
            if "://" in folder:
                file = self._copy(url, f"{checksum}.arrow", checksum)
            else:
                file = Path(url)
                _check_once(file, checksum)
            return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()["input_ids"]

    def _copy(self, url: str, name: str, checksum: str | None = None) -> Path:
        """The copy of a file at a URL, which is made if it is not there."""
        copy = _cache() / "copies" / name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            files, path = url_to_fs(url)
            with atomic_write(copy) as partial:
                files.get_file(path, str(partial))
                if checksum is not None:
                    _check(partial, checksum, url)
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
                raise FileNotFoundError(f"{folder}/{wanted} is missing: copy it again, or prepare the folder again.")


def _cache() -> Path:
    return Path(os.environ.get("NEOBERT_HF_CACHE") or Path(HF_HOME, "neobert_hf")).expanduser()


def _alone(checksum: str) -> FileLock:
    """Of the processes of this machine, one copies and checks a shard; the others wait for it.

    There are 16 locks, by the first digit of the checksum: as many shards can be copied at a time.
    """
    folder = _cache() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / checksum[0])


def _check_once(file: Path, checksum: str) -> None:
    """Check a shard on a disk, unless this machine has done so since it was written."""
    state = file.stat()
    mark = _cache() / "checked" / f"{checksum}-{state.st_ino}-{state.st_mtime_ns}"
    if not mark.exists():
        _check(file, checksum, str(file))
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _check(file: Path, checksum: str, name: str) -> None:
    if (found := file_checksum(file)) != checksum:
        raise ValueError(
            f"{name} has the checksum {found}, but {checksum} in the manifest: it is not what prepare_data.py wrote. "
            "Copy it again, or prepare the folder again."
        )


def _make_room(folder: Path, most: int) -> None:
    """Delete the copies that were used least recently, not the newest. Who has mapped one can go on reading it."""
    with FileLock(folder.parent / "locks" / "room"):
        copies = [file for file in folder.iterdir() if not file.name.endswith(".partial")]
        copies = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in copies)
        size = sum(of_copy for _, of_copy, _ in copies)
        for _, of_copy, file in copies[:-1]:
            if size <= most:
                break
            file.unlink()
            size -= of_copy
