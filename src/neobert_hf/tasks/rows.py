"""Rows of a task from your own files or the Hub, as splits: `train`, `validation` and, if there is one, `test`."""

import glob
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, get_dataset_split_names

from neobert_hf.common.paths import check_exists, held_by
from neobert_hf.common.settings import nearest
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.readers import READERS, Reader
from neobert_hf.data.rows import Row
from neobert_hf.data.sources import Source, asking_the_hub, check_local, is_table, read_rows, split_files
from neobert_hf.tasks.pieces import visible


# The names of splits in files and Hub datasets.
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}

Splits = dict[str, list[Row]]


def read_splits(settings: Any, readers: Mapping[str, Reader] = READERS) -> Splits:
    """Read the rows of a task as they are given: `validation` and `test` may be missing.

    Args:
        settings: a `TaskSettings`.
        readers: the reader of each kind of file, by suffix.

    Raises:
        FileNotFoundError: if a path does not exist.
        ValueError: if a file cannot be read, or a split is empty.
    """
    splits: Splits = {}
    given = {split: getattr(settings, f"{split}_data") for split in ("validation", "test")}
    given = {split: source for split, source in given.items() if source is not None}
    # Before the training rows are read, which may take minutes.
    for split, source in given.items():
        if not is_local(source):
            check_exists(source, f"{split}_data")
    folder = None if is_table(settings.data) else Path(settings.data).expanduser()
    if folder is None:
        tables = settings.data if isinstance(settings.data, Mapping) else {"train": settings.data}
        for split, names in SPLITS.items():
            if name := next((name for name in names if name in tables), None):
                splits[split] = list(read_rows(tables[name], readers=readers))
        if "train" not in splits:
            raise ValueError(f"`data` has no table 'train', only {', '.join(map(repr, tables))}.")
    elif folder.is_dir():
        check_local(settings.data, settings.subset, "train")
        for split, names in SPLITS.items():
            if files := split_files(folder, names, readers):
                splits[split] = [row for file in files for row in read_rows(str(file), readers=readers)]
        if "train" not in splits:
            raise ValueError(f"{folder} holds {held_by(folder)}, and no `train.csv`, `train.jsonl` or the like.")
    elif is_local(settings.data):
        splits["train"] = list(read_rows(settings.data, subset=settings.subset, readers=readers))
    else:
        check_exists(settings.data, "data")
        with asking_the_hub(settings.data):
            found = get_dataset_split_names(settings.data, settings.subset)
        for split, names in SPLITS.items():
            if name := next((name for name in names if name in found), None):
                splits[split] = list(read_rows(settings.data, subset=settings.subset, split=name))
        if "train" not in splits:
            raise ValueError(f"{settings.data} has no split 'train', only {', '.join(found)}.")
    for split, source in given.items():
        splits[split] = list(read_rows(source, readers=readers))
    splits = {split: [from_label_studio(row) for row in rows] for split, rows in splits.items()}
    return {split: splits[split] for split in SPLITS if split in splits and (split != "test" or settings.score_test)}


def from_label_studio(row: Row) -> Row:
    """A row of a full export of Label Studio as its data, with the first annotation in `label`; others as they are.

    These are the names of classes, or spans of a text.
    """
    if not {"data", "annotations"} <= row.cells.keys():
        return row
    done = [each for each in row.cells["annotations"] if not each.get("was_cancelled")]
    if not done:
        raise ValueError(f"{row.place} has no annotation: annotate it in Label Studio, or leave it out of the export.")
    found = [each["value"] for each in done[0]["result"]]
    choices = [name for each in found for name in each.get("choices") or []]
    spans = [each for each in found if each.get("start") is not None]
    return Row(row.source, row.index, row.cells["data"] | {"label": choices or spans})


def is_local(source: Source) -> bool:
    """Whether it is a table in memory, or there is such a file or folder, or a file that matches the pattern."""
    if is_table(source):
        return True
    path = Path(source).expanduser()
    # A name such as `reviews [1].csv` is no pattern, if there is a file with it.
    return path.exists() or bool(glob.glob(str(path)))


def parse_splits(
    splits: Splits,
    parse: Callable[[Row], dict[str, Any]],
    share: float,
    inputs: Sequence[str],
    apart: Sequence[str],
    labels: str | None = None,
) -> DatasetDict:
    """The tables of a task. If there are no validation rows, some training rows are held out; see `hold_out`.

    Args:
        splits: what `read_splits` returns.
        parse: a row as the columns that its task needs.
        share: the share of the texts to hold out.
        inputs: the columns of the model's input. Held-out rows that are also trained on are counted and printed.
        apart: the columns of which a content is held out as a whole.
        labels: the column that holds the list of labels of each row, if there is one.

    Returns:
        For each split the parsed columns, and in `place` the file and the number of the row.

    Raises:
        ValueError: naming the first row that lacks something. In the test split, which often has no labels, the error
            also says how to train without that split.
    """
    tables = DatasetDict()
    for split, rows in splits.items():
        try:
            tables[split] = Dataset.from_list([{"place": row.place, **parse(row)} for row in rows])
        except ValueError as error:
            advice = " Or set `score_test` to false." if split == "test" else ""
            raise ValueError(f"{error}{advice}") from error
        if split == "train":
            trained = set(_texts(tables["train"], inputs))
        else:
            advice = ", or give no validation file: rows are then held out"
            report_repeated(trained, _texts(tables[split], inputs), f"the split {split}", advice)
    if "validation" not in tables:
        tables["train"], tables["validation"] = hold_out(tables["train"], share, apart, labels)
    return tables


