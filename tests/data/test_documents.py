"""What training reads of prepared folders: few shards open, and at a URL through copies."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from neobert_hf.data.documents import KEPT_OPEN, Documents
from tests.helpers.shards import write_folder


ROWS = [[number % 90] * (4 + number % 7) for number in range(60)]
SIZES = [20, 1, 30, 9]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NEOBERT_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["disk", "url"])
def folder(request, tmp_path) -> str:
    local = write_folder(tmp_path / "prepared", ROWS, SIZES)
    if request.param == "disk":
        return str(local)
    files = fsspec.filesystem("memory")
    files.put(str(local), f"/{tmp_path.name}", recursive=True)
    return f"memory://{tmp_path.name}"


def test_lengths_are_known_without_copying_a_shard(folder, cache):
    documents = Documents([folder])
    lengths = [documents.lengths(shard) for shard in range(len(SIZES))]
    assert np.concatenate(lengths).tolist() == [len(row) for row in ROWS] and not list(cache.rglob("*.arrow"))


def test_a_shard_at_a_url_is_copied_once_when_it_is_first_used(tmp_path, cache):
    write_folder(tmp_path / "prepared", ROWS, SIZES)
    fsspec.filesystem("memory").put(str(tmp_path / "prepared"), "/once", recursive=True)
    documents = Documents(["memory://once"])
    documents[20]
    assert len(list((cache / "copies").iterdir())) == 1
    assert [ids.tolist() for ids in documents] == ROWS
    # Whoever comes later needs no other copy.
    fsspec.filesystem("memory").rm("/once/shard-00000.arrow")
    fsspec.filesystem("memory").touch("/once/shard-00000.arrow")
    assert [ids.tolist() for ids in Documents(["memory://once"])] == ROWS


def test_a_shard_that_is_not_what_was_prepared_is_named(folder, tmp_path):
    other = write_folder(tmp_path / "other", [[1, 2]] * 60, SIZES) / "shard-00002.arrow"
    with fsspec.open(f"{folder}/shard-00002.arrow", "wb") as file:
        file.write(other.read_bytes())
    documents = Documents([folder])
    documents[20]
    with pytest.raises(ValueError, match="shard-00002.arrow has 30 documents with 60 tokens"):
        documents[21]


def test_half_a_shard_is_named(tmp_path):
    """As an interrupted copy leaves it."""
    folder = write_folder(tmp_path / "prepared", ROWS, SIZES)
    whole = (folder / "shard-00002.arrow").read_bytes()
    for size in (len(whole) - 700, 100, 0):
        (folder / "shard-00002.arrow").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="shard-00002.arrow (cannot be read|has 0 documents)"):
            Documents([folder])[21]


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
