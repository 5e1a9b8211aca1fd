"""The report of MTEB results: Tables 4 and 5 of the paper, with your own models."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import read_yaml
from neobert_hf.evaluation.results import note_on_data


# The task types of MTEB, and their titles in Table 4.
TASK_TYPES = {
    "Classification": "Class.",
    "Clustering": "Clust.",
    "PairClassification": "PairClass.",
    "Reranking": "Rerank.",
    "Retrieval": "Retriev.",
    "STS": "STS",
    "Summarization": "Summ.",
}
COLUMNS = TASK_TYPES | {"Avg.": "Avg."}
# By model and task: `type`, `metric`, `score` in percent, and `data`, which identifies the rows.
Scores = dict[str, dict[str, dict]]


def read_published(files: Iterable[str | Path]) -> dict[str, list[float]]:
    """Read rows of Tables 4 and 5 by model: scores of the seven task types, and the average."""
    return {model: row for file in files for model, row in read_yaml(file).items()}


def collect_scores(folder: Path) -> Scores:
    """The results of all models in a folder (`output_dir`)."""
    scores: Scores = defaultdict(dict)
    for file in sorted(folder.glob("*/*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        scores[file.parent.name][result["task"]] = {
            "type": result["type"],
            "metric": result["metric"],
            "score": 100 * result["score"],
            "data": result["settings"]["dataset"],
        }
    return dict(scores)


def means_by_type(scores: dict[str, dict]) -> dict[str, dict]:
    """The mean score of each column of Table 4, and over how many tasks it is."""
    columns: dict[str, list[float]] = {}
    for entry in scores.values():
        for column in (entry["type"], "Avg."):
            columns.setdefault(column, []).append(entry["score"])
    return {column: {"mean": sum(found) / len(found), "tasks": len(found)} for column, found in columns.items()}


def table_of_types(means: dict[str, dict], published: dict[str, list[float]], types: dict[str, str]) -> list[str]:
    """The rows of the paper, then those of your models, and how to read them.

    Args:
        means: what `means_by_type` returns, by model.
        types: the type of each task of the benchmark.
    """
    counts = Counter(types.values()) | {"Avg.": len(types)}
    rows = [[f"{model} (paper)", *(f"{score:.1f}" for score in row)] for model, row in published.items()]
    for model, columns in means.items():
        cells = dict.fromkeys(COLUMNS, "-")
        for column, found in columns.items():
            number = "" if found["tasks"] == counts[column] else f" [{found['tasks']}]"
            cells[column] = f"{found['mean']:.1f}{number}"
        rows.append([f"**{model}**", *cells.values()])
    head = ["Model", *(f"{title} ({counts[column]})" for column, title in COLUMNS.items())]
    notes = [
        "Scores in percent; in brackets the number of tasks in each mean. A cell with [n] is over n tasks only and "
        "cannot be compared with the others of its column."
    ]
    if published:
        notes.append("Rows of the paper: Table 4, after 2,000 steps of its fine-tuning; those named CDE: Table 5.")
    return [*markdown_table(head, rows), "", *notes, ""]


def table_of_tasks(title: str, scores: Scores) -> list[str]:
    """A row for each task, a column for each model."""
    tasks = {task: entry for entries in scores.values() for task, entry in entries.items()}
    rows = []
    for task, entry in sorted(tasks.items(), key=lambda item: (item[1]["type"], item[0])):
        cells = [f"{entries[task]['score']:.2f}" if task in entries else "-" for entries in scores.values()]
        rows.append([task, entry["type"], entry["metric"], *cells])
    table = markdown_table(["Task", "Type", "Metric", *scores], rows)
    data = [(task, entry["data"]) for entries in scores.values() for task, entry in entries.items()]
    return [f"## {title}", "", *table, "", *note_on_data(data)]


def write_report(folder: Path, name: str | None, types: dict[str, str], published: dict[str, list[float]]) -> str:
    """Write `report.md` and `report.json` on all models in a folder; returns the Markdown.

    Args:
        folder: `output_dir`, with a folder for each model.
        name: the name of a benchmark of MTEB, if there is one.
        types: the type of each of its tasks. All other tasks are local.
        published: rows of the paper.
    """
    models = collect_scores(folder)
    local, benchmark = defaultdict(dict), defaultdict(dict)
    for model, entries in models.items():
        for task, entry in entries.items():
            (benchmark if task in types else local)[model][task] = entry
    means = {model: means_by_type(entries) for model, entries in benchmark.items()}
    lines = ["# MTEB", "", *(table_of_types(means, published, types) if means else [])]
    for title, scores in (("Local tasks", local), (name, benchmark)):
        lines += table_of_tasks(title, scores) if scores else []
    text = "\n".join(lines)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {"models": models, "means": means, "published": published})
    return text
