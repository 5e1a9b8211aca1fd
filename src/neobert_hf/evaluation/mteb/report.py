"""The report of MTEB results: Tables 4 and 5 of the paper, with your own models."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from neobert_hf.common.files import write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import read_yaml


# The task types of MTEB(eng), and their titles in Table 4.
TASK_TYPES = {
    "Classification": "Class.",
    "Clustering": "Clust.",
    "PairClassification": "PairClass.",
    "Reranking": "Rerank.",
    "Retrieval": "Retriev.",
    "STS": "STS",
    "Summarization": "Summ.",
}
# The content of result files, by model and task.
Results = dict[str, dict[str, dict]]


def read_published(files: Iterable[str | Path]) -> dict[str, list[float]]:
    """Read rows of Tables 4 and 5 by model: scores of the seven task types, and the average."""
    return {model: row for file in files for model, row in read_yaml(file, "published").items()}


def table_of_types(models: Results, published: dict[str, list[float]], types: dict[str, str]) -> list[str]:
    """The rows of the paper, then the means of your models over the tasks of each type, and how to read them.

    Args:
        models: results on tasks of the benchmark.
        types: the type of each task of the benchmark.
    """
    counts = Counter(types.values())
    # Other benchmarks have fewer types, and some of their own.
    columns = {kind: title for kind, title in TASK_TYPES.items() if kind in counts}
    columns |= {kind: kind for kind in sorted(counts.keys() - TASK_TYPES.keys())} | {"Avg.": "Avg."}
    counts["Avg."] = len(types)
    rows = [[f"{model} (paper)", *(f"{score:.1f}" for score in row)] for model, row in published.items()]
    for model, results in models.items():
        cells = []
        for column in columns:
            scores = [100 * each["score"] for each in results.values() if column in (each["type"], "Avg.")]
            number = "" if len(scores) == counts[column] else f" [{len(scores)}]"
            cells.append(f"{sum(scores) / len(scores):.1f}{number}" if scores else "-")
        rows.append([f"**{model}**", *cells])
    head = ["Model", *(f"{title} ({counts[column]})" for column, title in columns.items())]
    notes = [
        "Scores in percent; in brackets the number of tasks in each mean. A cell with [n] is over n tasks only and "
        "cannot be compared with the others of its column."
    ]
    if published:
        notes.append("Rows of the paper: Table 4, after 2,000 steps of its fine-tuning; those named CDE: Table 5.")
    return [*markdown_table(head, rows), "", *notes, ""]


def table_of_tasks(title: str, models: Results) -> list[str]:
    """A row for each task, a column for each model."""
    tasks = {task: result for results in models.values() for task, result in results.items()}
    rows = []
    for task, result in sorted(tasks.items(), key=lambda item: (item[1]["type"], item[0])):
        cells = [f"{100 * results[task]['score']:.2f}" if task in results else "-" for results in models.values()]
        rows.append([task, result["type"], result["metric"], *cells])
    return [f"## {title}", "", *markdown_table(["Task", "Type", "Metric", *models], rows), ""]


def write_report(folder: Path, name: str | None, types: dict[str, str], published: dict[str, list[float]]) -> str:
    """Write `report.md` on all models in a folder; returns the Markdown.

    Args:
        folder: `output_dir`, with a folder for each model.
        name: the name of a benchmark of MTEB, if there is one.
        types: the type of each of its tasks. All other tasks are local.
        published: rows of the paper.
    """
    local, benchmark = defaultdict(dict), defaultdict(dict)
    for file in sorted(folder.glob("*/*.json")):
        models = benchmark if file.stem in types else local
        models[file.parent.name][file.stem] = json.loads(file.read_text(encoding="utf-8"))
    lines = ["# MTEB", "", *(table_of_types(benchmark, published, types) if benchmark else [])]
    for title, models in (("Local tasks", local), (name, benchmark)):
        lines += table_of_tasks(title, models) if models else []
    text = "\n".join(lines)
    write_text(folder / "report.md", text)
    return text
