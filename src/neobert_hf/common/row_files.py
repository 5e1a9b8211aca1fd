"""Readers of Parquet, JSON lines, CSV and text files that yield one row at a time, with only the requested columns.

Memory stays bounded whatever a file holds, since small compressed files can expand to any size. Images and the like are
not decoded, so that no address in a file is fetched. Every error names the file and the row.
"""

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value


BUILDERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
}
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
# The numbering of a split in several files: the number of the part, and how many there are.
PART = re.compile(r"-(\d+)-of-(\d+)\.")
# The name of a column with the number that a row had before others were left out.
ROW = "number of the row"
# The types of columns of numbers in a CSV file, and how their values are written. Longer whole numbers are text, since
# neither type holds all their digits.
NUMBERS = {
    "int64": re.compile(r"-?(0|[1-9][0-9]{0,17})"),
    "float64": re.compile(r"-?(((0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"),
}
# A list of texts or numbers, as Python and NumPy print it.
LIST_AS_TEXT = re.compile(r"""\[\s*(['"].*['"]|-?[0-9][-+0-9.,eE\s]*)\s*\]""", re.DOTALL)
# In bytes. A text file is one document, which is held in memory whole.
LARGEST_TEXT_FILE = 64 * 2**20
# In bytes: the limit for a line of a JSON lines file, a JSON array, or a compressed Parquet file.
LARGEST_JSON = 256 * 2**20
PARQUET_ROWS = 1_000


def number_rows(table: Dataset) -> Dataset:
    """The table with the additional column `ROW`."""
    return table.add_column(ROW, list(range(len(table))))


def list_as_text(cells: Iterable) -> str | None:
    """The first cell, if all that are not empty are lists written as text, as pandas writes them into a CSV file."""
    filled = [cell for cell in cells if cell and cell != "[]"]
    found = filled and all(isinstance(cell, str) and LIST_AS_TEXT.fullmatch(cell) for cell in filled)
    return filled[0] if found else None


def is_missing(identity: Any) -> bool:
    """Whether a cell of a column of ids, numbers or strings, holds none."""
    return identity is None or not str(identity).strip()


def check_parts(files: list[Path], what: str) -> None:
    """Refuse files that are neither a single file nor all parts of one split: a copy may be unfinished, or repeat rows.

    Args:
        files: one or more files of one split. Parts are numbered as on the Hub, `-00000-of-00002`.
        what: the name of the split, for the message.
    """
    parts = [PART.search(file.name) for file in files]
    if len(files) == 1 and parts[0] is None:
        return
    numbers = [int(part[1]) for part in parts if part]
    kinds = {(part[2], file.name[part.end() :]) for part, file in zip(parts, files) if part}
    if not all(parts) or len(kinds) > 1 or sorted(numbers) != list(range(int(parts[0][2]))):
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{what}: {names} in {files[0].parent} are neither one file nor all parts of one. Restore the missing "
            "parts, or keep only one file there."
        )


def suffix_of(file: Path) -> str | None:
    """The suffix that gives a file's format, without that of its compression; None if the format is unknown."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in BUILDERS else None


def read_rows(files: list[str], columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows of files of one or several formats, in order.

    Args:
        columns: the columns to read. The first holds a text or None in every row, the others ids (numbers or strings).

    Raises:
        ValueError: naming the file and the row that cannot be used.
    """
    readers = {"parquet": _read_parquet, "json": _read_json, "csv": _read_csv, "text": _read_text}
    for file in files:
        try:
            yield from readers[BUILDERS[suffix_of(Path(file))]](file, columns)
        except Exception as error:  # Each format and each compression raises its own errors.
            if type(error) in (ValueError, MemoryError):
                raise
            raise ValueError(f"{file} cannot be read: {error}. Restore it, or exclude it by a pattern.") from error


def open_file(file: str) -> AbstractContextManager[BinaryIO]:
    """A binary file handle that decompresses while reading."""
    return fsspec.open(file, "rb", compression="infer")


def read_bounded(handle: BinaryIO, limit: int, file: str, advice: str) -> bytes:
    """The rest of a file. If that is more than `limit` bytes, raises ValueError before reading all of it."""
    content = handle.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{file} has more than {limit:,} bytes: {advice}")
    return content


