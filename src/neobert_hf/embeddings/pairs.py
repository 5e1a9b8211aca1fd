"""Rows of `query`, `positive` and `negatives` from tables of any shape: Hub datasets and local files."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Features, List, Value, concatenate_datasets
from sentence_transformers.util import resolve_ids

from neobert_hf.common.fingerprints import file_checksum
from neobert_hf.common.row_files import ROW, list_as_text, number_rows
from neobert_hf.common.text_sources import load_table
from neobert_hf.embeddings.descriptions import PairDataset, Part


# The columns that every table is turned into. The list of negatives may be empty.
FEATURES = Features({"query": Value("string"), "positive": Value("string"), "negatives": List(Value("string"))})


def load_pairs(description: PairDataset, max_negatives: int | None = None) -> Dataset:
    """Load a dataset as rows of `query`, `positive` and `negatives`.

    Args:
        max_negatives: keep only the first ones of a row, at most this many. All if None.

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor on this machine.
        ValueError: if a column is missing, holds something other than text, or no row is left.
    """
    return concatenate_datasets([_load_part(description.name, part, max_negatives) for part in description.parts])


def load_scored_pairs(description: PairDataset) -> tuple[list[str], list[str], list[float]]:
    """Load the `query`, `positive` and column `score` of an STS dataset.

    Raises:
        ValueError: if there is no column `score` of numbers, or rows would be left out. For more, see `load_pairs`.
    """
    part, *others = description.parts
    if others or part.above or part.skip_incomplete:
        raise ValueError(
            f"Dataset {description.name}: scores are read from all rows of one table, so leave `parts`, `above` and "
            "`skip_incomplete` out."
        )
    table = load_table(description.name, part.source, part.subset, part.split)
    scores = list(table["score"]) if "score" in table.column_names else []
    if not scores or any(not isinstance(score, (int, float)) or not math.isfinite(score) for score in scores):
        raise ValueError(
            f"Dataset {description.name}: {part.source!r} needs a column `score` with a number in every row."
        )
    if len(set(scores)) == 1:
        raise ValueError(
            f"Dataset {description.name}: every score of {part.source!r} is {scores[0]}, so nothing can correlate with "
            "it. Correct the file, or leave `sts` out."
        )
    pairs = _load_part(description.name, part, None)
    return list(pairs["query"]), list(pairs["positive"]), scores


def most_negatives(pairs: Dataset) -> int:
    """The largest number of hard negatives that a row has."""
    lengths = pc.list_value_length(pairs.data.column("negatives"))
    return pc.max(lengths).as_py() or 0


def positives_of_queries(pairs: Dataset) -> dict[str, set[str]]:
    """All positives of each query; a query may occur in several rows."""
    positives = {}
    for query, positive in zip(pairs["query"], pairs["positive"]):
        positives.setdefault(query, set()).add(positive)
    return positives


@dataclass
class RowReader:
    """Turns rows of a table into pairs, for `Dataset.map`.

    There are two steps. First, columns of labels and ids become columns of texts, for all rows of a batch at once.
    Then, row by row, the paths of each role are followed to its texts.

    Args:
        where: dataset and source, for error messages.
        paths: of `query`, `positive` and `negatives`, by these names.
        converters: functions that turn labels or ids into texts, by column.
        skip_incomplete, max_negatives: see `Part` and `load_pairs`.
        code: a checksum of this file. `datasets` keeps results of `map` by the values of these fields, and would also
            return those that an earlier version of this file made.
    """

    where: str
    paths: dict[str, list[str]]
    converters: dict[str, partial]
    skip_incomplete: bool
    max_negatives: int | None
    code: str = field(default_factory=lambda: file_checksum(Path(__file__)))

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        columns = dict(batch)
        indices = columns.pop(ROW, indices)
        for name in columns.keys() & self.converters.keys():
            columns[name] = self.converters[name](columns[name])
        pairs = []
        for index, *values in zip(indices, *columns.values()):
            pair = self.read_row(dict(zip(columns, values)), f"row {index:,}")
            if pair is not None:
                pairs.append(pair)
        return {role: [pair[role] for pair in pairs] for role in FEATURES}

    def reason(self, path: str) -> str:
        """Why there is no text at a path."""
        converter = self.converters.get(path.split(".")[0])
        of_ids = converter is not None and converter.func is _texts_of_ids
        return f"{path} is empty, or no text has its id" if of_ids else f"{path} is empty"

    def read_row(self, row: dict[str, Any], name: str) -> dict[str, Any] | None:
        """The pair of a row; None if it is left out."""
        texts = {role: [] for role in FEATURES}
        for role, paths in self.paths.items():
            for path in paths:
                found = _texts_at(path, row, f"{self.where}, {name}")
                if not found and role != "negatives":
                    if self.skip_incomplete:
                        return None
                    raise ValueError(
                        f"{self.where}: {name} has no {role} ({self.reason(path)}). Correct it, or set "
                        "`skip_incomplete: true` to leave such rows out."
                    )
                if len(found) > 1 and role != "negatives":
                    raise ValueError(
                        f"{self.where}: {name} has {len(found)} texts at {path}; a row needs one {role}. Name one of "
                        f"them, such as {path.removesuffix('.*')}.0 for the first, or make a row for each."
                    )
                texts[role] += found
        positive = " ".join(texts["positive"])
        if positive in texts["negatives"]:
            raise ValueError(
                f"{self.where}: {name} has its positive among its negatives: {positive!r:.60}. Remove it from them."
            )
        return {
            "query": " ".join(texts["query"]),
            "positive": positive,
            "negatives": texts["negatives"][: self.max_negatives],
        }


def _texts_at(path: str, row: dict[str, Any], where: str) -> list[str]:
    """The texts that a path such as `neg.*.text` leads to, without empty ones."""
    column, *steps = path.split(".")
    try:
        found = _follow(row[column], steps)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: the path {path!r} does not lead to a text ({error}).") from error
    values = found if isinstance(found, list) else [found]
    for value in values:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: {path!r} holds {type(value).__name__} {value!r:.60}, not text.")
    return [value for value in values if value is not None and value.strip()]


def _follow(value: Any, steps: list[str]) -> Any:
    for number, step in enumerate(steps):
        if value is None:
            return None
        if isinstance(value, str):
            raise TypeError(f"a text has no part {step!r}")
        if step == "*":
            if not isinstance(value, list):
                raise TypeError(f"only a list has '*', and this is {type(value).__name__} {value!r:.60}")
            return [_follow(item, steps[number + 1 :]) for item in value]
        if step.isdigit():
            # A row may have fewer negatives than others, or none.
            value = value[int(step)] if int(step) < len(value) else None
        else:
            value = value[step]
    return value


def _load_part(name: str, part: Part, max_negatives: int | None) -> Dataset:
    where = f"Dataset {name} ({part.source})"
    paths = {role: getattr(part, role) or [] for role in FEATURES}
    paths = {role: [found] if isinstance(found, str) else found for role, found in paths.items()}
    if paths["query"] == paths["positive"]:
        raise ValueError(f"{where}: `query` and `positive` are both {', '.join(paths['query'])}: name two columns.")
    columns = sorted({path.split(".")[0] for of_role in paths.values() for path in of_role})
    table = load_table(name, part.source, part.subset, part.split, columns)
    _check_table(where, table, part, columns)
    reader = RowReader(where, paths, _converters(name, part, table), part.skip_incomplete, max_negatives)
    if part.above:
        # Messages name the number of a row in the file, not among the rows that are left.
        table = number_rows(table)
        columns.append(ROW)
    for column, threshold in part.above.items():
        table = table.filter(_exceeds, input_columns=column, fn_kwargs={"threshold": threshold})
    pairs = table.select_columns(columns).map(
        reader, batched=True, with_indices=True, remove_columns=columns, features=FEATURES, desc=name
    )
    if not len(pairs):
        raise ValueError(f"{where}: none of its {len(table):,} rows is left.")
    same = pc.sum(pc.equal(pairs.data.column("query"), pairs.data.column("positive"))).as_py()
    if same == len(pairs):
        raise ValueError(f"{where}: query and positive are the same text in every row: name two different columns.")
    if same:
        print(f"note: {where}: query and positive are the same text in {same:,} of {len(pairs):,} rows.", flush=True)
    if paths["negatives"] and max_negatives != 0 and not most_negatives(pairs):
        raise ValueError(
            f"{where}: `negatives` is {part.negatives!r}, but no row has any. Leave `negatives` out, or name the "
            "column that has them."
        )
    return pairs


def _check_table(where: str, table: Dataset, part: Part, columns: list[str]) -> None:
    if not len(table):
        raise ValueError(f"{where} is empty: it holds no row.")
    for column in (*columns, *part.above, *part.lookups):
        if column not in table.column_names:
            raise ValueError(f"{where} has no column {column!r}; it has {', '.join(map(repr, table.column_names))}.")
    for column in columns:
        if example := list_as_text(table[column][:100]):
            raise ValueError(
                f"{where}: {column!r} holds lists that were written as text, such as {example!r:.60}. Write JSON lines "
                "or Parquet, where a cell can hold a list, or one column for each text."
            )
    for column in part.above:
        if not str(getattr(table.features[column], "dtype", None)).startswith(("int", "uint", "float")):
            raise ValueError(f"{where}: `above` needs a column of numbers; {column!r} holds {table.features[column]}.")


def _exceeds(value: float | None, threshold: float) -> bool:
    return value is not None and value > threshold


def _converters(name: str, part: Part, table: Dataset) -> dict[str, partial]:
    """Functions that turn labels or ids into texts, by column."""
    converters = {}
    for column, feature in table.features.items():
        if isinstance(feature, ClassLabel):
            converters[column] = partial(_label_names, names=feature.names)
    for column, lookup in part.lookups.items():
        texts = load_table(name, lookup.source or part.source, lookup.subset, lookup.split, [lookup.id, lookup.text])
        for wanted in (lookup.id, lookup.text):
            if wanted not in texts.column_names:
                raise ValueError(
                    f"Dataset {name}: the table in which `lookups` searches the ids of {column!r} has no column "
                    f"{wanted!r}; it has {', '.join(map(repr, texts.column_names))}."
                )
        # Ids of a CSV file are texts. Those of the other file may be numbers.
        kinds = {_kind_of_ids(table.features[column]), _kind_of_ids(texts.features[lookup.id])}
        as_text = len(kinds) > 1 and "string" in kinds
        if as_text:
            texts = texts.cast_column(lookup.id, Value("string"))
        resolve = resolve_ids({column: (texts, lookup.id, lookup.text)}, keep_columns=())
        resolve = partial(_resolve_as_text, resolve=resolve) if as_text else resolve
        converters[column] = partial(_texts_of_ids, column=column, resolve=resolve)
    return converters


def _resolve_as_text(columns: dict[str, list], resolve: Callable[[dict], dict]) -> dict:
    return resolve({name: [None if one is None else str(one) for one in ids] for name, ids in columns.items()})


def _kind_of_ids(feature: Any) -> str:
    """The type of a column of ids, or of lists of them."""
    kind = getattr(getattr(feature, "feature", feature), "dtype", "")
    return "string" if kind == "large_string" else kind


def _label_names(labels: list[int | None], names: list[str]) -> list[str | None]:
    # A ClassLabel marks a missing label with -1.
    return [None if label is None or label < 0 else names[label] for label in labels]


def _texts_of_ids(ids: list, column: str, resolve: Callable[[dict], dict]) -> list:
    """The texts of ids, or of lists of them, such as those of several negatives."""
    if any(isinstance(each, list) for each in ids):
        lists = [each or [] for each in ids]
        texts = iter(_texts_of_ids([one for each in lists for one in each], column, resolve) if any(lists) else [])
        return [[next(texts) for _ in each] for each in lists]
    try:
        (texts,) = resolve({column: ids}).values()
    except KeyError:
        if len(ids) == 1:
            return [None]
        # One of the ids has no text. Look each of them up by itself.
        return [text for single in ids for text in _texts_of_ids([single], column, resolve)]
    return texts
