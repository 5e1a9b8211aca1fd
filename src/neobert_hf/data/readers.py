"""Readers of one file or dataset each: Parquet, JSON lines, CSV, TSV and plain text, also compressed.

A reader yields the cells of the rows of one file, which is a path or a URL, and raises any error; `sources.py` adds
file and row. It may leave out columns that are not asked for. Those of JSON and Parquet can begin at a row without
parsing the rows before it. A cell of a CSV file is the text that is written there: `007` is not 7, and `NA` is no
missing value.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, IterableDataset

from neobert_hf.data.rows import NoColumnError, no_column


COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
BATCH = 1_000


@contextmanager
def open_file(file: str | Path) -> Iterator[BinaryIO]:
    with fsspec.open(str(file), "rb", compression="infer") as handle:
        yield handle


def read_lines(file: str | Path) -> Iterator[str]:
    """The lines of a text file in UTF-8, with their ends."""
    with open_file(file) as lines:
        for number, line in enumerate(lines):
            yield line.decode("utf-8" if number else "utf-8-sig")


def unparsed_json(file: str | Path) -> Iterator[Any]:
    """The rows of a file of JSON: the lines of one row each as they are, or the items of an array."""
    lines = read_lines(file)
    first = next(lines, "")
    if first.lstrip().startswith("["):
        return iter(json.loads(first + "".join(lines)))
    return (line for line in chain([first], lines) if line.strip())


def read_json(file: str | Path, columns: Sequence[str] | None, first: int = 0) -> Iterator[dict[str, Any]]:
    """One row a line, or an array of rows; from row `first` on."""
    for unparsed in islice(unparsed_json(file), first, None):
        row = json.loads(unparsed) if isinstance(unparsed, str) else unparsed
        if not isinstance(row, dict):
            raise ValueError(f"{row!r:.60} is no row, which must be an object, {{...}}")
        yield row


def read_csv(file: str | Path, columns: Sequence[str] | None) -> Iterator[dict[str, str]]:
    """The first line names the columns. In `.tsv` files tabs separate cells, and quotes are ordinary text."""
    tabs = suffix_of(file) == ".tsv"
    csv.field_size_limit(2**31 - 1)
    lines = read_lines(file)
    first = next(lines, "")
    # Where numbers have a decimal comma, Excel separates the cells of a .csv file by semicolons, or by what a first
    # line says, `sep=;`.
    separator = ";" if ";" in first and "," not in first else ","
    if said := re.fullmatch(r'"?sep=(.)"?\s*', first, re.IGNORECASE):
        separator, first = said[1], next(lines, "")
    options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"delimiter": separator, "strict": True}
    rows = csv.reader(chain([first], lines), **options)
    names = next(rows, [])
    if len(set(names)) < len(names):
        raise ValueError(f"the first line must name the columns, each once; it is {names}")
    if len(names) == 1 and not tabs and "\t" in names[0]:
        raise ValueError(f"the first line, {names[0]!r:.60}, has tabs: name the file .tsv, or save it with commas")
    for row in rows:
        if row and len(row) != len(names):
            raise ValueError(f"it has {len(row)} fields, but the first line names {len(names)}: {', '.join(names)}")
        if row:
            yield dict(zip(names, row))


def read_parquet(file: str | Path, columns: Sequence[str] | None, first: int = 0) -> Iterator[dict[str, Any]]:
    """Only the columns that are asked for, from row `first` on. Labels are given by their names."""
    # Buffered ahead, all of the file would be in memory at the end.
    with open_file(file) as handle, pq.ParquetFile(handle, pre_buffer=False) as table:
        schema = table.schema_arrow
        _check_columns(columns, schema.names)
        # A group may have a million rows. Those before the first row are not read, and of its own few at a time.
        groups = list(range(table.num_row_groups))
        while groups and first >= (size := table.metadata.row_group(groups[0]).num_rows):
            first -= size
            groups.pop(0)
        batches = table.iter_batches(BATCH, groups, columns)
        yield from rows_of_batches(batches, Features.from_arrow_schema(schema), first)


def read_document(file: str | Path, columns: Sequence[str] | None) -> Iterator[dict[str, str]]:
    """A plain text file is one row, with its text in `text`. All line ends become \\n."""
    yield {"text": io.StringIO("".join(read_lines(file)), newline=None).read()}


def read_dataset(table: Dataset | IterableDataset, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """The rows of a dataset of the Hub."""
    # Some builders know the columns only when they have read a row.
    if columns is not None and table.column_names:
        _check_columns(columns, table.column_names)
        table = table.select_columns(columns)
    # As Arrow, so that images and sounds are not decoded, nor fetched from whatever address they give.
    yield from rows_of_batches(table.with_format("arrow").iter(BATCH), table.features or {})


def read_dictionaries(table: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a list. As in JSON lines, they may lack columns, and a column may hold numbers and texts."""
    for row in table:
        if not isinstance(row, Mapping):
            raise TypeError(f"{row!r:.60} is no row, which must be a dictionary such as {{'text': 'a'}}")
        # Numbers and arrays of NumPy become those of Python, and tuples lists.
        cells = {name: list(cell) if isinstance(cell, tuple) else cell for name, cell in row.items()}
        yield {name: cell.tolist() if hasattr(cell, "tolist") else cell for name, cell in cells.items()}


def _check_columns(wanted: Sequence[str] | None, found: Sequence[str]) -> None:
    for name in wanted or ():
        if name not in found:
            raise NoColumnError(no_column(name, found))


def rows_of_batches(
    batches: Iterable[pa.RecordBatch | pa.Table], features: Mapping[str, Any], first: int = 0
) -> Iterator[dict[str, Any]]:
    kinds = {column: getattr(kind, "feature", kind) for column, kind in features.items()}
    names = {column: kind.names for column, kind in kinds.items() if isinstance(kind, ClassLabel)}
    for batch in batches:
        rows, first = batch[first:], max(0, first - len(batch))
        for row in rows.to_pylist():
            yield row | {column: _class_names(row[column], names[column]) for column in row.keys() & names.keys()}


def _class_names(cell: Any, names: list[str]) -> Any:
    if isinstance(cell, list):
        return [_class_names(one, names) for one in cell]
    # `datasets` marks a missing label with -1.
    return None if cell is None or cell < 0 else names[cell]


def suffix_of(file: Path) -> str:
    """The suffix that gives a file's format, without that of its compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


Reader = Callable[[str | Path, Sequence[str] | None], Iterator[dict[str, Any]]]
READERS: Mapping[str, Reader] = {
    **{".parquet": read_parquet, ".jsonl": read_json, ".json": read_json, ".csv": read_csv, ".tsv": read_csv},
    **dict.fromkeys((".txt", ".md", ".markdown", ".rst"), read_document),
}