def _read_text(file: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    _check_columns(file, columns, ["text"])
    advice = 'a text file is one document here. For a corpus in one file, write JSON lines, {"text": "..."} each.'
    with open_file(file) as handle:
        content = read_bounded(handle, LARGEST_TEXT_FILE, file, advice)
    try:
        # All line ends become \n.
        yield {"text": io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}. Convert it, or exclude it by a pattern.") from error


def csv_rows(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a `.csv` or `.tsv` file whose first line names the columns. In `.tsv`, quotes are ordinary text.

    Raises:
        ValueError: naming the file and the line that cannot be used.
    """
    tabs = ".tsv" in [suffix.lower() for suffix in file.suffixes]
    csv.field_size_limit(LARGEST_TEXT_FILE)
    with open_file(str(file)) as handle:
        text = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
        reader = csv.reader(text, **options)
        try:
            head = next(reader, [])
            if len(set(head)) < len(head) or not head:
                raise ValueError(f"{file}: the first line must name the columns, each once; it is {head}.")
            if len(head) == 1 and not tabs and (found := [mark for mark in ";\t" if mark in head[0]]):
                raise ValueError(
                    f"{file}: the first line, {head[0]!r:.60}, has {found[0]!r} but no comma. Save the file with "
                    "commas, or with tabs as .tsv."
                )
            for row in reader:
                if len(row) != len(head) and row:
                    raise ValueError(
                        f"{file}, line {reader.line_num:,} has {len(row)} fields, but the first line names "
                        f"{len(head)}: {', '.join(head)}."
                    )
                if row:
                    yield dict(zip(head, row))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}, line {_undecodable_line(file):,} is not UTF-8: convert the file (Excel: CSV UTF-8)."
            ) from error
        except csv.Error as error:
            raise ValueError(f"{file} cannot be read after line {reader.line_num:,} ({error}).") from error


def csv_features(files: list[Path], texts: Collection[str] = ()) -> Features:
    """The type of each column of CSV files: numbers if every value in every file is one, otherwise text.

    A reader that decides from a part of the rows would turn the id `007` into 7. Numbers with leading zeros are text.

    Args:
        texts: columns that are text whatever they hold.

    Raises:
        ValueError: if the files have different columns. For more, see `csv_rows`.
    """
    kinds: dict[str, int] = {}
    for file in files:
        for number, row in enumerate(csv_rows(file)):
            if not kinds:
                kinds = {name: len(NUMBERS) if name in texts else 0 for name in row}
            if number == 0 and row.keys() != kinds.keys():
                raise ValueError(f"{file} has the columns {', '.join(row)}; {files[0]} has {', '.join(kinds)}.")
            for name, value in row.items():
                if kinds[name] < len(NUMBERS):
                    kinds[name] = max(kinds[name], _kind_of_number(value))
    # The reader, pandas, calls a column without a name by its place. pandas writes the index of a table so.
    names = [name or f"Unnamed: {place}" for place, name in enumerate(kinds)]
    return Features({name: Value([*NUMBERS, "string"][kind]) for name, kind in zip(names, kinds.values())})


def _kind_of_number(value: str) -> int:
    """The place in `NUMBERS` of the first type that holds a text as a number; their count if none does."""
    kinds = (kind for kind, pattern in enumerate(NUMBERS.values()) if pattern.fullmatch(value.strip(" ")))
    return next(kinds, len(NUMBERS))


def read_csv(file: Path) -> list[dict[str, str]]:
    """All rows of a CSV file; see `csv_rows`."""
    return list(csv_rows(file))


def _undecodable_line(file: Path) -> int:
    with open_file(str(file)) as handle:
        for number, line in enumerate(handle, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise AssertionError(f"{file} changed while it was read.")


def _read_csv(file: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(csv_rows(Path(file))):
        if number == 0:
            _check_columns(file, columns, list(row))
        yield _checked({name: row[name] for name in columns}, columns, f"{file}, row {number:,}")


def _read_json(file: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for number, (where, row) in enumerate(json_rows(file)):
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds {type(row).__name__} {row!r:.60}; it must be an object, {{...}}.")
        if number == 0:
            _check_columns(file, columns, list(row))
        yield _checked({name: row.get(name) for name in columns}, columns, where)


def json_rows(file: str) -> Iterator[tuple[str, Any]]:
    """Each line, or each element of an array, as (location, value); ValueError if a line is not valid JSON."""
    for where, content in json_texts(file):
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not valid JSON ({error}). Correct it, or leave it out.") from error
        if isinstance(found, list):
            yield from ((f"{file}, row {place:,}", row) for place, row in enumerate(found))
        else:
            yield where, found


def json_texts(file: str) -> Iterator[tuple[str, bytes]]:
    """Each line of a JSON lines file, or a JSON array as a whole, as (location, content).

    Raises:
        ValueError: if one has more than `LARGEST_JSON` bytes; it is not read into memory then.
    """
    with open_file(file) as handle:
        for number, line in enumerate(iter(lambda: handle.readline(LARGEST_JSON + 1), b""), 1):
            where = f"{file}, line {number:,}"
            if len(line) > LARGEST_JSON:
                raise ValueError(f"{where} has more than {LARGEST_JSON:,} bytes: write one row per line.")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if number == 1 and line.lstrip().startswith(b"["):
                advice = "a JSON array is read into memory whole. Write JSON lines, one row per line."
                yield file, line + read_bounded(handle, LARGEST_JSON - len(line), file, advice)
            elif line.strip():
                yield where, line


def _read_parquet(file: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    source = file
    if Path(file).suffix.lower() in COMPRESSIONS:
        with open_file(file) as handle:
            source = io.BytesIO(read_bounded(handle, LARGEST_JSON, file, "decompress it; Parquet compresses itself."))
    with pq.ParquetFile(source) as table:
        schema = table.schema_arrow
        _check_columns(file, columns, schema.names)
        for name in columns:
            kind = schema.field(name).type
            if not (_is_text(kind) or pa.types.is_null(kind) or (name != columns[0] and pa.types.is_primitive(kind))):
                raise ValueError(f"The column {name!r} of {file} holds {kind}, not strings: choose another column.")
        number = 0
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=list(columns)):
            for values in zip(*(batch.column(name) for name in columns)):
                row = {name: value.as_py() for name, value in zip(columns, values)}
                yield _checked(row, columns, f"{file}, row {number:,}")
                number += 1


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _check_columns(file: str, columns: tuple[str, ...], found: list[str]) -> None:
    for name in columns:
        if name not in found:
            raise ValueError(f"{file} has no column {name!r}; it has {', '.join(map(repr, found))}.")


def _checked(row: dict[str, Any], columns: tuple[str, ...], where: str) -> dict[str, Any]:
    for name in columns[1:]:
        if is_missing(row[name]):
            raise ValueError(f"{where} has no value in the column {name!r}: give it an id.")
    text = row[columns[0]]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: the column {columns[0]!r} holds {type(text).__name__} {text!r:.60}, not strings.")
    if text is not None and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {columns[0]!r} holds half a character (a lone surrogate): {error}.") from error
    return row
