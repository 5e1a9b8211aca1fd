"""Local datasets as MTEB tasks.

| Type | Columns of `data` |
| --- | --- |
| Retrieval | query, document (that of the same row is relevant); `corpus`: document, more of them |
| Reranking | query, positive, negative (lists of texts) |
| STS | sentence1, sentence2, score |
| Classification | text, label; `train`: the same, of which 8 texts a label are drawn 10 times, as MTEB does |
| Clustering | text, label |
| PairClassification | sentence1, sentence2, label (1 for a pair, 0 for none) |
"""

import math
from pathlib import Path

import pyarrow.compute as pc
import yaml
from datasets import Dataset, DatasetDict, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from mteb.abstasks import AbsTask, AbsTaskClassification, AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy
from mteb.abstasks.task_metadata import TaskMetadata

from neobert_hf.common.fingerprints import files_fingerprint


TEXTS = (Value("string"), Value("large_string"))
LISTS = tuple(List(text) for text in TEXTS)
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}

# Type: base class, main score, columns of `data`, and the further file that it takes, with its columns.
TYPES = {
    "Retrieval": (AbsTaskRetrieval, "ndcg_at_10", ("query", "document"), {"corpus": ("document",)}),
    "Reranking": (AbsTaskRetrieval, "map_at_1000", ("query", "positive", "negative"), {}),
    "STS": (AbsTaskSTS, "cosine_spearman", ("sentence1", "sentence2", "score"), {}),
    "Classification": (AbsTaskClassification, "accuracy", ("text", "label"), {"train": ("text", "label")}),
    "Clustering": (AbsTaskClusteringLegacy, "v_measure", ("text", "label"), {}),
    "PairClassification": (AbsTaskPairClassification, "max_ap", ("sentence1", "sentence2", "label"), {}),
}


def local_task(
    name: str,
    task_type: str,
    data: str | Path,
    corpus: str | Path | None = None,
    train: str | Path | None = None,
    columns: dict[str, str] | None = None,
) -> AbsTask:
    """Make an MTEB task of files.

    Args:
        name: of the task.
        task_type: one of `TYPES`.
        data: Parquet or JSON lines with the columns of the type.
        corpus: for Retrieval, a file with more documents to search among.
        train: for Classification, the file that the classifier learns from.
        columns: the names that columns have in the files, where they differ.

    Raises:
        ValueError: if the type is unknown, a file is missing, empty, or lacks a column or a value, or nothing could be
            scored: scores that are no numbers or all the same, labels of pairs that are not 1 and 0, one label only,
            labels that `train` does not have.
    """
    if task_type not in TYPES:
        raise ValueError(f"Task {name}: unknown type {task_type!r}; known are {', '.join(TYPES)}.")
    base, main_score, required, further = TYPES[task_type]
    files = {"data": data} | {part: file for part, file in (("corpus", corpus), ("train", train)) if file is not None}
    expected = {"data": required} | further
    columns = columns or {}
    if unused := files.keys() - expected.keys():
        raise ValueError(f"Task {name}: type {task_type} takes no `{unused.pop()}`.")
    if task_type == "Classification" and train is None:
        raise ValueError(f"Task {name}: type Classification needs `train`, the file to learn from.")
    if unknown := columns.keys() - set(required):
        raise ValueError(f"Task {name}: `columns` names {unknown.pop()!r}; type {task_type} has {', '.join(required)}.")
    parts = {part: _read(f"Task {name}", file, expected[part], columns) for part, file in files.items()}
    if task_type == "STS":
        _check_scores(name, parts["data"])
    if "label" in required:
        _check_labels(name, task_type, parts)

    def load_data(self, **kwargs) -> None:
        self.dataset = _mteb_format(task_type, parts)
        self.data_loaded = True

    metadata = TaskMetadata(
        name=name,
        description=f"Local dataset {data}",
        type=task_type,
        # Results of other contents are not taken for those of this one.
        dataset={"path": str(data), "revision": files_fingerprint(files, repr(sorted(columns.items())))},
        category="t2c" if task_type in ("Classification", "Clustering") else "t2t",
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )
    attributes = {"metadata": metadata, "load_data": load_data}
    if task_type == "Clustering":
        attributes |= {"input_column_name": "text", "label_column_name": "label"}
    if task_type == "PairClassification":
        attributes["label_column_name"] = "label"
    return type(f"Local{task_type}", (base,), attributes)()


def read_local_tasks(file: str | Path) -> tuple[list[AbsTask], dict[str, str]]:
    """Read a YAML file of local tasks, as configs/mteb/local_tasks.yaml.

    Returns:
        The tasks, and the instruction of each by its name, empty where it has none.

    Raises:
        ValueError: on unknown keys, and as `local_task`.
    """
    file = Path(file)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise ValueError(f"{file} must hold tasks by name, each with `type` and `data`.")
    known = {"type", "data", "corpus", "train", "columns", "instruction"}
    tasks, instructions = [], {}
    for name, entry in content.items():
        if unknown := entry.keys() - known:
            raise ValueError(f"{file}: task {name} has the unknown key {unknown.pop()!r}; known are {sorted(known)}.")
        if missing := {"type", "data"} - entry.keys():
            raise ValueError(f"{file}: task {name} lacks `{missing.pop()}`.")
        files = {part: file.parent / entry[part] for part in ("data", "corpus", "train") if part in entry}
        tasks.append(local_task(str(name), entry["type"], columns=entry.get("columns"), **files))
        instructions[str(name)] = entry.get("instruction") or ""
    return tasks, instructions


