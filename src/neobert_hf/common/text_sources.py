"""Raw text for the scripts: Hub datasets and local files, streamed and checked before work starts."""

import csv
import glob
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.features.features import require_decoding

from neobert_hf.common.paths import looks_like_path
from neobert_hf.common.row_files import (
    BUILDERS,
    COMPRESSIONS,
    LARGEST_TEXT_FILE,
    csv_features,
    is_missing,
    json_rows,
    json_texts,
    read_rows,
    suffix_of,
)


def stream_text(
    source: str, column: str, split: str = "train", subset: str | None = None, others: Sequence[str] = ()
) -> IterableDataset:
    """Stream documents, in a fixed order, without loading the corpus or writing a copy of it.

    Args:
        source: a local file, a glob pattern, a folder (searched through), or the id of a Hub dataset. Local files are
            Parquet, JSON lines, CSV (`.csv`, `.tsv`) or plain text (`.txt`, `.md`, `.markdown`, `.rst`), each also
            compressed (`.gz`, `.bz2`, `.xz`, `.zst`). A plain text file is one document, in the column `text`.
        column: the column that holds the text.
        split: the split of a Hub dataset; local files form a single split, `"train"`.
        subset: the configuration of a Hub dataset that has several.
        others: further columns to keep; they hold ids, a number or string in every row.

    Returns:
        A dataset with `column` (str or None) and the other columns, and with `state_dict()` and `load_state_dict()` to
        resume.

    Raises:
        FileNotFoundError: if nothing local matches and no such Hub dataset exists.
        ConnectionError: if nothing local matches and the Hub cannot be reached.
        ValueError: if the files, the split or the column cannot be used. Errors in single rows are raised when the row
            is read, naming file and row.

    Example:

    ```python
    >>> for document in stream_text("corpus/*.jsonl.gz", column="content"):
    ...     print(document["content"])
    ```
    """
    columns = tuple(dict.fromkeys([column, *others]))
    files = local_files(source)
    if not files:
        return _stream_from_hub(source, columns, split, subset)
    if subset is not None:
        raise ValueError(f"{source!r} is local and has no subset {subset!r}: leave `subset` out.")
    if split != "train":
        raise ValueError(f"{source!r} has no split {split!r}; it has 'train'.")
    # `datasets` may divide a list among processes; therefore the columns are a tuple.
    rows = {"files": [str(file) for file in files], "columns": columns}
    if next(read_rows(**rows), None) is None:
        raise ValueError(f"{source!r} is empty: it holds no documents.")
    return IterableDataset.from_generator(read_rows, gen_kwargs=rows)


def _stream_from_hub(source: str, columns: tuple[str, ...], split: str, subset: str | None) -> IterableDataset:
    with _on_hub(source):
        splits = load_dataset(source, subset, streaming=True)
    if split not in splits:
        raise ValueError(f"{source!r} has no split {split!r}; it has {', '.join(map(repr, splits))}.")
    dataset = splits[split]
    # Some builders know their columns only after reading a row. Those that know them earlier may decode what they read,
    # such as images by their address; for these, nothing is read before the columns are selected.
    features = dataset.features or {}
    found = list(features or next(iter(dataset), {}))
    for name in columns if found else ():
        if name not in found:
            raise ValueError(f"{source!r} has no column {name!r}; it has {', '.join(map(repr, found))}.")
        if require_decoding(features.get(name)):
            raise ValueError(f"The column {name!r} of {source!r} holds {features[name]}: choose another column.")
    dataset = dataset.select_columns(list(columns))
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"{source!r} is empty: it holds no documents.")
    kind = getattr(features.get(columns[0]), "dtype", None) or type(first[columns[0]]).__name__
    if kind not in ("string", "large_string", "string_view", "str"):
        raise ValueError(f"The column {columns[0]!r} of {source!r} holds {kind}, not strings: choose a text column.")
    return dataset


