"""Rows of a task from your own files or the Hub, as splits: `train`, `validation` and, if there is one, `test`."""

import glob
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets, get_dataset_split_names

from neobert_hf.common.held_out import report_repeated
from neobert_hf.common.paths import check_exists, held_by
from neobert_hf.common.row_files import COMPRESSIONS, ROW, check_parts, number_rows, read_csv
from neobert_hf.common.settings import nearest
from neobert_hf.common.text_sources import load_table


# The names of splits in files and Hub datasets.
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}

Reader = Callable[[Path], list[dict[str, Any]]]

# If a task has more, only the commonest and the rarest are listed.
SHOWN_LABELS = 20

CSV_READERS = MappingProxyType({".csv": read_csv, ".tsv": read_csv})


def read_splits(settings: Any, readers: MappingProxyType[str, Reader] = CSV_READERS) -> DatasetDict:
    """Load all rows of a task.

    Args:
        settings: a `TaskSettings`.
        readers: readers of files by suffix, besides Parquet and JSON lines.

    Raises:
        FileNotFoundError: if a path does not exist.
        ValueError: if a file cannot be read, or a split is empty.
    """
    if not (files := _files(settings.data)):
        check_exists(settings.data, "data")
    folder, splits, read = Path(settings.data).expanduser(), {}, set()
    if settings.subset is not None and (folder.is_dir() or files):
        raise ValueError(
            f"`subset` is {settings.subset!r}, but {settings.data} is local: name the subset's folder as `data`."
        )
    if folder.is_dir():
        for split in SPLITS:
            if found := _files_of_split(folder, split):
                splits[split] = _read_files(split, found, readers)
                read |= set(found)
        if "train" not in splits:
            raise ValueError(
                f"{folder} holds no `train.csv`, `train.parquet`, `train.jsonl` or the like, only {held_by(folder)}."
            )
    elif files:
        splits["train"] = _read_files("train", files, readers)
    else:
        splits["train"] = load_table("train", settings.data, settings.subset, "train")
        names = get_dataset_split_names(settings.data, settings.subset)
        for split in ("validation", "test"):
            if found := [name for name in SPLITS[split] if name in names]:
                splits[split] = load_table(split, settings.data, settings.subset, found[0])
    for split in ("validation", "test"):
        if (source := getattr(settings, f"{split}_data")) is not None:
            if not (files := _files(source)):
                check_exists(source, f"{split}_data")
                raise FileNotFoundError(f"`{split}_data` is {source!r}, but there is no such file.")
            splits[split] = _read_files(split, files, readers)
            read |= set(files)
    if folder.is_dir():
        _report_unread(folder, read)
    if held_out := [split for split in splits if split != "train"]:
        columns = settings.columns_compared(splits["train"])
        trained = set(_texts(splits["train"], columns))
        for split in held_out:
            advice = ", or give no validation file: rows are then held out"
            report_repeated(trained, _texts(splits[split], columns), f"the split {split}", advice)
    return _with_validation(DatasetDict(splits), settings)


def _texts(table: Dataset, columns: Sequence[str]) -> list[str]:
    """The content of the columns of each row as one text; columns that do not exist are left out."""
    return [str(texts) for texts in zip(*(table[name][:] for name in columns if name in table.column_names))]