def _read(task: str, file: str | Path, required: tuple[str, ...], columns: dict[str, str]) -> Dataset:
    """The required columns under our names, without missing values."""
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"{task}: there is no file {file}.")
    if file.suffix not in READERS:
        raise ValueError(f"{task}: {file} is not one of {', '.join(READERS)}.")
    if not file.stat().st_size:
        raise ValueError(f"{task}: {file} is empty.")
    try:
        dataset = load_dataset(READERS[file.suffix], data_files=str(file), split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{task}: {file} has no rows that can be read: {error.__cause__ or error}") from error
    names = {columns.get(column, column): column for column in required}
    if missing := names.keys() - set(dataset.column_names):
        raise ValueError(
            f"{task}: {file} has no column {missing.pop()!r}; it has {', '.join(dataset.column_names)}. "
            f"`columns` gives yours for each of {', '.join(required)}."
        )
    dataset = dataset.select_columns(list(names))
    dataset = dataset.rename_columns({old: new for old, new in names.items() if old != new})
    for column, feature in dataset.features.items():
        values = dataset.data.column(column)
        nested = column in ("positive", "negative")
        if column not in ("score", "label") and feature not in (LISTS if nested else TEXTS):
            raise ValueError(f"{task}: column {column!r} of {file} holds {feature}, not {'lists of ' * nested}texts.")
        if values.null_count or (nested and pc.list_flatten(values).null_count):
            raise ValueError(f"{task}: column {column!r} of {file} has missing values (None). Drop those rows.")
        if nested and pc.min(pc.list_value_length(values)).as_py() == 0:
            raise ValueError(f"{task}: a row of {file} has no `{column}`: any order would do. Drop it.")
    return dataset


def _check_scores(name: str, data: Dataset) -> None:
    scores = data.unique("score")
    if wrong := [score for score in scores if not isinstance(score, (int, float)) or not math.isfinite(score)]:
        raise ValueError(f"Task {name}: the scores must be numbers; found {wrong[0]!r}.")
    if len(scores) < 2:
        raise ValueError(f"Task {name}: every score is {scores[0]}; nothing correlates with a constant.")


def _check_labels(name: str, task_type: str, parts: dict[str, Dataset]) -> None:
    labels = {part: table.unique("label") for part, table in parts.items()}
    if task_type == "PairClassification" and not set(labels["data"]) <= {0, 1}:
        raise ValueError(f"Task {name}: the labels of pairs must be 1 and 0; found {labels['data'][:5]}.")
    learned = labels.get("train", labels["data"])
    if len(learned) < 2:
        raise ValueError(f"Task {name}: every label is {learned[0]!r}; any model gets that right. Give two or more.")
    if unknown := [label for label in labels["data"] if label not in learned]:
        raise ValueError(
            f"Task {name}: the label {unknown[0]!r} of `data` is none of `train`: {', '.join(map(repr, learned[:5]))}."
        )


def _mteb_format(task_type: str, parts: dict[str, Dataset]) -> DatasetDict | dict:
    data = parts["data"]
    if task_type == "Classification":
        return DatasetDict(train=parts["train"], test=data)
    if task_type == "Clustering":
        # One row is one set to cluster.
        return DatasetDict(test=Dataset.from_dict({column: [data[column][:]] for column in ("text", "label")}))
    if task_type not in ("Retrieval", "Reranking"):
        return DatasetDict(test=data)

    queries, documents, relevant, candidates = {}, {}, {}, {}
    for row in data:
        query = queries.setdefault(row["query"], f"q{len(queries)}")
        for text in row["positive"] if task_type == "Reranking" else [row["document"]]:
            document = documents.setdefault(text, f"d{len(documents)}")
            relevant.setdefault(query, {})[document] = 1
        if task_type == "Reranking":
            negative = [documents.setdefault(text, f"d{len(documents)}") for text in row["negative"]]
            # A dictionary keeps the order and drops repetitions.
            candidates.setdefault(query, {}).update(dict.fromkeys([*relevant[query], *negative]))
    if "corpus" in parts:
        for text in parts["corpus"]["document"]:
            documents.setdefault(text, f"d{len(documents)}")
    split = {
        "queries": Dataset.from_list([{"id": number, "text": text} for text, number in queries.items()]),
        "corpus": Dataset.from_list([{"id": number, "text": text, "title": ""} for text, number in documents.items()]),
        "relevant_docs": relevant,
        "top_ranked": {query: list(ids) for query, ids in candidates.items()} or None,
    }
    return {"default": {"test": split}}
