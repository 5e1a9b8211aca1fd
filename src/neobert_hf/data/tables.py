"""The one reader of tables with texts and labels: JSON lines, Parquet, CSV, TSV, plain text, folders of these, Hub ids.

    for row in read_rows("pairs.csv"):
        question, score = row.text("question"), row.number("score")

A cell of a CSV file is the text that is written there: `007` is not 7, and `NA` is no missing value. What a cell must
hold is asked of the row (`text`, `number`, `label`, `labels`), and every error names the file and the row.
"""

import csv
import glob
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, IterableDataset, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetNotFoundError

from neobert_hf.common.paths import looks_like_path


COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# White space, control characters, and characters without a width, such as the zero-width space.
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}
# A list of texts or numbers, as Python and NumPy print it.
LIST_AS_TEXT = re.compile(r"""\[\s*(['"].*['"]|-?[0-9][-+0-9.,eE\s]*)\s*\]""", re.DOTALL)
BATCH = 1_000


def is_empty(text: str | None) -> bool:
    """Whether nothing of a text is visible: only white space, or characters without a width."""
    return not text or all(unicodedata.category(character) in INVISIBLE for character in text)


class NoColumnError(ValueError):
    """A table is sound, but lacks a column that was asked for."""


def _no_column(name: str, found: Iterable[str]) -> str:
    names = ", ".join(map(repr, found)) or "none"
    return f"has no column {name!r}; it has {names}. Choose one of these in the settings, or rename it in the file."


@dataclass
class Row:
    """A row of a table: its cells by column, and where it stands.

    Args:
        source: the file, or the dataset of the Hub.
        index: the number of the row in its source, from 0.
        cells: strings, numbers, lists, dictionaries or None, by column.

    Example:

    ```python
    >>> row = Row("pairs.csv", 3, {"question": "Why?", "score": "0.5"})
    >>> row.text("question"), row.number("score"), row.place
    ('Why?', 0.5, 'pairs.csv, row 3')
    ```
    """

    source: str
    index: int
    cells: dict[str, Any]

    @property
    def place(self) -> str:
        """File and row, for a message."""
        return f"{self.source}, row {self.index:,}"

    def cell(self, column: str) -> Any:
        """What a column holds, as it is; ValueError if there is no such column."""
        if column not in self.cells:
            raise ValueError(f"{self.place} {_no_column(column, self.cells)}")
        return self.cells[column]

    def text(self, column: str) -> str:
        """The text in a column; ValueError if it is empty. A number becomes text."""
        return self._filled(column, self.cell(column))

    def text_or_none(self, column: str) -> str | None:
        """The text in a column, which may be empty; None if it is missing."""
        return self.as_text(column, self.cell(column))

    def texts(self, column: str) -> list[str]:
        """The texts in a column that holds lists; ValueError if there is none, or one is empty."""
        cell = self.cell(column)
        if not isinstance(cell, list) or not cell:
            raise ValueError(f"{self.place}: {column!r} is {cell!r:.60}; it must be a list of one text or more.")
        return [self._filled(column, one) for one in cell]

    def number(self, column: str) -> float:
        """The number in a column, also if it is written as text; ValueError if there is none, or it is not finite."""
        cell = self.cell(column)
        try:
            number = float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{self.place}: {column!r} is {cell!r:.60}; it must be a number. Correct it.")
        return number

    def label(self, column: str) -> str:
        """The name of the class in a column, or its number as text; ValueError if there is none."""
        return self.text(column).strip()

    def labels(self, column: str, separator: str | None = None) -> list[str]:
        """The labels or tags in a column: a list, or a text in which a separator stands between them."""
        cell = self.cell(column)
        if separator is not None and not isinstance(cell, list):
            parts = (self.text_or_none(column) or "").split(separator)
            return [part.strip() for part in parts if not is_empty(part)]
        if not isinstance(cell, list):
            raise ValueError(f"{self.place}: {column!r} is {cell!r:.60}; it must be a list of labels.")
        return [self._filled(column, one).strip() for one in cell]

    def _filled(self, column: str, cell: Any) -> str:
        text = self.as_text(column, cell)
        if is_empty(text):
            raise ValueError(f"{self.place}: {column!r} is {cell!r}; it must not be empty. Fill it, or drop the row.")
        return text

    def as_text(self, column: str, cell: Any) -> str | None:
        """A cell, or an item of a list in it, as text: numbers become text, None stays None.

        Raises:
            ValueError: if it holds something else, or a character that no file can hold.
        """
        found = f"{self.place}: {column!r} holds"
        if cell is not None and not isinstance(cell, (str, int, float)):
            raise ValueError(f"{found} {type(cell).__name__} {cell!r:.60}; it must be a text. Choose another column.")
        text = None if cell is None else str(cell)
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{found} half a character (a lone surrogate): {error}. Correct it.") from error
        return text


