"""Parquet files for rows that a run stores once and reads again at each start, such as mined negatives."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from neobert_hf.common.files import atomic_write


ROWS_OF_GROUP = 10_000
# In the metadata of the files.
MARK = b"neobert_hf"


def store_rows(rows: Dataset, file: Path) -> None:
    """Write a Parquet file whole or not at all; its folder is created if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    schema = rows.features.arrow_schema
    schema = schema.with_metadata({**(schema.metadata or {}), MARK: b"stored rows"})
    with atomic_write(file) as partial, pq.ParquetWriter(partial, schema) as writer:
        for table in rows.with_format("arrow").iter(ROWS_OF_GROUP):
            writer.write_table(table.cast(schema))


def is_stored(file: Path) -> bool:
    """Whether `store_rows` wrote this file."""
    try:
        return MARK in (pq.read_schema(file).metadata or {})
    except pa.ArrowInvalid:
        return False


def load_rows(file: Path) -> Dataset:
    """The rows that `store_rows` wrote."""
    return Dataset.from_parquet(str(file))
