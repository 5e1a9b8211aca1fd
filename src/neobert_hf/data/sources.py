"""The one door to tables with texts and labels: a file, a pattern, a folder, a Hub dataset, or a table in memory.

for row in read_rows("pairs.csv"):
    question, score = row.text("question"), row.number("score")
"""

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from json import JSONDecodeError
from numbers import Number
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetNotFoundError

from neobert_hf.common.paths import looks_like_path
from neobert_hf.data.readers import (
    COMPRESSIONS,
    READERS,
    Reader,
    open_file,
    read_dataset,
    read_dictionaries,
    read_document,
    read_json,
    read_parquet,
    suffix_of,
    unparsed_json,
)
from neobert_hf.data.rows import TABLE, NoColumnError, Row


# What recipes read: a path, a pattern or the id of a Hub dataset; from Python also a `Dataset`, a DataFrame of pandas
# or a list of dictionaries.
Source = Any


def is_table(source: Source) -> bool:
    """Whether a source is a table in memory, and no path or id."""
    return not isinstance(source, (str, Path))


def name_of(source: Source) -> str:
    """What messages and cards call a source."""
    return TABLE if is_table(source) else str(source)


def list_of(sources: Any) -> list[Source]:
    """One source or several as a list; a list of dictionaries is one source, a table."""
    several = isinstance(sources, (list, tuple)) and not any(isinstance(one, Mapping) for one in sources)
    return list(sources) if several else [sources]


def as_dataset(table: Source) -> Dataset:
    """A table in memory as a `Dataset`; a missing cell of a DataFrame, such as NaN, is None.

    Raises:
        TypeError: if it is something else.
        ValueError: if a column is there twice, or holds cells of kinds that do not go together.
    """
    if isinstance(table, (list, tuple)) and all(isinstance(row, Mapping) for row in table):
        # As in JSON lines, rows may lack columns. Without a type, numbers stay as they are beside missing ones.
        table = pd.DataFrame(list(table), dtype=object)
    if isinstance(table, pd.DataFrame):
        if repeated := list(table.columns[table.columns.duplicated()]):
            raise ValueError(f"The table has the column {repeated[0]!r} more than once: rename or drop the others.")
        columns = {name: _of_one_type(str(name), column) for name, column in table.items()}
        return Dataset.from_pandas(pd.DataFrame(columns), preserve_index=False)
    if not isinstance(table, (Dataset, IterableDataset)):
        raise TypeError(
            f"A table is a {type(table).__name__}; it must be a datasets.Dataset, a pandas.DataFrame or a list of "
            "dictionaries. Files and Hub datasets are named by a text."
        )
    return table


def _of_one_type(name: str, column: pd.Series) -> pd.Series:
    """A column as Arrow can hold it: as text, if it has texts and numbers, as a list or JSON lines may."""
    try:
        pa.array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        kinds = sorted({type(cell).__name__ for cell in column.dropna()})
        if not all(isinstance(cell, (str, Number)) for cell in column.dropna()):
            raise ValueError(f"The column {name!r} of the table holds {', '.join(kinds)}: keep one of them.") from error
        return column.map(str, na_action="ignore")
    return column


