"""Datasets of pairs: one table, or what a YAML file describes, and the rows that it leads to.

`configs/embeddings/datasets.yaml` explains the format and holds the paper's datasets. Whatever a table looks like, its
rows become `query`, `positive` and `negatives`, a list of any length.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.dataclasses import strict

from neobert_hf.common.fingerprints import texts_checksum
from neobert_hf.common.paths import beside_file, check_file_name
from neobert_hf.common.settings import check_mapping, nearest, read_entry, read_yaml
from neobert_hf.data.rows import Row, is_empty, list_as_text
from neobert_hf.data.sources import Source, files_state, is_table, name_of, read_rows
from neobert_hf.embeddings.prompts import as_prompt


FEATURES = Features({"query": Value("string"), "positive": Value("string"), "negatives": List(Value("string"))})
# How many rows are looked at for lists that are written as text.
SAMPLED = 100
# Queries of a table of pairs that are held out: an evaluation ranks all of their positives for each of them.
MOST_HELD_OUT = 1_000


# What the file describes: datasets, each of one table or of several, and tables of texts for columns of ids


@strict
@dataclass
class Lookup:
    """The table that holds the texts of a column of ids: its columns, and its source if that is not the pairs'."""

    id: str
    text: str
    source: str | None = None
    subset: str | None = None
    split: str = "train"


@strict
@dataclass
class PairTable:
    """A table of pairs, which is a dataset or one of several tables of it.

    Columns are named by paths: `set.0` is the first item of the list in `set`, `neg.*.text` the text of every item in
    `neg`. The texts of several paths are joined with a space (`query`, `positive`) or are all used (`negatives`).

    Args:
        source: a file, a pattern, a folder, a Hub dataset or, from Python, a table in memory.
        score: the column of a number for the pair, which a reranker learns.
        split: may be a slice such as `train[:100000]`.
        above: numbers that a row must exceed, by column.
        skip_incomplete: leave out rows without query or positive; otherwise they are errors.
        lookups: where to find the texts of columns that hold ids, by column.
    """

    source: Any
    query: str | list[str]
    positive: str | list[str]
    negatives: str | list[str] | None = None
    subset: str | None = None
    split: str = "train"
    above: dict[str, int | float] = field(default_factory=dict)
    skip_incomplete: bool = False
    lookups: dict[str, Any] = field(default_factory=dict)
    score: str | None = None

    def __post_init__(self):
        if self.score and self.negatives:
            raise ValueError(
                f"`score` is {self.score!r}, a number for a pair, so `negatives` have none: leave them out."
            )
        lookups = self.lookups.items()
        self.lookups = {column: read_entry(Lookup, f"lookup of {column!r}", entry) for column, entry in lookups}
        if not self.query or self.query == self.positive:
            raise ValueError(f"`query` is {self.query!r} and `positive` is {self.positive!r}: name two columns.")

    def paths(self, role: str) -> list[str]:
        """The paths of `query`, `positive` or `negatives`."""
        named = getattr(self, role) or []
        return [named] if isinstance(named, str) else named

    def read_tables(self) -> list["PairTable | Lookup"]:
        """This table, and those of its lookups."""
        return [self, *(lookup for lookup in self.lookups.values() if lookup.source is not None)]


