"""Rows that a run stores: what is read is what was written, or an error, whichever bit is flipped."""

import os
import random
import re

import numpy as np
import pytest
from datasets import Dataset, List, Value

from neobert_hf.common.results import ResultError
from neobert_hf.common.row_files import read_rows
from neobert_hf.common.stored_rows import load_rows, store_rows
from neobert_hf.common.text_sources import load_table


def kinds_of_rows() -> dict[str, Dataset]:
    """As mining, clusters and `make_pairs` store them."""
    texts = [f"text {number} of some words" for number in range(50)]
    pairs = Dataset.from_dict({"query": texts, "positive": texts[::-1]})
    mined = pairs.add_column("negatives", [texts[:number] for number in range(50)])
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    clusters = mined.add_column("cluster", np.arange(50) // 7, feature=Value("int32"))
    clusters = clusters.add_column("query_vector", list(vectors), feature=List(Value("float32"), length=8))
    # Through a table of row numbers.
    clusters = clusters.select(range(49, -1, -1))
    return {"pairs": pairs, "mined": mined, "clusters": clusters}


KINDS = kinds_of_rows()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def flipped(content: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    return bytes(damaged)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_an_error_or_harmless(kind, tmp_path):
    rows, file, generator = KINDS[kind], tmp_path / "folder" / "rows.parquet", random.Random(kind)
    store_rows(rows, file)
    found = load_rows(file)
    assert found[:] == rows[:] and found.features == rows.features
    assert [path.name for path in file.parent.iterdir()] == ["rows.parquet"]
    content, refused = file.read_bytes(), 0
    for number in range(40):
        # A name that nothing is in the cache of.
        damaged = tmp_path / f"{number}.parquet"
        damaged.write_bytes(flipped(content, generator))
        try:
            found = load_rows(damaged)
        except ResultError as error:
            assert f"{damaged} is damaged" in str(error) and "delete it, and it will be made again" in str(error)
            refused += 1
        else:
            assert found[:] == rows[:] and found.features == rows.features
    assert refused > 20


def test_damage_is_noticed_beside_a_cache_of_the_undamaged(tmp_path):
    rows, file, generator = KINDS["mined"], tmp_path / "rows.parquet", random.Random(0)
    store_rows(rows, file)
    load_rows(file)
    content, before, refused = file.read_bytes(), file.stat().st_mtime_ns, 0
    for number in range(30):
        file.write_bytes(flipped(content, generator))
        # The cache goes by the time of the file: it holds these rows at first, and then no rows yet.
        for time in (before, before + 10**9 * (number + 1)):
            os.utime(file, ns=(time, time))
            try:
                found = load_rows(file)
            except ResultError:
                refused += time != before
            else:
                assert found[:] == rows[:]
    assert refused > 15


def test_names_of_columns_have_no_checksum_but_are_compared(tmp_path):
    """A bit there leaves every page whole, and the column is read as one of missing values."""
    rows = KINDS["clusters"]
    store_rows(rows, tmp_path / "rows.parquet")
    content, refused = (tmp_path / "rows.parquet").read_bytes(), 0
    places = [match.start() for name in rows.column_names for match in re.finditer(name.encode(), content)]
    for place in places:
        damaged = tmp_path / f"{place}.parquet"
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert load_rows(damaged)[:] == rows[:]
        except ResultError as error:
            refused += "its rows are not those that were written" in str(error)
    assert refused


def test_what_something_else_wrote_is_refused(tmp_path):
    KINDS["mined"].to_parquet(tmp_path / "foreign.parquet")
    store_rows(KINDS["mined"], tmp_path / "rows.parquet")
    (tmp_path / "half.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-100])
    for name in ("foreign", "half"):
        with pytest.raises(ResultError, match=f"{name}.parquet is damaged, or was written by something else"):
            load_rows(tmp_path / f"{name}.parquet")


def test_checksums_of_pages_are_compared_wherever_such_files_are_read(tmp_path):
    """Pairs that `make_pairs` wrote are data like any other to the recipes."""
    file = tmp_path / "rows.parquet"
    store_rows(KINDS["pairs"], file)
    assert load_table("pairs", str(file), None, "train")[:] == KINDS["pairs"][:]
    content = file.read_bytes()
    for place in (100, 400, 700):
        damaged = tmp_path / f"{place}.parquet"
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ValueError, match="CRC checksum verification failed"):
            load_table("pairs", str(damaged), None, "train")
        with pytest.raises(ValueError, match=f"{damaged} cannot be read: .*CRC checksum"):
            list(read_rows([str(damaged)], ("query", "positive")))
