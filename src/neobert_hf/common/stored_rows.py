"""Rows that a run stores once and reads again at each start, such as mined negatives: checked Parquet files.

A file holds the fingerprint of its rows, and each of its pages a checksum. Damage is an error, whatever the size and
the time of the file say, and whatever copy of its rows is in the cache of `datasets`.
"""

from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset
from pyarrow.dataset import ParquetFragmentScanOptions

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.fingerprints import data_fingerprint
from neobert_hf.common.results import ResultError


# Of the metadata of a Parquet file.
FINGERPRINT = "fingerprint of the rows"
ROWS_OF_GROUP = 10_000


def verified_pages() -> ParquetFragmentScanOptions:
    """For `datasets`: pages are compared with their checksums, where they have them."""
    return ParquetFragmentScanOptions(page_checksum_verification=True)


def store_rows(rows: Dataset, file: Path) -> None:
    """Write a Parquet file whole or not at all, and the folder that it lies in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    schema = rows.features.arrow_schema
    with atomic_write(file) as partial, pq.ParquetWriter(partial, schema, write_page_checksum=True) as writer:
        for table in rows.with_format("arrow").iter(ROWS_OF_GROUP):
            writer.write_table(table)
        writer.add_key_value_metadata({FINGERPRINT: data_fingerprint(rows)})


def load_rows(file: Path) -> Dataset:
    """The rows that `store_rows` wrote.

    Raises:
        ResultError: if the file is damaged, or holds something else.
    """
    try:
        expected = pq.read_metadata(file).metadata[FINGERPRINT.encode()].decode()
        rows = Dataset.from_parquet(str(file), fragment_scan_options=verified_pages())
        if data_fingerprint(rows) != expected:
            raise ValueError("other rows than were written")
    except Exception as error:  # Damage shows itself in many ways.
        reason = error.__cause__ or error
        raise ResultError(
            f"{file} is damaged, or was written by something else ({type(reason).__name__}: {reason}). Restore it. Or "
            "delete it: it is made anew, but not for a run that has begun with it, which then has to start anew."
        ) from error
    return rows