@strict
@dataclass
class PairDataset:
    """A dataset as the file describes it.

    Args:
        tables: have rows of the same kind, and are read one after the other.
        batch_size: the largest number of rows in a batch. Needed where positives are labels: no two rows of a batch
            may have the same positive, so a batch cannot have more rows than there are labels.
        default: whether its instruction is the prompt of queries for which none is named; see `TrainingData.prompts`.
        document_instruction: is put before its documents; nothing if empty.
        rows: `query`, `positive` and `negatives`, and `score` if pairs have one; see `load_pairs`.
    """

    name: str
    instruction: str
    tables: list[PairTable]
    batch_size: int | None = None
    default: bool = False
    document_instruction: str = ""
    rows: Any = None

    @property
    def prompt(self) -> str:
        """The prompt of queries."""
        return as_prompt(self.instruction)

    @property
    def document_prompt(self) -> str:
        return as_prompt(self.document_instruction)

    @property
    def is_scored(self) -> bool:
        """Whether its pairs have a number each."""
        return any(table.score for table in self.tables)

    def sources(self) -> list[Source]:
        """The files, folders, Hub datasets and tables in memory that it is read from."""
        return [each.source for table in self.tables for each in table.read_tables()]

    def most_negatives(self) -> int:
        """The largest number of hard negatives that a row has."""
        lengths = pc.list_value_length(self.rows.data.column("negatives"))
        return pc.max(lengths).as_py() or 0

    def rows_of_batch(self, batch_size: int) -> int:
        """Rows of a batch: fewer with more hard negatives, so that the batches of all datasets have equally many texts.

        Args:
            batch_size: rows of a batch without hard negatives.

        Raises:
            ValueError: if a batch has fewer than 2 rows, so that no row has others to be contrasted with.
        """
        texts = 2 + self.most_negatives()
        rows = min(2 * batch_size // texts, self.batch_size or batch_size)
        if rows < 2:
            raise ValueError(
                f"Dataset {self.name}: {2 * batch_size} texts of a batch are no 2 rows with up to {texts - 2} hard "
                f"negatives each. Set a smaller `max_negatives`, or a `per_device_train_batch_size` of {texts} or more."
            )
        return rows


@dataclass
class TrainingData:
    """The datasets of a file.

    Args:
        train: by name.
        evaluation: `retrieval` and `sts`, if there are any.
    """

    train: dict[str, PairDataset]
    evaluation: dict[str, PairDataset]

    def dataset_of_queries(self) -> PairDataset:
        """The training dataset whose instruction becomes the prompt `query` of the model.

        It is the first of these that exists: the dataset that is marked as the `default`, one with the instruction that
        retrieval is evaluated with, the largest one.
        """
        datasets, retrieval = self.train.values(), self.evaluation.get("retrieval")
        marked = [dataset for dataset in datasets if dataset.default]
        evaluated = [dataset for dataset in datasets if retrieval is not None and dataset.prompt == retrieval.prompt]
        return [*marked, *evaluated, max(datasets, key=lambda dataset: len(dataset.rows))][0]

    def prompts(self) -> dict[str, str]:
        """The prompts that the model keeps, by the names of the table in `prompts.py`."""
        prompts = {}
        if len(self.train) > 1:
            # Also an empty one: for a task that has the name of a dataset, MTEB's own wrapper would otherwise put the
            # query prompt before documents, too.
            prompts |= {f"{name}-document": dataset.document_prompt for name, dataset in self.train.items()}
            prompts |= {name: dataset.prompt for name, dataset in self.train.items()}
        default = self.dataset_of_queries()
        return prompts | {"query": default.prompt, "document": default.document_prompt}


def read_descriptions(path: str, only: Sequence[str] = ()) -> TrainingData:
    """Read a file such as `configs/embeddings/datasets.yaml`, without the rows of its datasets.

    Args:
        only: names of training datasets to use; all if there are none.

    Raises:
        ValueError: naming the dataset and the key that is unknown, missing or of the wrong type.
    """
    content = read_yaml(path, "datasets")
    if unknown := content.keys() - {"train", "evaluation"}:
        raise ValueError(f"{path} has the unknown key {min(unknown)!r}; it may hold `train` and `evaluation`.")
    # `null` in place of a dataset's keys switches it off.
    train, evaluation = (
        {name: entry for name, entry in check_mapping(f"{path}, `{part}`", content.get(part) or {}).items() if entry}
        for part in ("train", "evaluation")
    )
    if not train:
        raise ValueError(f"{path} names no training dataset: add one under `train`.")
    if unknown := evaluation.keys() - {"retrieval", "sts"}:
        raise ValueError(f"{path}: `evaluation` may hold `retrieval` and `sts`, not {min(unknown)!r}.")
    for name in only:
        if name not in train:
            raise ValueError(f"{path} has no training dataset {name!r}{nearest(name, list(train))}")
    # These two keys are for training only.
    not_trained = {"batch_size": None, "default": False}
    if "sts" in evaluation:
        evaluation["sts"] = {"score": "score"} | evaluation["sts"]
    return TrainingData(
        {name: _read_dataset(path, name, train[name]) for name in only or train},
        {kind: _read_dataset(path, kind, entry, **not_trained) for kind, entry in evaluation.items()},
    )


def _read_dataset(path: str, name: str, entry: Any, **given: Any) -> PairDataset:
    """A dataset from its entry: the keys of the dataset itself, and those of its one table or of several `parts`."""
    where = f"{path}, dataset {name}"
    check_file_name(name, f"The name of a dataset in {path}")
    if name in ("query", "document", "passage", "corpus"):
        # The model keeps a prompt under each dataset's name.
        raise ValueError(f"{where}: this is the name of another prompt; give the dataset another name.")
    table = dict(check_mapping(where, entry))
    keys = [key for key in ("instruction", "document_instruction", "batch_size", "default") if key not in given]
    of_table = [each.name for each in fields(PairTable)]
    for key in table:
        if key not in (known := [*of_table, *keys, "parts"]):
            raise ValueError(f"{where} has the unknown key {key!r}{nearest(str(key), known)}")
    of_dataset = {key: table.pop(key) for key in keys if key in table}
    # What stands beside `parts` is the same for all of them.
    entries = [table | check_mapping(where, part) for part in table.pop("parts", None) or [{}]]
    tables = [read_entry(PairTable, where, each) for each in entries]
    for each in [each for table in tables for each in table.read_tables()]:
        if not isinstance(each.source, str):
            raise ValueError(f"{where}: `source` is {each.source!r}; it must be a path, a pattern or a Hub id.")
        each.source = beside_file(path, each.source, or_id=True)
    return read_entry(PairDataset, where, of_dataset, name=name, tables=tables, rows=None, **given)


def describe_table(
    source: Source, query: str, positive: str, instruction: str, score: str | None = None
) -> TrainingData:
    """One table of pairs as the only dataset, which is called `pairs`.

    Args:
        query, positive, score: its columns.
        instruction: is put before queries.
    """
    table = PairTable(source, query, positive, score=score)
    return TrainingData({"pairs": PairDataset("pairs", instruction, [table])}, {})


# The rows


def load_pairs(dataset: PairDataset, max_negatives: int | None = None) -> Dataset:
    """Load a dataset as rows of `query`, `positive` and `negatives`.

    Args:
        max_negatives: keep only the first ones of a row, at most this many. All if None.

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor on this machine.
        ValueError: naming file and row, if a column is missing or holds something other than text; if no row is left.
    """
    # `datasets` keeps the rows in its cache, and returns those if all these values are the same. It would divide lists
    # among processes, hence the tuples.
    files = tuple(files_state(source) for source in dataset.sources())
    values = {"tables": tuple(dataset.tables), "files": files, "max_negatives": max_negatives}
    features = Features(FEATURES | {"score": Value("float64")}) if dataset.is_scored else FEATURES
    try:
        if any(map(is_table, dataset.sources())):
            return Dataset.from_list(list(_pairs(**values)), features=features)
        return Dataset.from_generator(_pairs, features=features, gen_kwargs=values)
    except (DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if not isinstance(cause, (OSError, ValueError)):
            raise
        raise type(cause)(f"Dataset {dataset.name}: {cause}") from error


def hold_out_queries(data: TrainingData, share: float) -> bool:
    """Take a share of the queries out of the only training dataset, and let them be the dataset for retrieval.

    They are those with the smallest hashes, with all of their rows, so that they do not depend on the order of rows.

    Returns:
        Whether there are enough of them.
    """
    (dataset,) = data.train.values()
    queries = dataset.rows.unique("query")
    count = min(round(share * len(queries)), MOST_HELD_OUT)
    if count < 2:
        print(f"note: {len(queries):,} queries are too few to hold some out, so the model gets no score.", flush=True)
        return False
    chosen = heapq.nsmallest(count, queries, key=lambda query: texts_checksum([query]))
    is_chosen = pc.is_in(dataset.rows.data.column("query"), value_set=pa.array(chosen, pa.string())).to_numpy()
    held_out, rest = (dataset.rows.select(np.flatnonzero(mask)).flatten_indices() for mask in (is_chosen, ~is_chosen))
    data.evaluation["retrieval"] = replace(dataset, rows=held_out)
    dataset.rows = rest
    return True


def positives_of_queries(pairs: Dataset) -> dict[str, set[str]]:
    """All positives of each query; a query may occur in several rows."""
    positives = {}
    for query, positive in zip(pairs["query"], pairs["positive"]):
        positives.setdefault(query, set()).add(positive)
    return positives


def _pairs(
    tables: tuple[PairTable, ...], files: tuple[Any, ...], max_negatives: int | None
) -> Iterator[dict[str, Any]]:
    for table in tables:
        any_row = any_negative = False
        for row in _rows_of_table(table):
            negatives = [text for path in table.paths("negatives") for text in _texts_at(path, row, optional=True)]
            query, positive = (_joined_text(role, row, table) for role in ("query", "positive"))
            if query is not None and positive is not None:
                pair = {"query": query, "positive": positive, "negatives": negatives[:max_negatives]}
                yield pair | ({"score": row.number(table.score)} if table.score else {})
                any_row, any_negative = True, any_negative or bool(negatives)
        if not any_row:
            raise ValueError(f"{name_of(table.source)}: none of its rows is left.")
        if table.negatives and not any_negative:
            raise ValueError(
                f"{name_of(table.source)}: `negatives` is {table.negatives!r}, but no row has any. Leave `negatives` "
                "out, or name the column that has them."
            )


def _rows_of_table(table: PairTable) -> Iterator[Row]:
    """The rows that exceed the numbers of `above`, with the texts of ids in place of the ids."""
    columns = sorted({path.split(".")[0] for role in FEATURES for path in table.paths(role)} | table.lookups.keys())
    texts = {column: _texts_by_id(table, column) for column in table.lookups}
    others = [*table.above, table.score] if table.score else [*table.above]
    rows = read_rows(table.source, [*columns, *others], table.subset, table.split)
    first = list(islice(rows, SAMPLED))
    for column in columns:
        if example := list_as_text(row.cells.get(column) for row in first):
            raise ValueError(
                f"{first[0].source}: {column!r} holds lists that were written as text, such as {example!r:.60}. Write "
                "JSON lines or Parquet, where a cell can hold a list, or one column for each text."
            )
    for row in chain(first, rows):
        if all(row.cell(name) is not None and row.number(name) > number for name, number in table.above.items()):
            row.cells |= {column: found.get(row.text_or_none(column)) for column, found in texts.items()}
            yield row


def _texts_by_id(table: PairTable, column: str) -> dict[str, str | None]:
    """The texts of those ids that occur in a column. All texts of the other table might not fit in memory.

    Ids that are numbers become text: the other file may hold text.
    """
    lookup, texts = table.lookups[column], {}
    wanted = {row.text_or_none(column) for row in read_rows(table.source, [column], table.subset, table.split)}
    for row in read_rows(lookup.source or table.source, [lookup.id, lookup.text], lookup.subset, lookup.split):
        if (identity := row.text(lookup.id)) in wanted:
            texts[identity] = row.text_or_none(lookup.text)
    return texts


def _joined_text(role: str, row: Row, table: PairTable) -> str | None:
    """The query or the positive of a row; None if a text of it is missing, and the row is to be left out."""
    texts = []
    for path in table.paths(role):
        found = _texts_at(path, row)
        if not found and table.skip_incomplete:
            return None
        if len(found) != 1:
            why = f"{path} is empty" if not found else f"{path} has {len(found)} texts; name one, as {path}.0"
            raise ValueError(
                f"{row.place} has no {role} ({why}). Correct it or drop the row; in the description of a dataset, "
                "`skip_incomplete: true` leaves rows without one out."
            )
        texts += found
    return " ".join(texts)


def _texts_at(path: str, row: Row, optional: bool = False) -> list[str]:
    """The texts that a path such as `neg.*.text` leads to, without empty ones.

    Args:
        optional: whether a row may lack the column.
    """
    column, *steps = path.split(".")
    try:
        found = _follow(row.cells.get(column) if optional else row.cell(column), steps)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{row.place}: the path {path!r} does not lead to a text ({error}).") from error
    texts = [row.as_text(path, value) for value in (found if isinstance(found, list) else [found])]
    return [text for text in texts if not is_empty(text)]


def _follow(value: Any, steps: list[str]) -> Any:
    """What the steps of a path lead to: `*` is every item of a list, a number one item, and others are keys."""
    if value is None or not steps:
        return value
    step, *others = steps
    if isinstance(value, str) or (step == "*" and not isinstance(value, list)):
        raise TypeError(f"{type(value).__name__} {value!r:.60} has no {step!r}")
    if step == "*":
        return [_follow(item, others) for item in value]
    if step.isdigit():
        # A row may have fewer negatives than others, or none.
        return _follow(value[int(step)], others) if int(step) < len(value) else None
    return _follow(value[step], others)