def list_as_text(cells: Iterable[Any]) -> str | None:
    """The first cell, if all that are not empty are lists written as text, as pandas writes them into a CSV file."""
    filled = [cell for cell in cells if cell and cell != "[]"]
    found = filled and all(isinstance(cell, str) and LIST_AS_TEXT.fullmatch(cell) for cell in filled)
    return filled[0] if found else None


# Readers: each yields the cells of the rows of one file, which is a path or a URL, and raises any error; `_number_rows`
# adds file and row. A reader may leave out columns that are not asked for. Those of JSON and Parquet can begin at a row
# without parsing the rows before it.


@contextmanager
def _open(file: str | Path) -> Iterator[BinaryIO]:
    with fsspec.open(str(file), "rb", compression="infer") as handle:
        yield handle


def read_lines(file: str | Path) -> Iterator[str]:
    """The lines of a text file in UTF-8, with their ends."""
    with _open(file) as lines:
        for number, line in enumerate(lines):
            yield line.decode("utf-8" if number else "utf-8-sig")


def _unparsed_json(file: str | Path) -> Iterator[Any]:
    """The rows of a file of JSON: the lines of one row each as they are, or the items of an array."""
    lines = read_lines(file)
    first = next(lines, "")
    if first.lstrip().startswith("["):
        return iter(json.loads(first + "".join(lines)))
    return (line for line in chain([first], lines) if line.strip())


def read_json(file: str | Path, columns: Sequence[str] | None, first: int = 0) -> Iterator[dict[str, Any]]:
    """One row a line, or an array of rows; from row `first` on."""
    for unparsed in islice(_unparsed_json(file), first, None):
        row = json.loads(unparsed) if isinstance(unparsed, str) else unparsed
        if not isinstance(row, dict):
            raise ValueError(f"{row!r:.60} is no row, which must be an object, {{...}}")
        yield row


def read_csv(file: str | Path, columns: Sequence[str] | None) -> Iterator[dict[str, str]]:
    """The first line names the columns. In `.tsv` files tabs separate cells, and quotes are ordinary text."""
    tabs = _suffix(file) == ".tsv"
    csv.field_size_limit(2**31 - 1)
    lines = read_lines(file)
    first = next(lines, "")
    # Where numbers have a decimal comma, Excel separates the cells of a .csv file by semicolons.
    separator = ";" if ";" in first and "," not in first else ","
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
    with _open(file) as handle, pq.ParquetFile(handle, pre_buffer=False) as table:
        schema = table.schema_arrow
        _check_columns(columns, schema.names)
        # A group may have a million rows. Those before the first row are not read, and of its own few at a time.
        groups = list(range(table.num_row_groups))
        while groups and first >= (size := table.metadata.row_group(groups[0]).num_rows):
            first -= size
            groups.pop(0)
        batches = table.iter_batches(BATCH, groups, columns)
        yield from _rows_of_batches(batches, Features.from_arrow_schema(schema), first)


def read_document(file: str | Path, columns: Sequence[str] | None) -> Iterator[dict[str, str]]:
    """A plain text file is one row, with its text in `text`. All line ends become \\n."""
    yield {"text": io.StringIO("".join(read_lines(file)), newline=None).read()}


