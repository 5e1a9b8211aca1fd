"""Rows of `query`, `positive` and `negatives` from tables of any shape: Hub datasets and local files."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError

from neobert_hf.data.tables import Row, as_text, files_state, is_empty, list_as_text, read_rows
from neobert_hf.embeddings.descriptions import PairDataset, Part


# The columns that every table is turned into. The list of negatives may be empty.
FEATURES = Features({"query": Value("string"), "positive": Value("string"), "negatives": List(Value("string"))})
# How many rows are looked at for lists that are written as text.
SAMPLED = 100


def load_pairs(description: PairDataset, max_negatives: int | None = None) -> Dataset:
    """Load a dataset as rows of `query`, `positive` and `negatives`.

    Args:
        max_negatives: keep only the first ones of a row, at most this many. All if None.

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor on this machine.
        ValueError: if a column is missing, holds something other than text, or no row is left.
    """
    where = f"Dataset {description.name}"
    try:
        # `datasets` writes the rows to its cache, and returns those if all these values are the same. It would divide
        # lists among processes.
        values = {"parts": tuple(description.parts), "state": _files_of(description), "max_negatives": max_negatives}
        pairs = Dataset.from_generator(_read_parts, features=FEATURES, gen_kwargs=values)
    except DatasetGenerationError as error:
        if not isinstance(error.__cause__, (OSError, ValueError)):
            raise
        raise type(error.__cause__)(f"{where}: {error.__cause__}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    same = pc.sum(pc.equal(pairs.data.column("query"), pairs.data.column("positive"))).as_py()
    if same == len(pairs):
        raise ValueError(f"{where}: query and positive are the same text in every row: name two different columns.")
    if same:
        print(f"note: {where}: query and positive are the same text in {same:,} of {len(pairs):,} rows.", flush=True)
    return pairs


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
    scores = [row.number("score") for row in read_rows(part.source, None, part.subset, part.split)]
    if len(set(scores)) == 1:
        raise ValueError(
            f"Dataset {description.name}: every score of {part.source!r} is {scores[0]}, so nothing can correlate with "
            "it. Correct the file, or leave `sts` out."
        )
    pairs = load_pairs(description)
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


def _files_of(description: PairDataset) -> tuple[str | None, ...]:
    """The state of all local files that are read."""
    lookups = chain(*(part.lookups.values() for part in description.parts))
    return tuple(files_state(table.source) for table in (*description.parts, *lookups) if table.source is not None)


def _read_parts(
    parts: tuple[Part, ...], state: tuple[str | None, ...], max_negatives: int | None
) -> Iterator[dict[str, Any]]:
    for part in parts:
        roles = {role: getattr(part, role) or [] for role in FEATURES}
        paths = {role: [found] if isinstance(found, str) else found for role, found in roles.items()}
        if paths["query"] == paths["positive"]:
            raise ValueError(f"`query` and `positive` are both {', '.join(paths['query'])}: name two columns.")
        kept, with_negatives = 0, False
        for row in _rows_of_part(part, sorted({path.split(".")[0] for path in chain(*paths.values())})):
            pair = _pair_of_row(row, paths, part)
            if pair is not None:
                kept, with_negatives = kept + 1, with_negatives or bool(pair["negatives"])
                yield pair | {"negatives": pair["negatives"][:max_negatives]}
        if not kept:
            raise ValueError(f"{part.source}: none of its rows is left.")
        if paths["negatives"] and not with_negatives:
            raise ValueError(
                f"{part.source}: `negatives` is {part.negatives!r}, but no row has any. Leave `negatives` out, or name "
                "the column that has them."
            )


def _rows_of_part(part: Part, columns: list[str]) -> Iterator[Row]:
    """The rows that exceed the numbers of `above`, with the texts of ids in place of the ids."""
    texts = {column: _texts_by_id(part, column) for column in part.lookups}
    rows = read_rows(part.source, [*columns, *part.above, *part.lookups], part.subset, part.split)
    first = list(islice(rows, SAMPLED))
    for column in columns:
        if example := list_as_text(row.cells.get(column) for row in first):
            raise ValueError(
                f"{first[0].source}: {column!r} holds lists that were written as text, such as {example!r:.60}. Write "
                "JSON lines or Parquet, where a cell can hold a list, or one column for each text."
            )
    for row in chain(first, rows):
        if all(row.cell(name) is not None and row.number(name) > number for name, number in part.above.items()):
            for column, found in texts.items():
                several = isinstance(row.cell(column), list)
                of_ids = [found.get(one) for one in _ids(row, column)]
                row.cells[column] = of_ids if several else next(iter(of_ids), None)
            yield row


def _ids(row: Row, column: str) -> list[str]:
    """The ids in a column, which holds one or a list of them. Numbers become text: another file may hold text."""
    cell = row.cell(column)
    ids = [as_text(one, f"{row.place}: {column!r}") for one in (cell if isinstance(cell, list) else [cell])]
    return [one for one in ids if one is not None]


def _texts_by_id(part: Part, column: str) -> dict[str, str | None]:
    """The texts of those ids that occur in a column. All texts of the other table might not fit in memory."""
    lookup, texts = part.lookups[column], {}
    wanted = {one for row in read_rows(part.source, [column], part.subset, part.split) for one in _ids(row, column)}
    table = read_rows(lookup.source or part.source, [lookup.id, lookup.text], lookup.subset, lookup.split)
    for row in table:
        identity = row.text(lookup.id)
        if identity in wanted:
            texts[identity] = row.text_or_none(lookup.text)
    return texts


def _pair_of_row(row: Row, paths: dict[str, list[str]], part: Part) -> dict[str, Any] | None:
    """The pair of a row; None if it is left out."""
    texts = {role: [] for role in FEATURES}
    for role in FEATURES:
        for path in paths[role]:
            found = _texts_at(path, row, needed=role != "negatives")
            if not found and role != "negatives":
                if part.skip_incomplete:
                    return None
                reason = f"{path} is empty{', or no text has its id' if path.split('.')[0] in part.lookups else ''}"
                raise ValueError(
                    f"{row.place} has no {role} ({reason}). Correct it, or set `skip_incomplete: true` to leave such "
                    "rows out."
                )
            if len(found) > 1 and role != "negatives":
                raise ValueError(
                    f"{row.place} has {len(found)} texts at {path}; a row needs one {role}. Name one of them, such as "
                    f"{path.removesuffix('.*')}.0 for the first, or make a row for each."
                )
            texts[role] += found
    query, positive = " ".join(texts["query"]), " ".join(texts["positive"])
    if positive in texts["negatives"]:
        raise ValueError(f"{row.place} has its positive among its negatives: {positive!r:.60}. Remove it from them.")
    return {"query": query, "positive": positive, "negatives": texts["negatives"]}


def _texts_at(path: str, row: Row, needed: bool) -> list[str]:
    """The texts that a path such as `neg.*.text` leads to, without empty ones."""
    column, *steps = path.split(".")
    cell = row.cell(column) if needed else row.cells.get(column)
    try:
        found = _follow(cell, steps)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{row.place}: the path {path!r} does not lead to a text ({error}).") from error
    texts = [as_text(value, f"{row.place}: {path!r}") for value in (found if isinstance(found, list) else [found])]
    return [text for text in texts if not is_empty(text)]


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
