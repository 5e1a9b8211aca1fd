"""Pairs with optional hard negatives for contrastive training: Hub datasets and local files, described in YAML.

Whatever a source looks like, it becomes rows of `query`, `positive` and `negatives`, a list that may be empty. See
`configs/embeddings/datasets.yaml` for the format and the paper's datasets.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import pyarrow.compute as pc
import yaml
from datasets import ClassLabel, Dataset, Features, List, Value, concatenate_datasets
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from sentence_transformers.util import resolve_ids

from neobert_hf.common.settings import nearest
from neobert_hf.common.text_sources import load_table


FEATURES = Features({"query": Value("string"), "positive": Value("string"), "negatives": List(Value("string"))})


@strict
@dataclass
class Lookup:
    """Where the texts are that a column names by id.

    Args:
        id: the column of ids.
        text: the column of texts.
        source: as of a part, whose own it is if None.
        subset: configuration of the source.
        split: of the source.
    """

    id: str
    text: str
    source: str | None = None
    subset: str | None = None
    split: str = "train"


@strict
@dataclass
class Part:
    """One table of a dataset.

    Columns are named by paths: `set.0` is the first item of the list in `set`, `neg.*.text` the text of every item in
    `neg`. A list of paths joins their texts with a space (`query`, `positive`) or lists them all (`negatives`).

    Args:
        source: a Hub dataset, or local Parquet or JSON lines files (path, pattern or folder).
        query: path of the text that is searched with. It gets the instruction.
        positive: path of the text to be found.
        negatives: path of hard negatives, if there are any. A row may lack its own.
        subset: configuration of a Hub dataset that has several.
        split: of a Hub dataset, also a slice of it such as `train[:100000]`.
        above: numbers that a row must exceed, by column.
        skip_incomplete: leave out rows without query or positive, which are an error otherwise.
        lookups: where to find the texts of columns that hold ids.
    """

    source: str
    query: str | list[str]
    positive: str | list[str]
    negatives: str | list[str] | None = None
    subset: str | None = None
    split: str = "train"
    above: dict[str, float] = field(default_factory=dict)
    skip_incomplete: bool = False
    lookups: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.lookups = {column: Lookup(**lookup) for column, lookup in self.lookups.items()}


@dataclass
class PairDataset:
    """A dataset as the file describes it.

    Args:
        name: its key in the file.
        instruction: put before every query of it.
        parts: one after the other.
        batch_size: at most so many rows in a batch, 2 or more. Needed where positives are labels: no two rows of a
            batch may have the same, so there are not more than labels.
    """

    name: str
    instruction: str
    parts: list[Part]
    batch_size: int | None = None

    @property
    def prompt(self) -> str:
        """What is put before a query."""
        return f"{self.instruction} " if self.instruction else ""


def read_descriptions(path: str, only: list[str] | None = None) -> tuple[list[PairDataset], dict[str, PairDataset]]:
    """Read a file such as `configs/embeddings/datasets.yaml`.

    Args:
        path: a YAML file with the keys `train` and, optionally, `evaluation` (`retrieval` and `sts`).
        only: names of training datasets to use. All if None.

    Returns:
        The training datasets, and those for evaluation by kind.

    Raises:
        ValueError: naming the dataset and the key that is unknown, missing or of the wrong type.
    """
    with open(path, encoding="utf-8") as file:
        content = _mapping(path, yaml.safe_load(file) or {})
    unknown = content.keys() - {"train", "evaluation"}
    if unknown or not content.get("train"):
        found = f"has the unknown key {min(unknown)!r}" if unknown else "names no training dataset"
        raise ValueError(f"{path} {found}; it holds `train` and, optionally, `evaluation`, each with datasets by name.")
    datasets = _mapping(f"{path}, `train`", content["train"])
    evaluation = _mapping(f"{path}, `evaluation`", content.get("evaluation") or {})
    if unknown := evaluation.keys() - {"retrieval", "sts"}:
        raise ValueError(f"{path}: `evaluation` has `retrieval` and `sts`, not {min(unknown)!r}.")
    for name in only or []:
        if name not in datasets:
            raise ValueError(f"{path} has no training dataset {name!r}{nearest(name, list(datasets))}")
    chosen = {name: datasets[name] for name in only or datasets}
    train = [_describe(path, name, entry) for name, entry in chosen.items()]
    return train, {kind: _describe(path, kind, entry) for kind, entry in evaluation.items()}


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {value!r:.60}; it must hold one `key: value` a line.")
    return value


def _describe(path: str, name: str, entry: Any) -> PairDataset:
    where = f"{path}, dataset {name}"
    entry = dict(_mapping(where, entry))
    own = {key: entry.pop(key) for key in ("instruction", "batch_size", "parts") if key in entry}
    if not isinstance(own.get("instruction"), str):
        raise ValueError(f'{where}: `instruction` is missing; write `instruction: ""` to train without one.')
    if not entry and not own.get("parts"):
        raise ValueError(f"{where} has an instruction and no data: add `source`, `query` and `positive`.")
    if entry and own.get("parts"):
        raise ValueError(f"{where}: {min(entry)!r} stands beside `parts`; put it into each of them.")
    if (rows := own.get("batch_size")) is not None and (type(rows) is not int or rows < 2):
        raise ValueError(f"{where}: `batch_size` is {rows!r}; it must be a whole number, 2 or more.")
    if not isinstance(own.get("parts") or [], list):
        raise ValueError(f"{where}: `parts` holds {own['parts']!r:.60}; it must hold a list, each item after a `-`.")
    known = [part.name for part in fields(Part)]
    parts = []
    for part in own.get("parts") or [entry]:
        for key in _mapping(f"{where}, an item of `parts`", part):
            if key not in known:
                raise ValueError(f"{where} has no meaning for the key {key!r}{nearest(str(key), known)}")
        try:
            # YAML gives an int where a float was meant.
            above = _mapping("`above`", part.get("above", {}))
            above = {column: float(number) if type(number) is int else number for column, number in above.items()}
            lookups = _mapping("`lookups`", part.get("lookups", {}))
            parts.append(Part(**part | {"above": above, "lookups": lookups}))
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
    return PairDataset(name, own["instruction"].strip(), parts, own.get("batch_size"))


def load_pairs(description: PairDataset, max_negatives: int | None = None) -> Dataset:
    """Load a dataset as rows of `query`, `positive` and `negatives`.

    Args:
        description: what to load.
        max_negatives: keep the first so many of a row. All if None.

    Raises:
        FileNotFoundError: if a source is neither on the Hub nor here.
        ValueError: if a column is missing, holds something other than text, or nothing is left.
    """
    parts = [_load_part(description.name, part, max_negatives) for part in description.parts]
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def load_scored_pairs(description: PairDataset) -> tuple[list[str], list[str], list[float]]:
    """Load an STS dataset: its `query`, `positive` and a column `score`.

    Returns:
        First sentences, second sentences, similarity scores.

    Raises:
        ValueError: as `load_pairs`, without a column `score` of numbers, and where rows would be left out.
    """
    part, *others = description.parts
    if others or part.above or part.skip_incomplete:
        raise ValueError(
            f"Dataset {description.name}: scores are read from all rows of one table: leave `parts`, `above` and "
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
            f"Dataset {description.name}: every score of {part.source!r} is {scores[0]}, so that nothing can correlate "
            "with it. Correct the file, or leave `sts` out."
        )
    pairs = _load_part(description.name, part, None)
    return list(pairs["query"]), list(pairs["positive"]), scores


def most_negatives(dataset: Dataset) -> int:
    """The largest number of hard negatives that a row has."""
    lengths = pc.list_value_length(dataset.data.column("negatives"))
    return pc.max(lengths).as_py() or 0


def _load_part(name: str, part: Part, max_negatives: int | None) -> Dataset:
    where = f"Dataset {name} ({part.source})"
    table = load_table(name, part.source, part.subset, part.split)
    if not len(table):
        raise ValueError(f"{where} is empty: it holds no row.")
    roles = {role: [path] if isinstance(path := getattr(part, role), str) else path or [] for role in FEATURES}
    columns = {path.split(".")[0] for paths in roles.values() for path in paths}
    missing = sorted((columns | part.above.keys() | part.lookups.keys()) - set(table.column_names))
    if missing:
        raise ValueError(f"{where} has no column {missing[0]!r}; it has {', '.join(map(repr, table.column_names))}.")
    for column in part.above:
        if not str(getattr(table.features[column], "dtype", None)).startswith(("int", "uint", "float")):
            raise ValueError(f"{where}: `above` needs a column of numbers; {column!r} holds {table.features[column]}.")
    converters: dict[str, Callable[[list], list]] = {}
    for column in columns:
        if isinstance(feature := table.features[column], ClassLabel):
            converters[column] = partial(_label_names, names=feature.names)
    for column, lookup in part.lookups.items():
        texts = load_table(name, lookup.source or part.source, lookup.subset, lookup.split)
        resolve = resolve_ids({column: (texts, lookup.id, lookup.text)}, keep_columns=())
        converters[column] = partial(_texts_of_ids, column=column, resolve=resolve)
    for column, number in part.above.items():
        table = table.filter(_exceeds, input_columns=column, fn_kwargs={"number": number})
    pairs = table.map(
        _to_pairs,
        fn_kwargs={
            "where": where,
            "roles": roles,
            "converters": converters,
            "cap": max_negatives,
            "skip": part.skip_incomplete,
        },
        batched=True,
        with_indices=True,
        remove_columns=table.column_names,
        features=FEATURES,
        desc=name,
    )
    if not len(pairs):
        raise ValueError(f"{where}: none of its {len(table):,} rows is left.")
    if roles["negatives"] and not most_negatives(pairs):
        raise ValueError(
            f"{where}: `negatives` is {part.negatives!r}, and no row has one. Leave `negatives` out, or name the "
            "column that has them."
        )
    return pairs


def _exceeds(value: float, number: float) -> bool:
    return value is not None and value > number


def _label_names(labels: list[int | None], names: list[str]) -> list[str | None]:
    # -1 is a missing label of a ClassLabel.
    return [None if label is None or label < 0 else names[label] for label in labels]


def _texts_of_ids(ids: list, column: str, resolve: Callable[[dict], dict]) -> list[str | None]:
    try:
        (texts,) = resolve({column: ids}).values()
    except KeyError:
        if len(ids) == 1:
            return [None]
        # One of them has no text: find out which.
        return [text for one in ids for text in _texts_of_ids([one], column, resolve)]
    return texts


def _to_pairs(
    batch: dict[str, list],
    indices: list[int],
    where: str,
    roles: dict[str, list[str]],
    converters: dict[str, Callable[[list], list]],
    cap: int | None,
    skip: bool,
) -> dict[str, list]:
    batch = {name: converters[name](values) if name in converters else values for name, values in batch.items()}
    rows: dict[str, list] = {role: [] for role in FEATURES}
    for position, index in enumerate(indices):
        texts = {
            role: [text for path in paths for text in _texts(batch, position, path, f"{where}, row {index:,}")]
            for role, paths in roles.items()
        }
        for role in ("query", "positive"):
            if len(texts[role]) < len(roles[role]) and not skip:
                raise ValueError(
                    f"{where}: row {index:,} has no {role} ({', '.join(roles[role])} is empty). Correct it, or set "
                    "`skip_incomplete: true` to leave such rows out."
                )
        if all(len(texts[role]) >= len(roles[role]) for role in ("query", "positive")):
            rows["query"].append(" ".join(texts["query"]))
            rows["positive"].append(" ".join(texts["positive"]))
            rows["negatives"].append(texts["negatives"][:cap])
    return rows


def _texts(batch: dict[str, list], position: int, path: str, where: str) -> list[str]:
    column, *steps = path.split(".")
    try:
        values = _follow(batch[column][position], steps)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: the path {path!r} does not lead to a text ({error}).") from error
    values = values if isinstance(values, list) else [values]
    for value in values:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: {path!r} holds {type(value).__name__} {value!r:.60}, not text.")
    return [value for value in values if value is not None and value.strip()]


def _follow(value: Any, steps: list[str]) -> Any:
    for number, step in enumerate(steps):
        if value is None:
            return None
        if step == "*":
            return [_follow(item, steps[number + 1 :]) for item in value]
        if step.isdigit():
            # A row may lack a negative, and with it the first of its list.
            value = value[int(step)] if int(step) < len(value) else None
        else:
            value = value[step]
    return value
