"""What training reads of prepared folders: few shards open, each checked once, at a URL through copies."""

import multiprocessing
from pathlib import Path

import fsspec
import numpy as np
import pytest

from neobert_hf.data import documents as module
from neobert_hf.data.documents import KEPT_OPEN, Documents
from tests.helpers.shards import write_folder


ROWS = [[number % 90] * (4 + number % 7) for number in range(60)]
SIZES = [20, 1, 30, 9]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NEOBERT_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checked(monkeypatch) -> list[str]:
    """The files whose checksums this process computes."""
    files, original = [], module.file_checksum
    monkeypatch.setattr(module, "file_checksum", lambda file: files.append(Path(file).name) or original(file))
    return files


@pytest.fixture(params=["disk", "url"])
def folder(request, tmp_path) -> str:
    local = write_folder(tmp_path / "prepared", ROWS, SIZES)
    if request.param == "disk":
        return str(local)
    files = fsspec.filesystem("memory")
    files.put(str(local), f"/{tmp_path.name}", recursive=True)
    return f"memory://{tmp_path.name}"


def test_lengths_are_known_without_opening_a_shard(folder, checked):
    documents = Documents([folder])
    lengths = [documents.lengths(shard) for shard in range(len(SIZES))]
    assert np.concatenate(lengths).tolist() == [len(row) for row in ROWS] and checked == []


def read_all(folder: str) -> None:
    assert [ids.tolist() for ids in Documents([folder])] == ROWS


def test_a_shard_is_checked_once_per_machine_and_when_it_is_first_used(folder, checked):
    documents = Documents([folder])
    documents[20]
    assert len(checked) == 1
    read_all(folder)
    assert len(checked) == len(SIZES)
    # Another process has not checked them, and need not.
    if "://" not in folder:
        process = multiprocessing.get_context("fork").Process(target=read_all, args=(folder,))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert len(checked) == len(SIZES)


def test_a_shard_that_is_not_what_was_prepared_is_named(folder):
    with fsspec.open(f"{folder}/shard-00002.arrow", "ab") as file:
        file.write(b"more")
    documents = Documents([folder])
    documents[20]
    with pytest.raises(ValueError, match="shard-00002.arrow has the checksum"):
        documents[21]


def test_few_shards_are_mapped(tmp_path):
    """65,286 would be more than Linux lets a process map."""
    count = 2 * KEPT_OPEN
    documents = Documents([write_folder(tmp_path / "many", [[1, 2]] * count, [1] * count)])
    assert all(ids.tolist() == [1, 2] for ids in documents)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/many/shard" in line}
    assert 0 < len(mapped) <= KEPT_OPEN


def test_copies_have_a_limit(tmp_path, cache):
    files = fsspec.filesystem("memory")
    files.put(str(write_folder(tmp_path / "prepared", ROWS, SIZES)), "/limited", recursive=True)
    size = (tmp_path / "prepared" / "shard-00000.arrow").stat().st_size
    documents = Documents(["memory://limited"], cache_gb=2.5 * size / 1e9)
    for _ in range(2):
        assert [ids.tolist() for ids in documents] == ROWS
        assert sum(file.stat().st_size for file in (cache / "copies").iterdir()) <= 2.5 * size
        documents._open.cache_clear()
