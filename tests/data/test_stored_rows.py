"""Rows that a run stores are read as they were written."""

import numpy as np
from datasets import Dataset, List, Value

from neobert_hf.data.stored_rows import load_rows, store_rows


def test_what_is_read_is_what_was_written(tmp_path, monkeypatch):
    """As mining and clusters store them: lists of any length, vectors, and rows in another order."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [f"text {number} of some words" for number in range(50)]
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    rows = Dataset.from_dict({"query": texts, "negatives": [texts[:number] for number in range(50)]})
    rows = rows.add_column("cluster", np.arange(50) // 7, feature=Value("int32"))
    rows = rows.add_column("query_vector", list(vectors), feature=List(Value("float32"), length=8))
    rows, file = rows.select(range(49, -1, -1)), tmp_path / "folder" / "rows.parquet"
    store_rows(rows, file)
    found = load_rows(file)
    assert found[:] == rows[:] and found.features == rows.features
    assert [path.name for path in file.parent.iterdir()] == ["rows.parquet"]
