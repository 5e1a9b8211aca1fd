"""GLUE tasks and your own, described in YAML (configs/glue/tasks.yaml), as checked datasets.

Every source becomes splits with the columns `text`, `text_pair` if there are two texts, and `label`.
"""

import glob
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Value
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from neobert_hf.common.held_out import report_repeated
from neobert_hf.common.paths import beside_file, check_exists, check_file_name, held_by
from neobert_hf.common.row_files import check_parts
from neobert_hf.common.settings import nearest, read_extended
from neobert_hf.common.text_sources import load_table
from neobert_hf.training.metrics import CLASSIFICATION, CORRELATIONS


# QQP has a few broken lines in half a million.
MOST_BROKEN_LINES = 1e-4
# A column name within a text that is made from several columns.
COLUMN = re.compile(r"\{([^{}]*)\}")


@strict
@dataclass
class TsvFiles:
    """The names in GLUE's own files, in a folder of `data_dir`, if they differ from those on the Hub.

    Args:
        header: the names of all columns, for files without a header line.
    """

    folder: str
    texts: list[str]
    label: str
    header: list[str] | None = None
    files: dict[str, str] = field(default_factory=lambda: {"train": "train.tsv", "validation": "dev.tsv"})


@strict
@dataclass
class GlueTask:
    """A task as configs/glue/tasks.yaml describes it, which explains the keys."""

    name: str
    source: str
    texts: list[str]
    metrics: list[str]
    labels: list[str] | None = None
    source_labels: dict[str, str] | None = None
    unlabelled: int | None = None
    empty_texts: int = 0
    label_range: list[Any] | None = None
    subset: str | None = None
    label: str = "label"
    train: str = "train"
    validation: list[str] = field(default_factory=lambda: ["validation"])
    transfer_from: str | None = None
    tsv: Any = None
    only_named: bool = False

    def __post_init__(self):
        check_file_name(self.name, "its name")
        if isinstance(self.tsv, dict):
            self.tsv = TsvFiles(**self.tsv)
        if len(self.texts) not in (1, 2) or not self.validation or not self.metrics:
            raise ValueError(
                "a task must have one or two text columns, at least one validation split and at least one metric."
            )
        known = CLASSIFICATION if self.labels is not None else CORRELATIONS
        for metric in self.metrics:
            if metric not in known:
                kind = "classification" if self.labels is not None else "regression (it has no `labels`)"
                raise ValueError(f"{metric!r} is not a metric of a {kind}{nearest(metric, list(known))}")
        if self.labels is not None and len(set(self.labels)) != max(2, len(self.labels)):
            raise ValueError(f"`labels` is {self.labels}: it must hold two or more different names.")
        if "f1" in self.metrics and len(self.labels) != 2:
            raise ValueError(f"'f1' needs two labels, but there are {len(self.labels)}: use 'macro_f1'.")
        if self.label_range is not None and (self.labels is not None or len(self.label_range) != 2):
            raise ValueError("`label_range` is for a regression, and must hold the smallest and the largest label.")
        if self.source_labels is not None and set(self.source_labels.values()) != set(self.labels or []):
            raise ValueError(
                f"`source_labels` maps to the labels {', '.join(sorted(set(self.source_labels.values())))}, but "
                f"`labels` is {self.labels}: map to each of these, and to no other."
            )
        if self.unlabelled is not None and (self.labels is None or 0 <= self.unlabelled < len(self.numbers)):
            raise ValueError(
                f"`unlabelled` is {self.unlabelled}: it is for a classification, and must not be the number of a label."
            )

    @property
    def columns(self) -> dict[str, str]:
        """Our name of each text and of the label, by its column (or text with columns) in the source."""
        return dict(zip([*self.texts, self.label], ["text", "text_pair"][: len(self.texts)] + ["label"]))

    @property
    def numbers(self) -> dict[str, int]:
        """The model's number of each source label, in the order of the source's numbers."""
        names = self.source_labels or {name: name for name in self.labels or []}
        return {name: self.labels.index(label) for name, label in names.items()}


