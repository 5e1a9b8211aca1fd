"""Parquet files for rows that a run stores once and reads again at each start, such as mined negatives."""

from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.results import ResultError


ROWS_OF_GROUP = 10_000


def store_rows(rows: Dataset, file: Path) -> None:
    """Write a Parquet file whole or not at all; its folder is created if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial, pq.ParquetWriter(partial, rows.features.arrow_schema) as writer:
        for table in rows.with_format("arrow").iter(ROWS_OF_GROUP):
            writer.write_table(table)


def load_rows(file: Path) -> Dataset:
    """The rows that `store_rows` wrote; ResultError if the file cannot be read."""
    try:
        return Dataset.from_parquet(str(file))
    except Exception as error:  # `datasets` raises many kinds of errors.
        raise ResultError(f"{file} cannot be read ({error}): delete it, and it will be made again.") from error