def stream_documents(
    source: str, column: str, id_column: str | None = None, split: str = "train", subset: str | None = None
) -> Iterator[tuple[str | None, str | None]]:
    """Stream documents with their ids. The checks of `stream_text` run at once, before the first document is read.

    Args:
        source, column, split, subset: as for `stream_text`.
        id_column: a column that identifies the rows. The id of a plain text file is always its absolute path.

    Returns:
        Pairs of id and text. Without `id_column`, the ids of other files are None.

    Raises:
        ValueError: as `stream_text`; also if an id is missing, or a text file is not UTF-8.
    """
    rows = stream_text(source, column, split, subset, [] if id_column is None else [id_column])
    files = local_files(source)
    if files and builder_of(files) == "text":
        # Not `resolve`, which would give two links to one file the same id.
        return ((os.path.abspath(file), row["text"]) for file in files for row in read_rows([str(file)], ("text",)))
    return _read_rows(rows, source, column, id_column)


def _read_rows(
    rows: IterableDataset, source: str, column: str, id_column: str | None
) -> Iterator[tuple[str | None, str | None]]:
    for number, row in enumerate(rows):
        if id_column is not None and is_missing(row[id_column]):
            raise ValueError(f"Row {number:,} of {source!r} has no value in the column {id_column!r}: give it an id.")
        yield None if id_column is None else str(row[id_column]), row[column]


def load_table(name: str, source: str, subset: str | None, split: str, texts: Collection[str] = ()) -> Dataset:
    """Load a split of labelled or paired texts.

    Args:
        name: the dataset's name in error messages.
        source: a Hub dataset, or local Parquet, JSON lines or CSV files (path, pattern or folder), whose only split is
            `train`.
        subset: configuration of a Hub dataset that has several.
        split: also a slice such as `train[:1000]`.
        texts: columns that hold texts, even if a CSV file has only numbers there.

    Raises:
        FileNotFoundError: if the source is neither on the Hub nor a local path.
        ConnectionError: if it is not a local path and the Hub cannot be reached.
        ValueError: if the split is missing, empty or unreadable.
    """
    try:
        found = local_files(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Dataset {name}: {error}") from error
    # One file may stand in for a subset of a Hub dataset, and the rest of its description stays as it is.
    if len(found) > 1 and subset is not None:
        raise ValueError(f"Dataset {name}: {source!r} is local and has no subset {subset!r}: give its files or folder.")
    files, builder = list(map(str, found)), builder_of(found) if found else None
    if builder == "text":
        raise ValueError(f"Dataset {name}: {source!r} is plain text; give Parquet, JSON lines or CSV.")
    options = {}
    if builder == "csv":
        if len(set(map(suffix_of, found))) > 1:
            raise ValueError(f"Dataset {name}: {source!r} mixes .csv and .tsv files: select those of one kind.")
        options = _csv_options(found, texts)
    if builder == "json":
        # `datasets` loads a whole line or array into memory, whatever its size.
        _read_through(json_texts, files)
    try:
        if files:
            paths = [glob.escape(file) for file in files]  # `datasets` treats a path as a pattern.
            # `datasets` tells files by path and time alone: for a replacement of the same time it returns the old rows.
            table = load_dataset(builder, name=files_state(source), data_files=paths, split=split, **options)
        else:
            with _on_hub(source, f"Dataset {name}: "):
                table = load_dataset(source, subset, split=split)
        # Drop images and sounds: they are not text, and reading a row would fetch them from whatever address it gives.
        # A `Json` column has rows of several types; code that needs the column refuses it.
        media = [name for name, kind in table.features.items() if require_decoding(kind) and "Json" not in str(kind)]
        return table.remove_columns(media)
    except (ValueError, StopIteration, DatasetGenerationError) as error:
        # `datasets` raises StopIteration without a message for JSON files without any line.
        reason = error.__cause__ or str(error) or "no row"
        if builder == "json":
            try:
                # The error of `datasets` does not name the row.
                _read_through(json_rows, files)
            except ValueError as of_row:
                reason = of_row
        raise ValueError(
            f"Dataset {name}: the split {split!r} of {source!r} is empty or cannot be read ({reason})."
        ) from error


def _csv_options(files: list[Path], texts: Collection[str]) -> dict[str, Any]:
    # Reads all rows: `datasets` silently fills those that are too short, and `csv_rows` refuses them.
    features = csv_features(files, texts)
    tabs = {"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix_of(files[0]) == ".tsv" else {}
    # Empty cells are empty texts, and "NA" is ordinary text.
    return {"encoding": "utf-8-sig", "keep_default_na": False, "features": features} | tabs


@contextmanager
def _on_hub(source: str, before: str = "") -> Iterator[None]:
    """If a name matches no local file and cannot be loaded from the Hub either, raise an error that says both."""
    absent = f"{before}{source!r} is not a local file, pattern or folder"
    try:
        yield
    except DatasetNotFoundError as error:
        raise FileNotFoundError(f"{absent}, and the Hub has no such dataset that you have access to.") from error
    except ConnectionError as error:
        raise ConnectionError(f"{absent}, and the Hub cannot be reached to look for a dataset ({error}).") from error


def _read_through(reader: Callable[[str], Iterator], files: list[str]) -> None:
    for file in files:
        for _ in reader(file):
            pass


def describe_files(source: str) -> dict[str, int]:
    """Number and total bytes of a source's local files, to detect changes; an empty dictionary for a Hub dataset."""
    files = local_files(source)
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)} if files else {}


