"""Parquet files for rows that a run stores once and reads again at each start, such as mined negatives."""

from pathlib import Path

from datasets import Dataset

from neobert_hf.common.files import atomic_write


def store_rows(rows: Dataset, file: Path) -> None:
    """Write a Parquet file whole or not at all; its folder is created if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial:
        rows.to_parquet(partial)


def load_rows(file: Path) -> Dataset:
    """The rows that `store_rows` wrote."""
    return Dataset.from_parquet(str(file))