def _read_dataset(table: Dataset | IterableDataset, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """The rows of a dataset of the Hub."""
    # Some builders know the columns only when they have read a row.
    if columns is not None and table.column_names:
        _check_columns(columns, table.column_names)
        table = table.select_columns(columns)
    # As Arrow, so that images and sounds are not decoded, nor fetched from whatever address they give.
    yield from _rows_of_batches(table.with_format("arrow").iter(BATCH), table.features or {})


def _check_columns(wanted: Sequence[str] | None, found: Sequence[str]) -> None:
    for name in wanted or ():
        if name not in found:
            raise NoColumnError(_no_column(name, found))


def _rows_of_batches(
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


Reader = Callable[[str | Path, Sequence[str] | None], Iterator[dict[str, Any]]]
READERS: Mapping[str, Reader] = {
    **{".parquet": read_parquet, ".jsonl": read_json, ".json": read_json, ".csv": read_csv, ".tsv": read_csv},
    **dict.fromkeys((".txt", ".md", ".markdown", ".rst"), read_document),
}


def read_rows(
    source: str,
    columns: Sequence[str] | None = None,
    subset: str | None = None,
    split: str = "train",
    readers: Mapping[str, Reader] = READERS,
    streaming: bool = False,
) -> Iterator[Row]:
    """Read a table row by row.

    Args:
        source: a file, a pattern, a folder (searched through) or the id of a Hub dataset. Files are Parquet, JSON
            lines, CSV, TSV or plain text, each also compressed.
        columns: the columns that are needed; all if None.
        subset: the configuration of a Hub dataset that has several.
        split: the split of a Hub dataset, also a slice such as `train[:1000]`; local files are all `train`, unsliced.
        readers: the reader of each kind of file, by suffix.
        streaming: whether a Hub dataset is read from there, instead of being copied to this machine first.

    Raises:
        FileNotFoundError: if nothing local matches, and the Hub has no such dataset.
        ConnectionError: if nothing local matches, and the Hub cannot be reached.
        ValueError: if a file cannot be read, a column is missing, or there is no row.

    Example:

    ```python
    >>> questions = [row.text("question") for row in read_rows("pairs.jsonl", ["question"])]
    ```
    """
    # The same column may serve two purposes.
    columns = None if columns is None else list(dict.fromkeys(columns))
    if files := local_files(source, readers):
        check_local(source, subset, split)
        rows = read_files(files, columns, readers)
    else:
        with asking_the_hub(source):
            table = load_dataset(source, subset, split=split, streaming=streaming)
        rows = _number_rows(f"{source}, split {split}", _read_dataset(table, columns))
    row = None
    for row in rows:
        yield row
    if row is None:
        raise ValueError(f"{source} is empty: it holds no row.")


def check_local(source: str, subset: str | None, split: str) -> None:
    """Refuse what only a dataset of the Hub has."""
    if subset is not None or split != "train":
        found = f"no subset {subset!r}" if subset is not None else f"no split {split!r}"
        raise ValueError(f"{source} is local and has {found}: name the files or the folder to read as the source.")


def read_files(
    files: Sequence[Path], columns: Sequence[str] | None = None, readers: Mapping[str, Reader] = READERS
) -> Iterator[Row]:
    """The rows of files, one file after the other; ValueError naming the file and the row that cannot be read."""
    for file in files:
        yield from _number_rows(str(file), readers[_suffix(file)](file, columns))


def _number_rows(source: str, rows: Iterable[dict[str, Any]], first: int = 0) -> Iterator[Row]:
    index = first
    try:
        for cells in rows:
            yield Row(source, index, cells)
            index += 1
    except (ConnectionError, FileNotFoundError, MemoryError):  # Not the fault of a row.
        raise
    except NoColumnError as error:
        raise ValueError(f"{source} {error}") from error
    except Exception as error:  # Each format and each compression raises its own errors.
        raise _unreadable(f"{source}, row {index:,}", error) from error


def _unreadable(place: str, error: Exception) -> ValueError:
    advice = "Save it as UTF-8 (Excel: CSV UTF-8)" if isinstance(error, UnicodeDecodeError) else "Correct it"
    return ValueError(f"{place}: {error}. {advice}, or leave the file out by a pattern.")


def stream_text(source: str, column: str, split: str = "train", subset: str | None = None) -> Iterator[str]:
    """The documents of a corpus in a fixed order, "" where one is missing, without loading it or making a copy of it.

    Arguments and errors are those of `read_rows`, without slices. A plain text file is one document, in `text`.

    Example:

    ```python
    >>> for text in stream_text("corpus/*.jsonl.gz", "content"):
    ...     print(text)
    ```
    """
    for row in read_rows(source, [column], subset, split, streaming=True):
        yield row.text_or_none(column) or ""


def can_begin_anywhere(file: str) -> bool:
    """Whether the rows of a file can be counted and read from any of them on without parsing those before."""
    return READERS.get(_suffix(Path(file))) in (read_json, read_parquet)


def count_rows(source: str) -> int:
    """How many rows a local source has, or a file at a path or URL that `can_begin_anywhere`; errors of `read_rows`."""
    if not can_begin_anywhere(source):
        return sum(1 for _ in read_rows(source))
    if _suffix(Path(source)) != ".parquet":
        return sum(1 for _ in _number_rows(source, _unparsed_json(source)))
    try:
        with _open(source) as handle, pq.ParquetFile(handle, pre_buffer=False) as table:
            return table.metadata.num_rows
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(source, error) from error


def read_from(source: str, first: int, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of such a source from row `first` on; errors as of `read_rows`."""
    if not can_begin_anywhere(source):
        return islice(read_rows(source, columns), first, None)
    return _number_rows(source, READERS[_suffix(Path(source))](source, columns, first), first)


def hub_files(source: str, subset: str | None = None, split: str = "train") -> list[str]:
    """The URLs, `hf://...`, of the files of a Hub dataset; arguments and errors are those of `read_rows`."""
    with asking_the_hub(source):
        files = load_dataset_builder(source, subset).config.data_files or {}
    if split not in files:
        raise ValueError(f"{source} has no split {split!r}; it has {', '.join(repr(str(name)) for name in files)}.")
    return list(files[split])


@contextmanager
def asking_the_hub(source: str) -> Iterator[None]:
    """Say of which source it is that the Hub has no such dataset, or cannot be reached."""
    absent = f"{source!r} is not a local file, pattern or folder"
    try:
        yield
    except DatasetNotFoundError as error:
        raise FileNotFoundError(f"{absent}, and the Hub has no such dataset that you have access to.") from error
    except ConnectionError as error:
        raise ConnectionError(f"{absent}, and the Hub cannot be reached ({error}).") from error


@lru_cache
def _say_once(line: str) -> None:
    print(line, flush=True)


def local_files(source: str, readers: Mapping[str, Reader] = READERS) -> list[Path]:
    """The files that match a path, pattern or folder, sorted by path; none if it may be the id of a Hub dataset.

    Raises:
        FileNotFoundError: if it is a path or pattern that matches nothing.
        ValueError: if it matches files of an unknown format (in a folder: no others), or of several formats.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = [file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts)]
    else:
        found = [path] if path.is_file() else [Path(file) for file in glob.glob(str(path), recursive=True)]
    files = sorted(file for file in found if file.is_file())
    if not files and looks_like_path(source):
        raise FileNotFoundError(f"{source!r} matches no file; give a file, a pattern, a folder or a Hub dataset id.")
    known, unknown = ([file for file in files if (_suffix(file) in readers) == wanted] for wanted in (True, False))
    if unknown and known and path.is_dir():
        # A folder of documents also holds their pictures.
        others = ", ".join(sorted({_suffix(file) or file.name for file in unknown}))
        _say_once(f"{source}: files of other formats are left out: {len(unknown):,} ({others}).")
        files = known
    elif unknown:
        raise ValueError(
            f"{unknown[0]} has an unknown format; the known ones are {', '.join(readers)}, also with "
            f"{', '.join(COMPRESSIONS)}. Select the files to read by a pattern such as 'corpus/*.jsonl.gz'."
        )
    if len({readers[_suffix(file)] for file in files}) > 1:
        names = " and ".join(sorted({_suffix(file) for file in files}))
        raise ValueError(f"{source} mixes {names} files: select those of one format by a pattern, 'corpus/*.parquet'.")
    return files


def holds_documents(source: str) -> bool:
    """Whether a source is plain text files, each of which is one document."""
    return any(READERS[_suffix(file)] is read_document for file in local_files(source))


def _suffix(file: Path) -> str:
    """The suffix that gives a file's format, without that of its compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


def split_files(folder: Path, names: Sequence[str], readers: Mapping[str, Reader] = READERS) -> list[Path]:
    """The single file of a split in a folder, or all its numbered parts (`train-00000-of-00002.parquet`).

    Args:
        names: what the split may be called, such as `validation` and `dev`.

    Returns:
        The files in order; none if there is no file of that name.

    Raises:
        ValueError: if there are several files that are not all parts of one: a copy may be unfinished, or repeat rows.
    """
    named = re.compile(rf"({'|'.join(names)})(-\d+-of-(?P<parts>\d+))?\.")
    found = {file: named.match(file.name) for file in sorted(folder.iterdir()) if _suffix(file) in readers}
    parts = {file: int(match["parts"] or 1) for file, match in found.items() if match}
    if any(number != len(parts) for number in parts.values()):
        raise ValueError(
            f"{', '.join(file.name for file in parts)} in {folder} are neither one file nor all parts of one. Restore "
            "the missing parts, or keep only one file there."
        )
    return list(parts)


def files_state(source: str) -> tuple[tuple[str, int, int, int], ...]:
    """Names, sizes and times of a source's local files: if they are the same, nothing has changed.

    If they differ, the content may still be the same: the files may have been copied. Empty for a Hub dataset.
    """
    states = [(str(file.absolute()), file.stat()) for file in local_files(source)]
    # Unlike the modification time, the change time (`st_ctime_ns`) cannot be set by hand.
    return tuple((name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states)