def _with_validation(splits: DatasetDict, settings: Any) -> DatasetDict:
    """The splits to use. If there are no validation rows, some training rows are held out."""
    if "validation" not in splits:
        table, numbers = splits["train"], {}
        # Rows with the same text stay together: a trained text in validation would bias the choice of the checkpoint.
        groups = [
            numbers.setdefault(text, len(numbers)) for text in _texts(table, settings.columns_read(table))
        ] or list(range(len(table)))
        different = len(set(groups))
        held_out = round(settings.validation_share * different)
        if not 0 < held_out < different:
            raise ValueError(
                f"{settings.data} has {len(table):,} rows with {different:,} different texts: too few to hold out "
                f"{settings.validation_share:.0%}."
            )
        labels = [set() for _ in range(different)]
        labels_of_rows = settings.labels_of_rows(table)
        for group, names in zip(groups, labels_of_rows):
            labels[group] |= names
        drawn = _draw_groups(labels, any(len(names) > 1 for names in labels_of_rows), held_out)
        if not drawn:
            raise ValueError(
                f"{settings.data} has {different:,} different texts, each with a label that no other text has: none "
                "can be held out. Add rows of these labels, or give a file for validation as `validation_data`."
            )
        table = number_rows(table)
        rest = [row for row, group in enumerate(groups) if group in drawn]
        kept = [row for row, group in enumerate(groups) if group not in drawn]
        splits["train"], splits["validation"] = table.select(kept), table.select(rest)
        print(
            f"{len(rest):,} of {len(table):,} rows are held out for validation, because no file or split is for that. "
            "Rows with the same text stay together.",
            flush=True,
        )
    if not settings.score_test:
        splits.pop("test", None)
    return DatasetDict({name: splits[name] for name in SPLITS if name in splits})


def _draw_groups(labels: list[set[str]], several: bool, number: int) -> set[int]:
    """The groups of rows to hold out, drawn so that every label stays in training.

    Args:
        labels: of each group; none where rows have no labels.
        several: whether rows may have several labels, which cannot all be held out in proportion. Otherwise every label
            is held out in proportion, with at least one group as long as `number` allows: else a rare one has no score.
        number: groups to hold out; fewer if labels have too few groups.
    """
    kinds = [() if several else tuple(sorted(names)) for names in labels]
    sizes = Counter(kinds)
    places = [(kind, place) for kind, size in sizes.items() for place in range(size - 1)]
    # One group of every kind first, then proportionally as in Sainte-Laguë's allocation of seats in a parliament.
    places.sort(key=lambda place: (place[1] > 0, -sizes[place[0]] / (place[1] + 0.5)))
    shares = Counter(kind for kind, _ in places[:number])
    trained = Counter(name for names in labels for name in names)
    drawn = set()
    for group in np.random.RandomState(0).permutation(len(labels)).tolist():
        if shares[kinds[group]] and all(trained[name] > 1 for name in labels[group]):
            drawn.add(group)
            shares[kinds[group]] -= 1
            trained.subtract(labels[group])
    return drawn