def files_state(source: str) -> str | None:
    """A hash of names, sizes and times of a source's local files: if it is the same, nothing has changed.

    If it differs, the content may still be the same: the files may have been copied. None for a Hub dataset.
    """
    digest = hashlib.sha256()
    for file in (files := local_files(source)):
        found = file.stat()
        # Unlike the modification time, the change time (`st_ctime_ns`) cannot be set by hand.
        digest.update(repr((str(file.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns)).encode())
    return digest.hexdigest()[:16] if files else None


def local_files(source: str) -> list[Path]:
    """The files that match a path, pattern or folder, sorted by path; none if it may be the id of a Hub dataset.

    Raises:
        FileNotFoundError: if it is a path or pattern that matches nothing.
        ValueError: if it matches files of an unknown format, of several formats, or plain text of more than 64 MiB.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    else:
        files = [path] if path.is_file() else [Path(file) for file in glob.glob(str(path), recursive=True)]
        files = [file for file in files if file.is_file()]
    if not files:
        if looks_like_path(source):
            raise FileNotFoundError(
                f"{source!r} matches no file; give a file, a pattern, a folder or a Hub dataset id."
            )
        return []
    builder_of(files)
    return sorted(files)


def builder_of(files: list[Path]) -> str:
    """The name of the `datasets` builder that reads all these files.

    Raises:
        ValueError: as `local_files`.
    """
    if unknown := [file for file in files if suffix_of(file) is None]:
        raise ValueError(
            f"{unknown[0]} has an unknown format; the known ones are {', '.join(BUILDERS)}, also with "
            f"{', '.join(sorted(COMPRESSIONS))}. Select the files to read by a pattern such as 'corpus/*.jsonl.gz'."
        )
    builders = sorted({BUILDERS[suffix_of(file)] for file in files})
    if len(builders) > 1:
        raise ValueError(
            f"The source mixes {' and '.join(builders)} files: select those of one format by a pattern such as "
            "'corpus/*.parquet'."
        )
    if builders == ["text"]:
        # A document is held in memory whole, and a corpus in one file would silently be cut at `max_length`.
        if large := [file for file in files if file.stat().st_size > LARGEST_TEXT_FILE]:
            raise ValueError(
                f"{large[0]} has {large[0].stat().st_size:,} bytes, more than {LARGEST_TEXT_FILE:,}: a text file is "
                'one document here. For a corpus in one file, write JSON lines, {"text": "..."} for each document.'
            )
    return builders[0]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
