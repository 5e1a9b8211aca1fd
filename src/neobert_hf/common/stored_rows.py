"""Checked Parquet files, for rows that a run stores once and reads again at each start, such as mined negatives.

A file holds a fingerprint of its rows, and each of its pages has a checksum. Damage is an error even if the file's size
and time are unchanged, or an intact copy of its rows is in the cache of `datasets`.
"""

from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset
from pyarrow.dataset import ParquetFragmentScanOptions

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.fingerprints import data_fingerprint
from neobert_hf.common.results import ResultError


# A key in the metadata of a Parquet file.
FINGERPRINT = "fingerprint of the rows"
ROWS_OF_GROUP = 10_000


def verified_pages() -> ParquetFragmentScanOptions:
    """An option for `datasets`: verify the checksums of pages that have them."""
    return ParquetFragmentScanOptions(page_checksum_verification=True)


def store_rows(rows: Dataset, file: Path) -> None:
    """Write a Parquet file whole or not at all; its folder is created if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    schema = rows.features.arrow_schema
    with atomic_write(file) as partial, pq.ParquetWriter(partial, schema, write_page_checksum=True) as writer:
        for table in rows.with_format("arrow").iter(ROWS_OF_GROUP):
            writer.write_table(table)
        writer.add_key_value_metadata({FINGERPRINT: data_fingerprint(rows)})


def load_rows(file: Path) -> Dataset:
    """The rows that `store_rows` wrote.

    Raises:
        ResultError: if the file is damaged, or was not written by `store_rows`.
    """
    try:
        expected = pq.read_metadata(file).metadata[FINGERPRINT.encode()].decode()
        rows = Dataset.from_parquet(str(file), fragment_scan_options=verified_pages())
        if data_fingerprint(rows) != expected:
            raise ValueError("its rows are not those that were written")
    except Exception as error:  # Damage may raise many kinds of errors.
        reason = error.__cause__ or error
        raise ResultError(
            f"{file} is damaged, or was written by something else ({type(reason).__name__}: {reason}). Restore it. Or "
            "delete it, and it will be made again; a run that already began with it must then start from scratch."
        ) from error
    return rows