def _files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    return [path] if path.is_file() else sorted(Path(file) for file in glob.glob(str(path)) if Path(file).is_file())


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The single file of a split, or all its numbered parts. Not `train.csv.bak`."""
    compressed = "|".join(re.escape(suffix) for suffix in COMPRESSIONS)
    named = re.compile(rf"({'|'.join(SPLITS[split])})(-\d+-of-\d+)?\.\w+({compressed})?")
    found = sorted(file for file in folder.iterdir() if named.fullmatch(file.name))
    if found:
        check_parts(found, f"The split {split}")
    return found


def _report_unread(folder: Path, read: set[Path]) -> None:
    """Print the files of the same format that are not read: `eval.csv` may be meant as a split."""
    formats, known = {file.suffix for file in read}, {file.resolve() for file in read}
    files = [file for file in folder.iterdir() if file.suffix in formats and file.resolve() not in known]
    if others := sorted(file.name for file in files):
        names = "; ".join(f"{split}: {', '.join(names)}" for split, names in SPLITS.items())
        print(f"not read in {folder}: {', '.join(others[:8])}. The names of split files are: {names}.", flush=True)


def _read_files(split: str, files: list[Path], readers: MappingProxyType[str, Reader]) -> Dataset:
    tables = []
    for file in files:
        reader = next((readers[suffix] for suffix in file.suffixes[-2:] if suffix in readers), None)
        tables.append(load_table(split, str(file), None, "train") if reader is None else _table(file, reader(file)))
    return concatenate_datasets(tables)


def _table(file: Path, rows: list[dict[str, Any]]) -> Dataset:
    if not any(rows):
        raise ValueError(f"{file} is empty: it holds no row.")
    return Dataset.from_list(rows)


def row_numbers(table: Dataset) -> Sequence[int]:
    """The row numbers that the user knows: those in the file, or else in the split."""
    return table[ROW][:] if ROW in table.column_names else range(len(table))


def columns_of(table: Dataset) -> list[str]:
    """The columns of the data, without our own column of row numbers."""
    return [name for name in table.column_names if name != ROW]


def choose_column(table: Dataset, given: str | None, guesses: Sequence[str], setting: str) -> str:
    """The column that a setting names, or else the first one with a usual name.

    Raises:
        ValueError: if there is no such column.
    """
    found = columns_of(table)
    if given is not None and given not in found:
        raise ValueError(f"`{setting}` is {given!r}, but the data have no such column{nearest(given, found)}")
    lowered = {name.lower(): name for name in reversed(found)}
    chosen = [given] if given is not None else [lowered[name] for name in guesses if name in lowered]
    if not chosen:
        raise ValueError(
            f"Set `{setting}` to one of the columns: {', '.join(found)}. None has a usual name. (The first line of a "
            "CSV file must name the columns.)"
        )
    return chosen[0]


def or_leave_out(split: str) -> str:
    """The end of a message: what else can be done about a test split without labels."""
    return ", or set `score_test` to false" if split == "test" else ""


def check_columns(splits: DatasetDict, columns: Sequence[str]) -> None:
    """Refuse splits that lack a needed column."""
    for split, table in splits.items():
        for name in columns:
            if name not in table.column_names:
                raise ValueError(
                    f"The split {split} has no column {name!r}; it has {', '.join(columns_of(table)) or 'none'}. "
                    f"Every split must have {', '.join(columns)}: rename its columns, or add what is missing"
                    f"{or_leave_out(split)}."
                )


def check_texts(splits: DatasetDict, column: str) -> None:
    """Refuse rows whose text is missing, empty or only spaces."""
    for split, table in splits.items():
        for number, text in zip(row_numbers(table), table[column][:]):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"The split {split}, row {number:,}: {column!r} is {text!r}; it must be a text.")


def count_labels(names: dict[str, list[list[str]]], numbers: dict[str, Sequence[int]], what: str) -> Counter[str]:
    """Print how often each label occurs in the training rows: a misspelt `Spam` would be a class besides `spam`.

    Args:
        names: the labels of every row, by split.
        numbers: the row numbers, by split.
        what: the word for a label in messages.

    Raises:
        ValueError: if there is only one label, or another split has labels that no training row has.
    """
    counts = Counter(name for row in names["train"] for name in row)
    if len(counts) < 2:
        found = ", ".join(counts) or "none"
        raise ValueError(f"All training rows have one {what}, {found}: there is nothing to tell apart.")
    for split, rows in names.items():
        unknown = {}
        for number, row in zip(numbers[split], rows):
            for name in row:
                if name not in counts:
                    unknown.setdefault(name, number)
        if unknown:
            name = min(unknown)
            raise ValueError(
                f"The split {split} has the {what} {name!r} (row {unknown[name]:,}), which no training row has; "
                f"{len(unknown)} labels are like this. Add training rows, or leave these out{or_leave_out(split)}."
            )
    shown = [f"{name} {count:,}" for name, count in counts.most_common()]
    if len(shown) > SHOWN_LABELS:
        # Misspelt labels are rare, so the rarest are shown, too.
        half = SHOWN_LABELS // 2
        shown[half:-half] = ["..."]
    print(f"{len(counts):,} {what}s in training: {', '.join(shown)}", flush=True)
    if unseen := sorted(counts.keys() - set(chain(*names["validation"]))):
        more = ", ..." if len(unseen) > SHOWN_LABELS else ""
        print(
            f"No validation row has {len(unseen):,} of these: {', '.join(unseen[:SHOWN_LABELS])}{more}.",
            flush=True,
        )
    return counts
