"""Local datasets as MTEB tasks.

| Type | Columns of `data` |
| --- | --- |
| Retrieval | query, document (the one in the same row is relevant); `corpus`: document (further ones) |
| Reranking | query, positive, negative (lists of texts) |
| STS | sentence1, sentence2, score |
| Classification | text, label; `train`: the same columns; 8 texts per label are drawn from it 10 times, as MTEB does |
| Clustering | text, label |
| PairClassification | sentence1, sentence2, label (1 for a pair, 0 for none) |
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTask, AbsTaskClassification, AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy
from mteb.abstasks.task_metadata import TaskMetadata

from neobert_hf.common.fingerprints import fingerprint
from neobert_hf.common.paths import check_file_name
from neobert_hf.common.settings import nearest, read_entry, read_yaml
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.rows import NoColumnError, Row
from neobert_hf.data.sources import read_rows
from neobert_hf.evaluation.mteb.encoder import TYPES_WITH_QUERIES


# An instruction for `query`, which is for all texts of a task without queries, and one for `document`.
Instruction = dict[str, str]

# How the cells of a column are read; all others are texts.
READ = {"positive": Row.texts, "negative": Row.texts, "score": Row.number, "label": Row.label}
# In CSV files, pandas writes booleans in words.
PAIR_LABELS = {"0": 0, "1": 1, "False": 0, "True": 1}

# For each type: base class, main score, columns of `data`, and a further file, if any, with its columns.
TYPES = {
    "Retrieval": (AbsTaskRetrieval, "ndcg_at_10", ("query", "document"), {"corpus": ("document",)}),
    "Reranking": (AbsTaskRetrieval, "map_at_1000", ("query", "positive", "negative"), {}),
    "STS": (AbsTaskSTS, "cosine_spearman", ("sentence1", "sentence2", "score"), {}),
    "Classification": (AbsTaskClassification, "accuracy", ("text", "label"), {"train": ("text", "label")}),
    "Clustering": (AbsTaskClusteringLegacy, "v_measure", ("text", "label"), {}),
    "PairClassification": (AbsTaskPairClassification, "max_ap", ("sentence1", "sentence2", "label"), {}),
}


@dataclass
class LocalTask:
    """A task on your own files (each a file, pattern or folder); `columns` maps columns with other names."""

    name: str
    type: str
    data: str | Path
    corpus: str | Path | None = None
    train: str | Path | None = None
    columns: dict[str, str] = field(default_factory=dict)
    instruction: str | Instruction | None = None

    def __post_init__(self):
        check_file_name(self.name, "its name")
        if self.type not in TYPES:
            raise ValueError(f"unknown type {self.type!r}{nearest(self.type, list(TYPES))}")
        _, _, columns, further = TYPES[self.type]
        if unused := self.files.keys() - {"data", *further}:
            raise ValueError(f"the type {self.type} takes no `{unused.pop()}`.")
        if self.type == "Classification" and self.train is None:
            raise ValueError("the type Classification needs `train`, the file to learn from.")
        if unknown := self.columns.keys() - set(columns):
            raise ValueError(f"`columns` names {unknown.pop()!r}; the type {self.type} has {', '.join(columns)}.")

    @property
    def files(self) -> dict[str, str | Path]:
        files = {"data": self.data, "corpus": self.corpus, "train": self.train}
        return {part: file for part, file in files.items() if file is not None}


def read_local_tasks(file: str | Path) -> tuple[list[AbsTask], dict[str, Instruction]]:
    """Read a YAML file of local tasks, such as configs/mteb/local_tasks.yaml.

    Returns:
        The tasks, and the instructions of those that have some, by task.

    Raises:
        FileNotFoundError, ValueError: as for `make_task`, and for keys and types that do not fit.
    """
    tasks, instructions = [], {}
    for name, entry in read_yaml(file, "local_tasks").items():
        where = f"{file}, task {name}"
        local = read_entry(LocalTask, where, entry, name=name)
        # Paths in a file are relative to that file.
        for part, path in local.files.items():
            setattr(local, part, Path(file).parent / path)
        tasks.append(make_task(local))
        if local.instruction is not None:
            instructions[name] = read_instruction(where, local.instruction, local.type)
    return tasks, instructions


def read_instruction(where: str, entry: Any, task_type: str) -> Instruction:
    """The instruction of a task in a YAML file: a text, or a mapping with one for `query` and one for `document`.

    Args:
        where: the file and the task, for the message.

    Raises:
        ValueError: if it is something else, or is for documents that the type of task does not have.
    """
    roles = entry if isinstance(entry, dict) else {"query": entry}
    if not roles.keys() <= {"query", "document"} or not all(isinstance(text, str) for text in roles.values()):
        raise ValueError(f"{where}: an instruction must be a text, or have the keys `query` and `document`.")
    if roles.get("document") and task_type not in TYPES_WITH_QUERIES:
        raise ValueError(f"{where} is of the type {task_type} and has no documents: give one instruction.")
    return roles


def make_task(local: LocalTask) -> AbsTask:
    """Make an MTEB task from files.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is empty or lacks a column or a value, if a score is not a number, the label of a pair is
            not 1 or 0, or `train` lacks a label.
    """
    base, main_score, columns, further = TYPES[local.type]
    expected = {"data": columns} | further
    try:
        tables = {part: _read_table(local, str(file), expected[part]) for part, file in local.files.items()}
        if "train" in tables:
            report_repeated(set(tables["train"]["text"][:]), tables["data"]["text"][:], f"`data` of {local.name}")
            tables = _number_labels(tables)
    except (ValueError, FileNotFoundError) as error:
        advice = " `columns` of the task names yours." if isinstance(error, NoColumnError) else ""
        raise type(error)(f"Task {local.name}: {error}{advice}") from error

    def load_data(self, **kwargs) -> None:
        self.dataset = _mteb_format(local.type, tables)
        self.data_loaded = True

    metadata = TaskMetadata(
        name=local.name,
        description=f"Local dataset {local.data}",
        type=local.type,
        # By content, so that a result on other rows is not taken for one on these.
        dataset={"path": str(local.data), "revision": fingerprint(tables)},
        category="t2c" if "text" in columns else "t2t",
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )
    # Task types without such columns ignore these names.
    column_names = {"input_column_name": "text", "label_column_name": "label"}
    return type(f"Local{local.type}", (base,), {"metadata": metadata, "load_data": load_data} | column_names)()


def _read_table(local: LocalTask, file: str, required: tuple[str, ...]) -> Dataset:
    """The required columns under our names, without missing values."""
    names = {column: local.columns.get(column, column) for column in required}
    table = {column: [] for column in required}
    for row in read_rows(file, list(names.values())):
        for column, name in names.items():
            value = READ.get(column, Row.text)(row, name)
            if column == "label" and local.type == "PairClassification":
                if value not in PAIR_LABELS:
                    raise ValueError(f"{row.place}: the label of a pair must be 1 or 0; it is {value!r}. Correct it.")
                value = PAIR_LABELS[value]
            table[column].append(value)
    return Dataset.from_dict(table)


def _number_labels(tables: dict[str, Dataset]) -> dict[str, Dataset]:
    """Replace the names of labels by their numbers in order: MTEB needs the labels 0 and 1 if there are two."""
    learned = sorted(tables["train"].unique("label"))
    if unknown := set(tables["data"].unique("label")) - set(learned):
        raise ValueError(f"the label {unknown.pop()!r} of `data` is not in `train`. Add it there.")
    return {
        part: table.remove_columns("label").add_column("label", list(map(learned.index, table["label"][:])))
        for part, table in tables.items()
    }


def _mteb_format(task_type: str, tables: dict[str, Dataset]) -> DatasetDict | dict:
    data = tables["data"]
    if task_type in TYPES_WITH_QUERIES:
        return _retrieval_format(**tables)
    if task_type == "Clustering":
        # One row is one set to cluster.
        data = Dataset.from_dict({column: [data[column][:]] for column in ("text", "label")})
    return DatasetDict({"test": data} | {part: table for part, table in tables.items() if part == "train"})


def _retrieval_format(data: Dataset, corpus: Dataset | None = None) -> dict:
    """Give each text an id; rows with the same query become one query, and equal documents one document."""
    queries, documents, relevant, candidates = {}, {}, {}, {}

    def document_id(text: str) -> str:
        return documents.setdefault(text, f"d{len(documents)}")

    for row in data:
        query = queries.setdefault(row["query"], f"q{len(queries)}")
        positives = [row["document"]] if "document" in row else row["positive"]
        relevant.setdefault(query, {}).update({document_id(text): 1 for text in positives})
        if "negative" in row:
            negatives = [document_id(text) for text in row["negative"]]
            # A dictionary keeps the order and drops repetitions.
            candidates.setdefault(query, {}).update(dict.fromkeys([*relevant[query], *negatives]))
    for text in corpus["document"][:] if corpus is not None else []:
        document_id(text)
    split = {
        "queries": Dataset.from_list([{"id": number, "text": text} for text, number in queries.items()]),
        "corpus": Dataset.from_list([{"id": number, "text": text, "title": ""} for text, number in documents.items()]),
        "relevant_docs": relevant,
        "top_ranked": {query: list(ids) for query, ids in candidates.items()} or None,
    }
    return {"default": {"test": split}}
