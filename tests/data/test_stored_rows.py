"""Rows that a run stores are read as they were written."""

import numpy as np
import pytest
from datasets import Dataset, List, Value

from neobert_hf.data.stored_rows import load_rows, store_rows


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


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows, file = KINDS[kind], tmp_path / "folder" / "rows.parquet"
    store_rows(rows, file)
    found = load_rows(file)
    assert found[:] == rows[:] and found.features == rows.features
    assert [path.name for path in file.parent.iterdir()] == ["rows.parquet"]
