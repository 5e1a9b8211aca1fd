"""Rows of a task from your own files or the Hub, as splits: `train`, `validation` and, if there is one, `test`."""

import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import get_dataset_split_names

from neobert_hf.common.paths import check_exists, held_by
from neobert_hf.common.settings import nearest
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.tables import READERS, Reader, Row, read_files, read_rows, split_files


# The names of splits in files and Hub datasets.
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
# If a task has more, only the commonest and the rarest are listed.
SHOWN_LABELS = 20

Splits = dict[str, list[Row]]


def read_splits(settings: Any, readers: Mapping[str, Reader] = READERS) -> Splits:
    """Load all rows of a task. If there are none for validation, some training rows are held out.

    Args:
        settings: a `TaskSettings`.
        readers: the reader of each kind of file, by suffix.

    Raises:
        FileNotFoundError: if a path does not exist.
        ValueError: if a file cannot be read, or a split is empty.
    """
    folder = Path(settings.data).expanduser()
    local = folder.exists() or bool(glob.glob(str(folder)))
    if not local:
        check_exists(settings.data, "data")
    if settings.subset is not None and local:
        raise ValueError(
            f"`subset` is {settings.subset!r}, but {settings.data} is local: name the subset's folder as `data`."
        )
    if folder.is_dir():
        splits = _read_folder(folder, settings, readers)
    elif local:
        splits = {"train": list(read_rows(settings.data, readers=readers))}
    else:
        names = get_dataset_split_names(settings.data, settings.subset)
        found = {split: [name for name in SPLITS[split] if name in names] for split in SPLITS}
        found["train"] = found["train"] or ["train"]
        splits = {
            split: list(read_rows(settings.data, subset=settings.subset, split=names[0]))
            for split, names in found.items()
            if names
        }
    for split in ("validation", "test"):
        if (source := getattr(settings, f"{split}_data")) is not None:
            if not glob.glob(source):
                check_exists(source, f"{split}_data")
            splits[split] = list(read_rows(source, readers=readers))
    if not settings.score_test:
        splits.pop("test", None)
    _report_trained(splits, settings)
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], settings)
    return {split: splits[split] for split in SPLITS if split in splits}


def _read_folder(folder: Path, settings: Any, readers: Mapping[str, Reader]) -> Splits:
    files = {split: split_files(folder, names, readers) for split, names in SPLITS.items()}
    if not files["train"]:
        raise ValueError(
            f"{folder} holds no `train.csv`, `train.parquet`, `train.jsonl` or the like, only {held_by(folder)}."
        )
    known = set(chain(*files.values()))
    formats = {file.suffix for file in known}
    known |= {Path(given).expanduser() for given in (settings.validation_data, settings.test_data) if given is not None}
    # `eval.csv` may be meant as a split.
    if others := sorted(file.name for file in folder.iterdir() if file.suffix in formats and file not in known):
        names = "; ".join(f"{split}: {', '.join(names)}" for split, names in SPLITS.items())
        print(f"not read in {folder}: {', '.join(others[:8])}. The names of split files are: {names}.", flush=True)
    splits = {split: list(read_files(found, readers=readers)) for split, found in files.items() if found}
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"{files[split][0]} is empty: it holds no row.")
    return splits


def _report_trained(splits: Splits, settings: Any) -> None:
    held_out = [split for split in splits if split != "train"]
    columns = settings.columns_compared(splits["train"]) if held_out else []
    trained = set(_texts(splits["train"], columns))
    for split in held_out:
        advice = ", or give no validation file: rows are then held out"
        report_repeated(trained, _texts(splits[split], columns), f"the split {split}", advice)


def _texts(rows: list[Row], columns: Sequence[str]) -> list[str]:
    """The content of the columns of each row as one text; nothing if no such column exists, which is refused later."""
    columns = [name for name in columns if name in rows[0].cells]
    return [str([row.cells.get(name) for name in columns]) for row in rows] if columns else []


def _hold_out(rows: list[Row], settings: Any) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and the rows that are held out for validation."""
    numbers: dict[str, int] = {}
    # Rows with the same text stay together: a trained text in validation would bias the choice of the checkpoint.
    texts = _texts(rows, settings.columns_read(rows)) or map(str, range(len(rows)))
    groups = [numbers.setdefault(text, len(numbers)) for text in texts]
    different = len(numbers)
    wanted = round(settings.validation_share * different)
    if not 0 < wanted < different:
        raise ValueError(
            f"{settings.data} has {len(rows):,} rows with {different:,} different texts: too few to hold out "
            f"{settings.validation_share:.0%}."
        )
    labels: list[set[str]] = [set() for _ in range(different)]
    labels_of_rows = settings.labels_of_rows(rows)
    for group, names in zip(groups, labels_of_rows):
        labels[group] |= names
    drawn = _draw_groups(labels, any(len(names) > 1 for names in labels_of_rows), wanted)
    if not drawn:
        raise ValueError(
            f"{settings.data} has {different:,} different texts, each with a label that no other text has: none can be "
            "held out. Add rows of these labels, or give a file for validation as `validation_data`."
        )
    kept = [row for row, group in zip(rows, groups) if group not in drawn]
    held_out = [row for row, group in zip(rows, groups) if group in drawn]
    print(
        f"{len(held_out):,} of {len(rows):,} rows are held out for validation, because no file or split is for that. "
        "Rows with the same text stay together.",
        flush=True,
    )
    return kept, held_out


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


def choose_column(rows: list[Row], given: str | None, guesses: Sequence[str], setting: str) -> str:
    """The column that a setting names, or else the first one with a usual name.

    Raises:
        ValueError: if there is no such column.
    """
    found = list(rows[0].cells)
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


@contextmanager
def checking(split: str) -> Iterator[None]:
    """An error in the test split also says how to train without that split: often it has no labels."""
    try:
        yield
    except ValueError as error:
        if split != "test":
            raise
        raise ValueError(f"{error} Or set `score_test` to false.") from error


def count_labels(names: dict[str, list[list[str]]], splits: Splits, what: str) -> Counter[str]:
    """Print how often each label occurs in the training rows: a misspelt `Spam` would be a class besides `spam`.

    Args:
        names: the labels of every row, by split.
        splits: the rows.
        what: the word for a label in messages.

    Raises:
        ValueError: if there is only one label, or another split has a label that no training row has.
    """
    counts = Counter(chain(*names["train"]))
    if len(counts) < 2:
        found = ", ".join(counts) or "none"
        raise ValueError(f"All training rows have one {what}, {found}: there is nothing to tell apart. Add others.")
    for split, rows in splits.items():
        with checking(split):
            for row, of_row in zip(rows, names[split]):
                if unknown := [name for name in of_row if name not in counts]:
                    raise ValueError(
                        f"{row.place} has the {what} {unknown[0]!r}, which no training row has. Add training rows with "
                        "it, or leave it out."
                    )
    shown = [f"{name} {count:,}" for name, count in counts.most_common()]
    if len(shown) > SHOWN_LABELS:
        # Misspelt labels are rare, so the rarest are shown, too.
        half = SHOWN_LABELS // 2
        shown[half:-half] = ["..."]
    print(f"{len(counts):,} {what}s in training: {', '.join(shown)}", flush=True)
    if unseen := sorted(counts.keys() - set(chain(*names["validation"]))):
        more = ", ..." if len(unseen) > SHOWN_LABELS else ""
        print(f"No validation row has {len(unseen):,} of these: {', '.join(unseen[:SHOWN_LABELS])}{more}.", flush=True)
    return counts
