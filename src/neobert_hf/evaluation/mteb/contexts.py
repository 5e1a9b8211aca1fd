"""The contexts of contextual models in MTEB tasks: one context for each task and subset.

A context is made before any query is encoded, from texts of the task itself: its corpus, its training split or, if it
has neither, the evaluated texts (as the reference code of CDE does; no label is used).
"""

import random
from collections.abc import Iterator
from typing import Any

from datasets import Dataset
from mteb.abstasks import AbsTask, AbsTaskRetrieval


SEED = 0
# For each text of the context, this many texts of a large corpus are loaded: some may be equal or empty.
LOOKED_AT = 20
# Attributes in which task classes name their text columns.
COLUMN_NAMES = (
    *("input_column_name", "input1_column_name", "input2_column_name", "column_names"),
    *("text_column_name", "human_summaries_column_name", "machine_summaries_column_name"),
)


def source_of(task: AbsTask) -> str:
    """The source of the context texts of a task; known before its data are loaded."""
    if isinstance(task, AbsTaskRetrieval):
        return "corpus"
    return getattr(task, "train_split", None) or "evaluated texts"


def context_texts(task: AbsTask, subset: str, size: int) -> list[str]:
    """Texts from which a context of this size can be drawn, for a subset of a task whose data are loaded.

    Raises:
        ValueError: if there are no texts in the expected columns.
    """
    data = task.dataset[subset] if subset in task.dataset else task.dataset
    split = task.eval_splits[0]
    if isinstance(task, AbsTaskRetrieval):
        rows, columns = data[split]["corpus"], ["title", "text"]
    else:
        rows = data[task.train_split if getattr(task, "train_split", None) else split]
        named = [getattr(task, name) for name in COLUMN_NAMES if getattr(task, name, None)]
        columns = [column for names in named for column in ([names] if isinstance(names, str) else names)]
    rows = _some_rows(rows, LOOKED_AT * size)
    columns = [column for column in columns if column in rows.column_names]
    if isinstance(task, AbsTaskRetrieval):
        # As MTEB joins them.
        texts = [" ".join(filter(None, values)).strip() for values in zip(*(rows[column] for column in columns))]
    else:
        texts = [text for column in columns for text in _texts_in(rows[column][:])]
    if not any(text.strip() for text in texts):
        raise ValueError(f"Task {task.metadata.name} has no texts for a context, in {', '.join(rows.column_names)}.")
    return texts


def _some_rows(rows: Dataset, count: int) -> Dataset:
    if len(rows) <= count:
        return rows
    return rows.select(sorted(random.Random(SEED).sample(range(len(rows)), count)))


def _texts_in(value: Any) -> Iterator[str]:
    """The texts of a cell, which may be a text or nested lists of texts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
