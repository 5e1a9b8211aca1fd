"""The contexts of contextual models in MTEB tasks: one context for each task and subset.

A context is made before any query is encoded, from texts of the task itself: its corpus, its training split or, if it
has neither, the evaluated texts (as the reference code of CDE does; no label is used).
"""

import random
from collections.abc import Iterator, Sequence

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
    """Texts from which a context of this size can be drawn, for a subset of a task whose data are loaded."""
    data = task.dataset[subset] if subset in task.dataset else task.dataset
    split = task.eval_splits[0]
    if isinstance(task, AbsTaskRetrieval):
        # As MTEB joins them.
        rows = _some_rows(data[split]["corpus"], LOOKED_AT * size)
        return [f"{row.get('title') or ''} {row['text']}".strip() for row in rows]
    rows = _some_rows(data[getattr(task, "train_split", None) or split], LOOKED_AT * size)
    named = list(_texts_in([getattr(task, name, None) or [] for name in COLUMN_NAMES]))
    return [text for column in named if column in rows.column_names for text in _texts_in(rows[column][:])]


def _some_rows(rows: Dataset, count: int) -> Dataset:
    return rows.select(sorted(random.Random(SEED).sample(range(len(rows)), min(count, len(rows)))))


def _texts_in(value: str | Sequence) -> Iterator[str]:
    """The texts in nested lists of texts."""
    if isinstance(value, str):
        yield value
    else:
        for item in value:
            yield from _texts_in(item)