def _texts(table: Dataset, columns: Sequence[str]) -> list[str]:
    """The content of the columns of each row as one text."""
    return [str(row) for row in zip(*(table[name][:] for name in columns))]


def hold_out(table: Dataset, share: float, columns: Sequence[str], labels: str | None) -> tuple[Dataset, Dataset]:
    """Hold out a share of the different texts, drawn at random, but so that every label stays in training.

    Args:
        columns: rows that have the same content there are held out together: a trained text in validation would bias
            the choice of the checkpoint.
        labels: the column that holds the list of labels of each row, if there is one.

    Returns:
        The rows to train on, and the rows that are held out.

    Raises:
        ValueError: if there are too few texts.
    """
    rows_of: dict[str, list[int]] = {}
    for row, text in enumerate(_texts(table, columns)):
        rows_of.setdefault(text, []).append(row)
    of_rows = table[labels][:] if labels is not None else [[]] * len(table)
    texts, wanted, held_out = list(rows_of), round(share * len(rows_of)), set()
    left = Counter(chain(*of_rows))
    for place in np.random.RandomState(0).permutation(len(texts)).tolist():
        rows = rows_of[texts[place]]
        counts = Counter(chain(*(of_rows[row] for row in rows)))
        if wanted and all(left[label] > count for label, count in counts.items()):
            held_out.update(rows)
            left -= counts
            wanted -= 1
    if not 0 < len(held_out) < len(table):
        of_labels = f" and {len(set(chain(*of_rows))):,} labels" if labels is not None else ""
        raise ValueError(
            f"{len(table):,} rows with {len(texts):,} different texts{of_labels} are too few to hold out {share:.0%} "
            "of them and to keep every label in training. Add rows, or give a file for validation as `validation_data`."
        )
    print(f"{len(held_out):,} of {len(table):,} rows are held out for validation, with all that have the same text.")
    return table.select([row for row in range(len(table)) if row not in held_out]), table.select(sorted(held_out))


def choose_column(found: list[str], given: str | None, guesses: Sequence[str], setting: str) -> str:
    """The column that a setting names, or else the first one with a usual name.

    Args:
        found: the columns of the data.

    Raises:
        ValueError: if there is no such column.
    """
    if given is not None:
        if given not in found:
            raise ValueError(f"`{setting}` is {given!r}, but the data have no such column{nearest(given, found)}")
        return given
    lowered = {name.lower(): name for name in reversed(found)}
    for name in guesses:
        if name in lowered:
            return lowered[name]
    raise ValueError(f"Set `{setting}` to one of the columns: {', '.join(map(repr, found))}. None has a usual name.")


def check_columns(splits: Splits, columns: Mapping[str, str]) -> None:
    """Refuse splits whose files call a column otherwise than the training file.

    Args:
        columns: the chosen columns, each with the setting that names it.
    """
    for rows in splits.values():
        for column, setting in columns.items():
            if column not in rows[0].cells:
                raise ValueError(
                    f"{rows[0].place} has no column {column!r}, which is the `{setting}` of the training rows; it has "
                    f"{', '.join(map(repr, rows[0].cells))}. Rename one of these."
                )


def spelled_alike(tables: DatasetDict, column: str, what: str) -> DatasetDict:
    """The tables, with one spelling of labels that look the same, and would be two classes.

    An accented letter is one character, or a letter and an accent, as in names of files on macOS. What all rows spell
    in one way stays as it is, since programs compare what the model says with their own spelling.

    Args:
        column: holds the list of labels of each row.
        what: the word for a label in the line that says it.
    """
    found = {name for table in tables.values() for name in chain(*table[column][:])}
    spellings = Counter(map(visible, found))
    changed = {name: visible(name) for name in found if spellings[visible(name)] > 1}
    if not changed:
        return tables
    names = ", ".join(sorted(set(changed.values())))
    print(f"{what}s that look the same, but are written with other characters, are one: {names}", flush=True)
    return tables.map(lambda row: {column: [changed.get(name, name) for name in row[column]]})


def count_labels(parsed: DatasetDict, column: str, what: str) -> list[str]:
    """The labels in order, and print how often each occurs in training: a misspelt `Spam` would be another class.

    Args:
        parsed: tables whose `column` holds the list of labels of each row.
        what: the word for a label in messages.

    Raises:
        ValueError: if there is only one label, or another split has a label that no training row has.
    """
    counts = Counter(chain(*parsed["train"][column][:]))
    if len(counts) < 2:
        found = ", ".join(counts) or "none"
        raise ValueError(f"All training rows have one {what}, {found}: there is nothing to tell apart. Add others.")
    for split, table in parsed.items():
        for place, names in zip(table["place"][:], table[column][:]):
            if unknown := [name for name in names if name not in counts]:
                advice = ", or set `score_test` to false" if split == "test" else ""
                raise ValueError(
                    f"{place} has the {what} {unknown[0]!r}, which no training row has. Add training rows with it, or "
                    f"leave it out{advice}."
                )
    shown = [f"{name} {count:,}" for name, count in counts.most_common()]
    if len(shown) > 20:
        # Misspelt labels are rare, so the rarest are shown, too.
        shown[10:-10] = ["..."]
    print(f"{len(counts):,} {what}s in training: {', '.join(shown)}", flush=True)
    return sorted(counts)
