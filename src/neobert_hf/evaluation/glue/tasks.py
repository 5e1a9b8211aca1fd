"""GLUE tasks and your own, described in YAML (configs/glue/tasks.yaml), as checked datasets.

Every source becomes splits with the columns `text`, `text_pair` if there are two texts, and `label`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

from datasets import Dataset, DatasetDict
from huggingface_hub.dataclasses import strict

from neobert_hf.common.paths import beside_file, check_exists, check_file_name, held_by
from neobert_hf.common.settings import nearest, read_entry, read_yaml
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.rows import NoColumnError, Row, is_empty
from neobert_hf.data.sources import read_files, read_rows, split_files
from neobert_hf.evaluation.glue.metrics import CLASSIFICATION, CORRELATIONS


@strict
@dataclass
class GlueTask:
    """A task as configs/glue/tasks.yaml describes it, which explains the keys."""

    name: str
    source: str
    texts: list[str]
    metrics: list[str]
    labels: list[str] | None = None
    subset: str | None = None
    label: str = "label"
    train: str = "train"
    validation: list[str] = field(default_factory=lambda: ["validation"])
    empty_texts: int = 0
    transfer_from: str | None = None

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

    def number_of(self, row: Row) -> float:
        """What a model learns for a row: its score, or the number of its class, which is given by name or by number.

        Raises:
            ValueError: if the task has no such label.
        """
        if self.labels is None:
            return row.number(self.label)
        found = row.label(self.label)
        if found in self.labels:
            return self.labels.index(found)
        # Where classes are called by numbers, a number is a name.
        if found.isdecimal() and int(found) < len(self.labels) and not any(map(str.isdecimal, self.labels)):
            return int(found)
        expected = ", ".join(f"{number} {name}" for number, name in enumerate(self.labels))
        raise ValueError(f"{row.place} has the label {found!r}; the task expects {expected}. Correct it.")


def choose_tasks(path: str, names: list[str]) -> dict[str, GlueTask]:
    """The tasks of these names in a file such as `configs/glue/tasks.yaml`, each after the task that it starts from.

    Args:
        names: `all` stands for all tasks of the file.
    """
    tasks = {}
    for name, entry in read_yaml(path, "task_config").items():
        tasks[name] = read_entry(GlueTask, f"{path}, task {name}", entry, name=name)
        tasks[name].source = beside_file(path, tasks[name].source, or_id=True)
    for task in tasks.values():
        if task.transfer_from not in (None, *tasks):
            raise ValueError(
                f"{path}, task {task.name}: it starts from {task.transfer_from!r}, which is not a task of this file"
                f"{nearest(task.transfer_from, list(tasks))}"
            )
    for name in names:
        if name not in ("all", *tasks):
            raise ValueError(f"{path} has no task {name!r}{nearest(name, ['all', *tasks])}")
    chosen = set(tasks if "all" in names else names)
    sources = {name: {task.transfer_from} & chosen for name, task in tasks.items() if name in chosen}
    return {name: tasks[name] for name in TopologicalSorter(sources).static_order()}


def load_task(task: GlueTask, data_dir: str | None = None) -> DatasetDict:
    """Load and check all splits that a task is trained and evaluated on; print how many held-out rows are trained on.

    Args:
        task: what to load.
        data_dir: a folder that holds the tasks instead of their `source`, in files with the source's columns:
            `mnli/train.parquet`, `mnli/train-00000-of-00001.parquet`, `.jsonl` or `.csv`.

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor here.
        ValueError: if a split or a column is missing, a text is missing or empty, a label is unknown, or all rows of a
            held-out split are also trained on.
    """
    splits = DatasetDict()
    for split in (task.train, *task.validation):
        try:
            splits[split] = _read_split(task, _rows_of_split(task, data_dir, split))
        except (ValueError, FileNotFoundError) as error:
            advice = " `texts` and `label` of the task name the columns." if isinstance(error, NoColumnError) else ""
            raise type(error)(f"Task {task.name}: {error}{advice}") from error
    trained, *held_out = [list(zip(*(table[name][:] for name in _columns(task)))) for table in splits.values()]
    for split, rows in zip(task.validation, held_out):
        report_repeated(set(trained), rows, f"the split {split} of {task.name}")
    return splits


def _columns(task: GlueTask) -> tuple[str, ...]:
    return ("text", "text_pair")[: len(task.texts)]


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
    table = {name: [] for name in (*_columns(task), "label")}
    empty = []
    for row in rows:
        for name, column in zip(_columns(task), task.texts):
            text = row.text_or_none(column) or ""
            table[name].append(text)
            if is_empty(text):
                empty.append(f"{row.place} has an empty {column!r}")
        table["label"].append(task.number_of(row))
    if len(empty) > task.empty_texts:
        raise ValueError(
            f"{empty[0]}; {len(empty):,} texts are empty, but only {task.empty_texts:,} may be. Correct them, leave "
            f"them out, or give the task `empty_texts: {len(empty)}`."
        )
    return Dataset.from_dict(table)
