"""GLUE tasks and your own, described in YAML (configs/glue/tasks.yaml), as checked datasets.

Every source becomes splits with the columns `text`, `text_pair` if there are two texts, and `label`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from huggingface_hub.dataclasses import strict

from neobert_hf.common.paths import beside_file, check_exists, check_file_name, held_by
from neobert_hf.common.settings import nearest, read_extended
from neobert_hf.data.entries import check_mapping, read_entry
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.tables import Row, is_empty, read_files, read_rows, split_files
from neobert_hf.training.metrics import CLASSIFICATION, CORRELATIONS


# A column name within a text that is made from several columns.
COLUMN = re.compile(r"\{([^{}]*)\}")


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
    only_named: bool = False

    def __post_init__(self):
        check_file_name(self.name, "its name")
        if len(self.texts) not in (1, 2):
            raise ValueError(f"`texts` is {self.texts}: it must hold one or two columns.")
        if self.labels is not None and len(set(self.labels)) != max(2, len(self.labels)):
            raise ValueError(f"`labels` is {self.labels}: it must hold two or more different names.")
        known = CLASSIFICATION if self.labels is not None else CORRELATIONS
        for metric in self.metrics:
            if metric not in known:
                kind = "classification" if self.labels is not None else "regression (it has no `labels`)"
                raise ValueError(f"{metric!r} is not a metric of a {kind}{nearest(metric, list(known))}")
        if "f1" in self.metrics and len(self.labels) != 2:
            raise ValueError(f"'f1' needs two labels, but there are {len(self.labels)}: use 'macro_f1'.")

    def number_of(self, row: Row) -> float | None:
        """The number that a model learns for a row: that of its class, or its score; None if it has no label.

        Raises:
            ValueError: if the task has no such label.
        """
        found = row.cell(self.label)
        # A class of `datasets` has the number -1 if it is missing, and no name.
        if self.unlabelled is not None and found in (None, self.unlabelled):
            return None
        if self.labels is None:
            low, high = self.label_range or (-math.inf, math.inf)
            if low <= (number := row.number(self.label)) <= high:
                return number
            raise ValueError(f"{row.place} has the label {number}; the task expects {low} to {high}. Correct it.")
        classes = self.source_labels or dict(zip(self.labels, self.labels))
        numbers = {name: self.labels.index(label) for name, label in classes.items()}
        names = [str(found), str(found).lower(), str(int(found)) if isinstance(found, bool) else str(found)]
        for name in names:
            if name in numbers:
                return numbers[name]
        # A number is the place of a class, unless classes are called by numbers.
        place = names[-1]
        if place.isdecimal() and int(place) < len(numbers) and not any(map(str.isdecimal, numbers)):
            return list(numbers.values())[int(place)]
        expected = ", ".join(f"{number} {name}" for number, name in enumerate(numbers))
        raise ValueError(f"{row.place} has the label {found!r}; the task expects {expected}. Correct it.")


def read_tasks(path: str) -> dict[str, GlueTask]:
    """Read a file such as `configs/glue/tasks.yaml`, and the files that it extends, whose keys it may override."""
    entries: dict[str, dict[str, Any]] = {}
    tasks: dict[str, GlueTask] = {}
    for file, content in read_extended(path):
        for name, entry in content.items():
            where = f"{file}, task {name}"
            entries[name] = entries.get(name, {}) | check_mapping(where, entry)
            if isinstance(source := entry.get("source"), str):
                entries[name]["source"] = beside_file(file, source, or_id=True)
            tasks[name] = read_entry(GlueTask, where, entries[name], name=name)
    for task in tasks.values():
        if task.transfer_from not in (None, *tasks):
            raise ValueError(
                f"{path}, task {task.name}: it starts from {task.transfer_from!r}, which is not a task of this file"
                f"{nearest(task.transfer_from, list(tasks))}"
            )
    return tasks


def choose_tasks(path: str, names: list[str]) -> dict[str, GlueTask]:
    """The tasks of these names in a file, each after the task that it starts from.

    Args:
        names: `all` stands for all tasks except those that the file marks as `only_named`.
    """
    tasks = read_tasks(path)
    for name in names:
        if name not in ("all", *tasks):
            raise ValueError(f"{path} has no task {name!r}{nearest(name, ['all', *tasks])}")
    chosen = {name for name, task in tasks.items() if name in names or ("all" in names and not task.only_named)}
    sources = {name: {task.transfer_from} & chosen for name, task in tasks.items() if name in chosen}
    return {name: tasks[name] for name in TopologicalSorter(sources).static_order()}


def load_task(task: GlueTask, data_dir: str | None = None) -> DatasetDict:
    """Load and check all splits that a task is trained and evaluated on.

    Args:
        task: what to load.
        data_dir: a folder that holds the tasks instead of their `source`, in files with the source's columns:
            `mnli/train.parquet`, `mnli/train-00000-of-00001.parquet`, `.jsonl` or `.csv`.

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor here.
        ValueError: if a split or a column is missing, a text is missing or empty, a label is unknown, or all training
            rows, or all held-out rows of a regression, have the same label.
    """
    splits = DatasetDict()
    for split in (task.train, *task.validation):
        try:
            splits[split] = _read_split(task, _rows_of_split(task, data_dir, split))
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"Task {task.name}: {error}") from error
        labels = splits[split].unique("label")
        if len(labels) < 2 and (split == task.train or task.labels is None):
            label = labels[0] if task.labels is None else task.labels[labels[0]]
            raise ValueError(f"Task {task.name}: all rows of the split {split!r} have the label {label}: add others.")
    return splits


def report_repeated_rows(task: GlueTask, splits: DatasetDict) -> None:
    """Print how many held-out rows are also trained on; raise ValueError if this is a whole split."""
    trained, *held_out = [
        list(zip(*(table[name][:] for name in table.column_names if name != "label"))) for table in splits.values()
    ]
    trained = set(trained)
    for split, rows in zip(task.validation, held_out):
        report_repeated(trained, rows, f"the split {split} of {task.name}")


def _rows_of_split(task: GlueTask, data_dir: str | None, split: str) -> Iterator[Row]:
    if data_dir is None and not Path(task.source).is_dir():
        check_exists(task.source, "source")
        return read_rows(task.source, None, task.subset, split)
    folder = Path(task.source) if data_dir is None else Path(data_dir) / task.name
    files = split_files(folder, [split]) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f"there is no split {split!r}: expected {folder / split}.parquet, .jsonl or .csv; found in {folder}: "
            f"{held_by(folder) if folder.is_dir() else 'no such folder'}."
        )
    return read_files(files)


def _read_split(task: GlueTask, rows: Iterator[Row]) -> Dataset:
    """The texts under our names, and the numbers of the labels."""
    names = ("text", "text_pair")[: len(task.texts)]
    table = {name: [] for name in (*names, "label")}
    empty, unlabelled = [], 0
    for row in rows:
        if (number := task.number_of(row)) is None:
            unlabelled += 1
            continue
        for name, text in zip(names, task.texts):
            filled, missing = _fill(text, row)
            table[name].append(filled)
            if missing:
                empty.append(f"{row.place} has an empty {missing[0]!r}")
        table["label"].append(number)
    if not table["label"]:
        raise ValueError("there is no row with a label.")
    if len(empty) > task.empty_texts:
        raise ValueError(
            f"{empty[0]}; {len(empty):,} texts are empty, but only {task.empty_texts:,} may be. Correct them, leave "
            f"them out, or give the task `empty_texts: {len(empty)}`."
        )
    if unlabelled:
        print(f"{row.source}: {unlabelled:,} rows have no label ({task.unlabelled}) and are left out", flush=True)
    return Dataset.from_dict(table)


def _fill(text: str, row: Row) -> tuple[str, list[str]]:
    """A text of a task, which names a column or holds several in braces, for a row; and which columns are empty."""
    columns = [text] if text in row.cells else COLUMN.findall(text) or [text]
    cells = {column: row.text_or_none(column) or "" for column in columns}
    empty = [column for column, cell in cells.items() if is_empty(cell)]
    return cells[text] if text in cells else COLUMN.sub(lambda found: cells[found[1]], text), empty