def read_rows(
    source: Source,
    columns: Sequence[str] | None = None,
    subset: str | None = None,
    split: str = "train",
    readers: Mapping[str, Reader] = READERS,
    streaming: bool = False,
) -> Iterator[Row]:
    """Read a table row by row.

    Args:
        source: a file, a pattern, a folder (searched through) or the id of a Hub dataset. Files are Parquet, JSON
            lines, CSV, TSV or plain text, each also compressed. Or a table in memory: see `as_dataset`.
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
    if is_table(source):
        check_local(TABLE, subset, split)
        listed = isinstance(source, (list, tuple))
        rows = _number_rows(TABLE, read_dictionaries(source) if listed else read_dataset(as_dataset(source), columns))
    elif files := local_files(source, readers):
        check_local(source, subset, split)
        rows = read_files(files, columns, readers)
    else:
        with asking_the_hub(source):
            table = load_dataset(source, subset, split=split, streaming=streaming)
        rows = _number_rows(f"{source}, split {split}", read_dataset(table, columns))
    row = None
    for row in rows:
        yield row
    if row is None:
        raise ValueError(f"{name_of(source)} is empty: it holds no row.")


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
        yield from _number_rows(str(file), readers[suffix_of(file)](file, columns))


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
        place = Row(source, index, {}).place
        if source == TABLE:  # It has no file to leave out.
            raise ValueError(f"{place}: {str(error).rstrip('.')}. Correct it.") from error
        raise _unreadable(place, error) from error


def _unreadable(place: str, error: Exception) -> ValueError:
    advice = "Correct it"
    if isinstance(error, UnicodeDecodeError):
        advice = "Save it as UTF-8 (Excel: CSV UTF-8)"
    elif isinstance(error, JSONDecodeError):
        advice = "Write each row on a line of its own, or all as an array, [{...}, {...}]"
    return ValueError(f"{place}: {str(error).rstrip('.')}. {advice}, or leave the file out by a pattern.")


def stream_text(source: Source, column: str, split: str = "train", subset: str | None = None) -> Iterator[str]:
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
    return READERS.get(suffix_of(Path(file))) in (read_json, read_parquet)


def count_rows(source: str) -> int:
    """How many rows a local source has, or a file at a path or URL that `can_begin_anywhere`; errors of `read_rows`."""
    if not can_begin_anywhere(source):
        return sum(1 for _ in read_rows(source))
    if suffix_of(Path(source)) != ".parquet":
        return sum(1 for _ in _number_rows(source, unparsed_json(source)))
    try:
        with open_file(source) as handle, pq.ParquetFile(handle, pre_buffer=False) as table:
            return table.metadata.num_rows
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(source, error) from error


def read_from(source: str, first: int, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of such a source from row `first` on; errors as of `read_rows`."""
    if not can_begin_anywhere(source):
        return islice(read_rows(source, columns), first, None)
    return _number_rows(source, READERS[suffix_of(Path(source))](source, columns, first), first)


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


def local_files(source: Source, readers: Mapping[str, Reader] = READERS) -> list[Path]:
    """The files that match a path, pattern or folder, sorted by path; none of a table, or of what may be a Hub id.

    Raises:
        FileNotFoundError: if it is a path or pattern that matches nothing.
        ValueError: if it matches files of an unknown format (in a folder: no others), or of several formats.
    """
    if is_table(source):
        return []
    path = Path(source).expanduser()
    if path.is_dir():
        found = [file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts)]
    else:
        found = [path] if path.is_file() else [Path(file) for file in glob.glob(str(path), recursive=True)]
    files = sorted(file for file in found if file.is_file())
    if not files and looks_like_path(source):
        raise FileNotFoundError(f"{source!r} matches no file; give a file, a pattern, a folder or a Hub dataset id.")
    known, unknown = ([file for file in files if (suffix_of(file) in readers) == wanted] for wanted in (True, False))
    if unknown and known and path.is_dir():
        # A folder of documents also holds their pictures.
        others = ", ".join(sorted({suffix_of(file) or file.name for file in unknown}))
        _say_once(f"{source}: files of other formats are left out: {len(unknown):,} ({others}).")
        files = known
    elif unknown:
        advice = "Select the files to read by a pattern such as 'corpus/*.jsonl.gz'."
        if not known:
            advice = "Save it as one of these: a table of Excel as CSV UTF-8, a PDF or a web page as text."
        raise ValueError(
            f"{unknown[0]} has an unknown format; the known ones are {', '.join(readers)}, also with "
            f"{', '.join(COMPRESSIONS)}. {advice}"
        )
    if len({readers[suffix_of(file)] for file in files}) > 1:
        names = " and ".join(sorted({suffix_of(file) for file in files}))
        raise ValueError(f"{source} mixes {names} files: select those of one format by a pattern, 'corpus/*.parquet'.")
    return files


def holds_documents(source: str) -> bool:
    """Whether a source is plain text files, each of which is one document."""
    return any(READERS[suffix_of(file)] is read_document for file in local_files(source))


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
    found = {file: named.match(file.name) for file in sorted(folder.iterdir()) if suffix_of(file) in readers}
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
