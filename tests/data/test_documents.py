"""Prepared folders: what is written is what is read, if it is whole; of a URL, through copies of its shards."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from neobert_hf.data.documents import KEPT_OPEN, PreparedDocuments
from neobert_hf.data.shards import read_manifest
from tests.helpers.shards import write_folder


ROWS = [[number % 90] * (4 + number % 7) for number in range(60)]
# For the texts of the last shard nothing was kept.
SIZES = [20, 1, 30, 9, 0]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "prepared", ROWS, SIZES)


@pytest.fixture
def copies(tmp_path, monkeypatch) -> Path:
    """The folder for copies of shards at URLs."""
    monkeypatch.setenv("NEOBERT_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "copies"


@pytest.fixture
def url(folder, tmp_path, copies) -> str:
    fsspec.filesystem("memory").put(str(folder), f"/{tmp_path.name}", recursive=True)
    return f"memory://{tmp_path.name}"


def test_what_is_read_is_what_was_written(folder):
    documents = PreparedDocuments([folder, folder])
    assert [ids.tolist() for ids in documents] == 2 * ROWS
    assert np.concatenate([documents.lengths(shard) for shard in range(10)]).tolist() == [len(row) for row in 2 * ROWS]
    assert documents[0].dtype == np.int64 and documents.shards_in_folder == [5, 5]


def test_a_folder_that_is_not_whole_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no manifest.json"):
        read_manifest(tmp_path)
    (tmp_path / "texts.csv").write_text("text")
    with pytest.raises(NotADirectoryError, match="texts.csv"):
        read_manifest(tmp_path / "texts.csv")
    manifest = read_manifest(folder)
    (folder / "shard-00001.arrow").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00001.arrow"):
        PreparedDocuments([folder])
    manifest.finished = False
    manifest.save(folder)
    with pytest.raises(ValueError, match="is not finished"):
        read_manifest(folder)


@pytest.mark.parametrize("damage", ["of another folder", "half", "empty"])
def test_a_shard_that_is_not_what_was_prepared_is_named(folder, tmp_path, damage):
    shard = folder / "shard-00002.arrow"
    other = write_folder(tmp_path / "other", [[1, 2]] * 60, SIZES) / shard.name
    content = {"of another folder": other.read_bytes(), "half": shard.read_bytes()[:-700], "empty": b""}[damage]
    shard.write_bytes(content)
    documents = PreparedDocuments([folder])
    documents[20]
    with pytest.raises(ValueError, match=shard.name):
        documents[21]


def test_few_shards_are_mapped(tmp_path):
    """65,286 would be more than Linux lets a process map."""
    count = 2 * KEPT_OPEN
    documents = PreparedDocuments([write_folder(tmp_path / "many", [[1, 2]] * count, [1] * count)])
    assert all(ids.tolist() == [1, 2] for ids in documents)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/many/shard" in line}
    assert 0 < len(mapped) <= KEPT_OPEN


def test_a_shard_at_a_url_is_copied_once_when_it_is_first_used(url, copies):
    documents = PreparedDocuments([url])
    lengths = [documents.lengths(shard) for shard in range(len(SIZES))]
    assert np.concatenate(lengths).tolist() == [len(row) for row in ROWS] and not list(copies.glob("*.arrow"))
    documents[20]
    assert len(list(copies.glob("*.arrow"))) == 1
    assert [ids.tolist() for ids in documents] == ROWS
    # Whoever comes later needs no other copy.
    fsspec.filesystem("memory").pipe(f"{url}/shard-00000.arrow", b"")
    assert [ids.tolist() for ids in PreparedDocuments([url])] == ROWS


def test_copies_have_a_limit(url, copies, folder):
    most = int(2.5 * (folder / "shard-00000.arrow").stat().st_size)
    for _ in range(2):
        assert [ids.tolist() for ids in PreparedDocuments([url], cache_gb=most / 1e9)] == ROWS
        assert sum(file.stat().st_size for file in copies.iterdir()) <= most