def read_tasks(path: str) -> dict[str, GlueTask]:
    """Read a file such as `configs/glue/tasks.yaml`."""
    tasks = {}
    for name, (file, entry) in _read_entries(path).items():
        try:
            tasks[name] = GlueTask(name=name, **entry)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, task {name}: {error}") from error
    for task in tasks.values():
        if task.transfer_from is not None and task.transfer_from not in tasks:
            raise ValueError(
                f"{path}, task {task.name}: it starts from {task.transfer_from!r}, which is not a task of this file"
                f"{nearest(task.transfer_from, list(tasks))}"
            )
    return tasks


def _read_entries(path: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each task of a file and of the files that it extends: the last file that describes it, and its keys."""
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    for file, content in read_extended(path):
        if not content or not all(isinstance(entry, dict) for entry in content.values()):
            raise ValueError(f"{file} must hold tasks by name, each with `source`, `texts` and `metrics`.")
        for name, entry in content.items():
            inherited = entries[name][1] if name in entries else {}
            entries[name] = (file, inherited | _check_entry(file, name, entry))
    return entries


def _check_entry(file: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry, its `source` relative to the file."""
    known = [field.name for field in fields(GlueTask) if field.name != "name"]
    for key in entry:
        if key not in known:
            raise ValueError(f"{file}, task {name} has the unknown key {key!r}{nearest(str(key), known)}")
    if isinstance(source := entry.get("source"), str):
        try:
            return entry | {"source": beside_file(file, source, "source", or_id=True)}
        except ValueError as error:
            raise ValueError(f"{file}, task {name}: {error}") from error
    return entry


def load_task(task: GlueTask, data_dir: str | None = None) -> DatasetDict:
    """Load and check all splits that a task is trained and evaluated on.

    Args:
        task: what to load.
        data_dir: a folder that holds the tasks instead of their `source`: GLUE's own TSV files (`MNLI/train.tsv`), or
            Parquet or JSON lines with the source's columns (`mnli/train.parquet`, `mnli/train-00000-of-00001.parquet`).

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor here.
        ValueError: if a split or a column is missing, a text is missing or empty, a label is unknown, or all training
            rows, or all held-out rows of a regression, have the same label.
    """
    splits = DatasetDict({split: _load_split(task, data_dir, split) for split in (task.train, *task.validation)})
    if len(found := splits[task.train].unique("label")) < 2:
        label = found[0] if task.labels is None else task.labels[found[0]]
        raise ValueError(
            f"Task {task.name}: all {len(splits[task.train]):,} rows of the split {task.train!r}, from row 0 on, have "
            f"the same label, {label}: there is nothing to tell apart. Add rows with another one."
        )
    for split in task.validation if task.labels is None else ():
        if len(found := splits[split].unique("label")) < 2:
            raise ValueError(
                f"Task {task.name}: all {len(splits[split]):,} rows of the split {split!r} have the label {found[0]}: "
                "no correlation with them is defined. Add rows with another one."
            )
    return splits


def report_repeated_rows(task: GlueTask, splits: DatasetDict) -> None:
    """Print how many held-out rows are also trained on; raise ValueError if this is a whole split."""
    trained, *held_out = [
        list(zip(*(table[name][:] for name in table.column_names if name != "label"))) for table in splits.values()
    ]
    trained = set(trained)
    for split, rows in zip(task.validation, held_out):
        report_repeated(trained, rows, f"the split {split} of {task.name}")


def _load_split(task: GlueTask, data_dir: str | None, split: str) -> Dataset:
    tsv, columns = None, task.columns
    if data_dir is not None and task.tsv is not None:
        tsv = Path(data_dir) / task.tsv.folder / task.tsv.files.get(split, f"{split}.tsv")
    if tsv is not None and tsv.is_file():
        table, place = _read_tsv(task, tsv), str(tsv)
        columns = dict(zip([*task.tsv.texts, task.tsv.label], columns.values()))
    elif data_dir is not None or Path(task.source).is_dir():
        if data_dir is None and task.subset is not None:
            raise ValueError(
                f"Task {task.name}: {task.source!r} is local and has no subset {task.subset!r}: name "
                "the subset's folder as `source`."
            )
        folder = Path(task.source) if data_dir is None else Path(data_dir) / task.name
        table, place = _load_files(task.name, folder, split, tsv)
    else:
        check_exists(task.source, f"source of the task {task.name}")
        table, place = load_table(task.name, task.source, task.subset, split), f"{task.source}, split {split}"
    return _check(task, table, columns, f"Task {task.name} ({place})")


def _load_files(name: str, folder: Path, split: str, tsv: Path | None) -> tuple[Dataset, str]:
    """A split from one or several Parquet or JSON lines files, and its path or pattern."""
    named = re.compile(rf"{re.escape(split)}(-\d+-of-\d+)?\.(parquet|jsonl|json)")
    files = sorted(file for file in folder.glob("*") if named.fullmatch(file.name))
    if not files:
        raise ValueError(
            f"Task {name} has no split {split!r}: expected {folder / split}.parquet or .jsonl"
            f"{f', or {tsv}' if tsv else ''}; found in {folder}: "
            f"{held_by(folder) if folder.is_dir() else 'no such folder'}."
        )
    check_parts(files, f"Task {name}, split {split}")
    pattern = str(files[0]) if len(files) == 1 else f"{glob.escape(str(folder / split))}-*-of-*{files[0].suffix}"
    return load_table(name, pattern, None, "train"), pattern


def _read_tsv(task: GlueTask, file: Path) -> Dataset:
    """Read one of GLUE's own files: quotes have no meaning in them, and QQP has truncated lines."""
    # MRPC's files begin with a byte order mark.
    with open(file, encoding="utf-8-sig", newline="\n") as handle:
        rows = [line.rstrip("\r\n").split("\t") for line in handle]
    header = task.tsv.header or (rows.pop(0) if rows else [])
    complete = [row for row in rows if len(row) == len(header)]
    if broken := len(rows) - len(complete):
        found = f"{file}: {broken:,} of {len(rows):,} lines do not have {len(header)} columns"
        if broken > MOST_BROKEN_LINES * len(rows):
            raise ValueError(f"Task {task.name}: {found}, {', '.join(header)}.")
        print(f"{found} and are left out", flush=True)
    return Dataset.from_dict({name: [row[index] for row in complete] for index, name in enumerate(header)})


def _check(task: GlueTask, table: Dataset, columns: dict[str, str], place: str) -> Dataset:
    """Rename the columns to our names, and turn labels into numbers."""
    if not len(table):
        raise ValueError(f"{place} is empty: it holds no row.")
    *texts, label = columns
    used = list(dict.fromkeys(column for text in texts for column in _columns_in(text, table)))
    for column in (*used, label):
        if column not in table.column_names:
            raise ValueError(f"{place} has no column {column!r}; it has {', '.join(map(repr, table.column_names))}.")
    for column in used:
        if table.features[column] not in (Value("string"), Value("large_string")):
            raise ValueError(f"{place}: the column {column!r} holds {table.features[column]}, not text.")
        if missing := table.data.column(column).null_count:
            first = table[column][:].index(None)
            raise ValueError(f"{place}: {missing:,} rows have no {column!r} (None), first row {first:,}. Correct them.")
    labels = _number_labels(task, table, label, place)
    _check_not_empty(task, table, used, labels, place)
    for text in texts:
        if text not in table.column_names:
            table = table.add_column(text, _fill(text, table))
    table = table.select_columns(texts).rename_columns({column: columns[column] for column in texts})
    table = table.add_column("label", labels)
    if None not in labels:
        return table
    kept = [row for row, number in enumerate(labels) if number is not None]
    print(f"{place}: {len(labels) - len(kept):,} rows have no label ({task.unlabelled}) and are left out", flush=True)
    if not kept:
        raise ValueError(f"{place}: all rows have the label {task.unlabelled}, which means unlabelled.")
    return table.select(kept)


def _columns_in(text: str, table: Dataset) -> list[str]:
    """The columns that one of the `texts` of a task is made of: the one that it names, or those in braces."""
    return [text] if text in table.column_names else COLUMN.findall(text) or [text]


def _fill(text: str, table: Dataset) -> list[str]:
    """A text with columns in braces, for each row."""
    # Texts between the columns, and the columns; they alternate.
    between, names = COLUMN.split(text)[::2], COLUMN.findall(text)
    rows = zip(*(table[name][:] for name in names))
    return ["".join(part for pair in zip(between, (*row, "")) for part in pair) for row in rows]


def _check_not_empty(task: GlueTask, table: Dataset, used: list[str], labels: list, place: str) -> None:
    """Refuse labelled texts that are empty or only spaces, unless they are no more than `empty_texts` of the task."""
    columns = [table[column][:] for column in used]
    rows = enumerate(zip(labels, zip(*columns)))
    empty = [row for row, (label, found) in rows if label is not None and not all(text.strip() for text in found)]
    if len(empty) > task.empty_texts:
        column = next(name for name, column in zip(used, columns) if not column[empty[0]].strip())
        raise ValueError(
            f"{place}: row {empty[0]:,} has an empty {column!r}; {len(empty):,} rows have an empty text, but only "
            f"{task.empty_texts:,} may. Correct them, leave them out, or give the task `empty_texts: {len(empty)}`."
        )


def _number_labels(task: GlueTask, table: Dataset, column: str, place: str) -> list[int | float | None]:
    """The model's number for the label of each row; None if the row has no label."""
    feature, expected = table.features[column], list(task.numbers)
    if isinstance(feature, ClassLabel) and feature.names != expected:
        raise ValueError(f"{place}: the labels are {feature.names} in this order; the task expects {expected}.")
    labels = table.with_format(None)[column][:]
    different = table.unique(column)
    if not isinstance(feature, ClassLabel):
        _check_not_ambiguous(expected, different, place)
    numbers = {label: _number(task, label) for label in different}
    for label, number in numbers.items():
        if number is None and (label is None or label != task.unlabelled):
            raise ValueError(
                f"{place}: row {labels.index(label):,} has the label {label!r}; the task expects {_allowed(task)}."
            )
    return [numbers[label] for label in labels]


def _check_not_ambiguous(names: list[str], labels: list, place: str) -> None:
    """Refuse bare numbers if classes are named by numbers, too, and the two meanings differ.

    A boolean that is not the name of a class counts as such a number, too.
    """
    for found in labels:
        label = _as_named(found, names)
        if not isinstance(label, int):
            continue
        if str(label) in names and names.index(str(label)) != label:
            raise ValueError(
                f"{place}: the label {found} may be the class called {str(label)!r}, which is number "
                f"{names.index(str(label))}, or number {label}. Store the labels as text."
            )
        if isinstance(found, bool) and names[label] == _as_named(not found, names):
            raise ValueError(
                f"{place}: the label {found} names no class, but number {label} is called {names[label]!r}. "
                f"Call a class {str(found).lower()!r}, or store the labels as text."
            )


def _as_named(label: Any, names: Iterable[str]) -> Any:
    """A boolean becomes the name of a class if it matches one, or else 1 or 0; other labels are unchanged."""
    if not isinstance(label, bool):
        return label
    return next((name for name in (str(label), str(label).lower()) if name in names), int(label))


def _number(task: GlueTask, label: Any) -> int | float | None:
    """The model's number for a label; None if the task has no such label."""
    if task.labels is not None:
        label = _as_named(label, task.numbers)
        if label in task.numbers:
            return task.numbers[label]
        # A text of digits is taken as a number, unless classes are named by numbers: then it is an unknown name.
        if isinstance(label, str) and label.isdecimal() and not any(map(str.isdecimal, task.numbers)):
            label = int(label)
        known = isinstance(label, int) and 0 <= label < len(task.numbers)
        return list(task.numbers.values())[label] if known else None
    try:
        number = float(label)
    except (TypeError, ValueError):
        return None
    low, high = task.label_range or (-math.inf, math.inf)
    return number if math.isfinite(number) and low <= number <= high else None


def _allowed(task: GlueTask) -> str:
    if task.labels is not None:
        return ", ".join(f"{number} {name}" for number, name in enumerate(task.numbers))
    return "numbers" if task.label_range is None else "numbers from {} to {}".format(*task.label_range)
