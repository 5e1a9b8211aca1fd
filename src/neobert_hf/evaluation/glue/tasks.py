"""GLUE tasks and your own, described in YAML (configs/glue/tasks.yaml), as checked datasets.

Every source becomes splits with the columns `text`, `text_pair` if there are two texts, and `label`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from huggingface_hub.dataclasses import strict

from neobert_hf.common.paths import beside_file, check_exists, check_file_name, held_by
from neobert_hf.common.settings import nearest, read_extended
from neobert_hf.data.entries import check_mapping, read_entry
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.tables import Row, is_empty, read_files, read_lines, read_rows, split_files
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
    """Read a file such as `configs/glue/tasks.yaml`, and the files that it extends, whose keys it may override."""
    entries: dict[str, dict[str, Any]] = {}
    tasks: dict[str, GlueTask] = {}
    for file, content in read_extended(path):
        if not content:
            raise ValueError(f"{file} must hold tasks by name, each with `source`, `texts` and `metrics`.")
        for name, entry in content.items():
            where = f"{file}, task {name}"
            entries[name] = entries.get(name, {}) | check_mapping(where, entry)
            if isinstance(source := entry.get("source"), str):
                entries[name]["source"] = beside_file(file, source, or_id=True)
            tasks[name] = read_entry(GlueTask, where, entries[name], name=name)
    for task in tasks.values():
        if task.transfer_from is not None and task.transfer_from not in tasks:
            raise ValueError(
                f"{path}, task {task.name}: it starts from {task.transfer_from!r}, which is not a task of this file"
                f"{nearest(task.transfer_from, list(tasks))}"
            )
    return tasks


def load_task(task: GlueTask, data_dir: str | None = None) -> DatasetDict:
    """Load and check all splits that a task is trained and evaluated on.

    Args:
        task: what to load.
        data_dir: a folder that holds the tasks instead of their `source`: GLUE's own TSV files (`MNLI/train.tsv`), or
            files with the source's columns (`mnli/train.parquet`, `mnli/train-00000-of-00001.parquet`).

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor here.
        ValueError: if a split or a column is missing, a text is missing or empty, a label is unknown, or all training
            rows, or all held-out rows of a regression, have the same label.
    """
    splits = DatasetDict()
    for split in (task.train, *task.validation):
        try:
            splits[split] = _check_rows(task, *_rows_of_split(task, data_dir, split))
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"Task {task.name}: {error}") from error
        labels = splits[split].unique("label")
        if len(labels) < 2 and (split == task.train or task.labels is None):
            label = labels[0] if task.labels is None else task.labels[labels[0]]
            raise ValueError(
                f"Task {task.name}: all {len(splits[split]):,} rows of the split {split!r}, from row 0 on, have the "
                f"same label, {label}: there is nothing to tell apart. Add rows with another one."
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


def _rows_of_split(task: GlueTask, data_dir: str | None, split: str) -> tuple[Iterator[Row], dict[str, str]]:
    """The rows of a split, and our names by its columns."""
    tsv = ""
    if data_dir is not None and task.tsv is not None:
        file = Path(data_dir) / task.tsv.folder / task.tsv.files.get(split, f"{split}.tsv")
        if file.is_file():
            return _read_tsv(task.tsv, file), dict(zip([*task.tsv.texts, task.tsv.label], task.columns.values()))
        tsv = f", or {file}"
    if data_dir is None and not Path(task.source).is_dir():
        check_exists(task.source, "source")
        return read_rows(task.source, None, task.subset, split), task.columns
    if data_dir is None and task.subset is not None:
        raise ValueError(
            f"{task.source!r} is local and has no subset {task.subset!r}: name the subset's folder as `source`."
        )
    folder = Path(task.source) if data_dir is None else Path(data_dir) / task.name
    files = split_files(folder, [split]) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f"there is no split {split!r}: expected {folder / split}.parquet, .jsonl or .csv{tsv}; found in {folder}: "
            f"{held_by(folder) if folder.is_dir() else 'no such folder'}."
        )
    return read_files(files), task.columns


def _read_tsv(tsv: TsvFiles, file: Path) -> Iterator[Row]:
    """Read one of GLUE's own files: quotes have no meaning in them, and QQP has truncated lines."""
    rows = [line.rstrip("\r\n").split("\t") for line in read_lines(file)]
    header = tsv.header or (rows.pop(0) if rows else [])
    broken = sum(len(row) != len(header) for row in rows)
    if broken:
        found = f"{file}: {broken:,} of {len(rows):,} lines do not have {len(header)} columns"
        if broken > MOST_BROKEN_LINES * len(rows):
            raise ValueError(f"{found}, {', '.join(header)}.")
        print(f"{found} and are left out", flush=True)
    for index, row in enumerate(rows):
        if len(row) == len(header):
            yield Row(str(file), index, dict(zip(header, row)))


def _check_rows(task: GlueTask, rows: Iterator[Row], columns: dict[str, str]) -> Dataset:
    """The texts under our names, and the numbers of the labels."""
    *texts, label = columns
    table = {name: [] for name in columns.values()}
    empty, unlabelled, row = [], 0, None
    for row in rows:
        number = _number_of_label(task, row, label)
        if number is None:
            unlabelled += 1
            continue
        for text in texts:
            used = [text] if text in row.cells else COLUMN.findall(text) or [text]
            cells = {name: row.text_or_none(name) or "" for name in used}
            empty += [f"{row.place} has an empty {name!r}" for name, cell in cells.items() if is_empty(cell)][:1]
            filled = cells[text] if text in cells else COLUMN.sub(lambda found, cells=cells: cells[found[1]], text)
            table[columns[text]].append(filled)
        table["label"].append(number)
    if row is None:
        raise ValueError("there is no row.")
    if len(empty) > task.empty_texts:
        raise ValueError(
            f"{empty[0]}; {len(empty):,} texts are empty, but only {task.empty_texts:,} may be. Correct them, leave "
            f"them out, or give the task `empty_texts: {len(empty)}`."
        )
    if unlabelled:
        print(f"{row.source}: {unlabelled:,} rows have no label ({task.unlabelled}) and are left out", flush=True)
    if not table["label"]:
        raise ValueError(f"{row.source}: all rows have the label {task.unlabelled}, which means unlabelled.")
    return Dataset.from_dict(table)


def _number_of_label(task: GlueTask, row: Row, column: str) -> int | float | None:
    """The model's number for the label of a row; None if it has none and the task allows that."""
    label = row.cell(column)
    # A class of `datasets` has the number -1 if it is missing, and no name.
    if task.unlabelled is not None and label in (None, task.unlabelled):
        return None
    if task.labels is None:
        number = row.number(column)
        low, high = task.label_range or (-math.inf, math.inf)
        if low <= number <= high:
            return number
        expected = "numbers from {} to {}".format(*task.label_range)
    else:
        # True may be called true; and a number may be the place of a class, unless another one is called by it.
        for name in (str(label), str(label).lower()):
            if name in task.numbers:
                return task.numbers[name]
        digits = any(map(str.isdecimal, task.numbers))
        places = {str(place): place for place, name in enumerate(task.numbers) if name == str(place) or not digits}
        place = places.get(str(int(label)) if isinstance(label, bool) else str(label))
        if place is not None:
            return list(task.numbers.values())[place]
        expected = ", ".join(f"{number} {name}" for number, name in enumerate(task.numbers))
    raise ValueError(f"{row.place} has the label {label!r}; the task expects {expected}. Correct it.")
