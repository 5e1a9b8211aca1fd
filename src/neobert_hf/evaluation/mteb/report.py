"""The report of MTEB results: Tables 4 and 5 and Figure 5 of the paper, with your own models."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from neobert_hf.common.files import write_json, write_png, write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.results import note_on_data, read_result
from neobert_hf.common.settings import read_yaml
from neobert_hf.evaluation.mteb.results import RESULT_KEYS


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


@dataclass
class Benchmark:
    """The name of a benchmark of MTEB, and the type of each of its tasks."""

    name: str
    tasks: dict[str, str]

    def is_complete(self, column: str, mean: dict) -> bool:
        """Whether a mean is over all tasks of its column."""
        return mean["tasks"] == self.counts[column]

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks each column has."""
        return Counter(self.tasks.values()) | {"Avg.": len(self.tasks)}


def read_published(files: Iterable[str | Path]) -> dict[str, list[float]]:
    """Read rows of Tables 4 and 5 by model: scores of the seven task types, and the average."""
    published = {}
    for file in files:
        rows = read_yaml(file)
        for model, row in rows.items():
            if len(row) != len(COLUMNS):
                raise ValueError(
                    f"{file}: {model} has {len(row)} numbers; it must have one for each of {list(COLUMNS)}."
                )
        published |= rows
    return published


def collect_scores(folder: Path, benchmark: Benchmark) -> dict[str, dict]:
    """Read the results of all models in a folder.

    Args:
        folder: `output_dir`, with a folder for each model.
        benchmark: all tasks that are not among its own are local.

    Returns:
        For each model its `tasks` and its `local` tasks (type, metric, score, data), and its `types` by column of
        Table 4 (mean, and over how many tasks). Scores and means are in percent.
    """
    models = {}
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        scores, tasks, local = defaultdict(list), {}, {}
        for file in sorted(model.glob("*.json")):
            result = read_result(file, RESULT_KEYS)
            entry = {"type": result["type"], "metric": result["metric"], "score": 100 * result["score"]}
            entry["data"] = result["settings"].get("dataset")
            if result["task"] not in benchmark.tasks:
                local[result["task"]] = entry
                continue
            tasks[result["task"]] = entry
            for column in (result["type"], "Avg."):
                scores[column].append(entry["score"])
        types = {column: {"mean": sum(some) / len(some), "tasks": len(some)} for column, some in scores.items()}
        if tasks or local:
            models[model.name] = {"types": types, "tasks": tasks, "local": local}
    return models


def format_report(models: dict[str, dict], published: dict[str, list[float]], benchmark: Benchmark) -> str:
    """Write Markdown tables: types and average next to the published rows, then every task."""
    lines = ["# MTEB", ""]
    if any(model["tasks"] for model in models.values()):
        lines += _table_of_types(models, published, benchmark)
    for part, title in (("local", "Local tasks"), ("tasks", "Tasks of MTEB")):
        if any(model[part] for model in models.values()):
            scores = {name: model[part] for name, model in models.items()}
            lines += [f"## {title}", "", *_table_of_tasks(scores), ""]
            lines += note_on_data([(task, entry["data"]) for one in scores.values() for task, entry in one.items()])
    return "\n".join(lines)


def _table_of_types(models: dict[str, dict], published: dict[str, list[float]], benchmark: Benchmark) -> list[str]:
    """The rows of the paper, then those of your models, and how to read them."""
    rows = [[f"{name} (paper)", *(f"{score:.1f}" for score in row)] for name, row in published.items()]
    means = {name: model["types"] for name, model in models.items() if model["tasks"]}
    for name, types in means.items():
        rows.append([f"**{name}**", *(_cell(column, types.get(column), benchmark) for column in COLUMNS)])
    head = ["Model", *(f"{title} ({benchmark.counts[column]})" for column, title in COLUMNS.items())]
    notes = [f"Scores of {benchmark.name} in percent; in brackets the number of tasks in each mean."]
    if not all(benchmark.is_complete(column, mean) for types in means.values() for column, mean in types.items()):
        notes.append("A cell with [n] is over n tasks only and cannot be compared with the others of its column.")
    if published:
        notes.append(
            "Rows of the paper: Table 4, after 2,000 steps of its contrastive fine-tuning; those named CDE: Table 5."
        )
    return [*markdown_table(head, rows), "", *notes, ""]


def _cell(column: str, mean: dict | None, benchmark: Benchmark) -> str:
    if mean is None:
        return "-"
    return f"{mean['mean']:.1f}" if benchmark.is_complete(column, mean) else f"{mean['mean']:.1f} [{mean['tasks']}]"


def _table_of_tasks(scores: dict[str, dict]) -> list[str]:
    """A row for each task, a column for each model."""
    tasks = {task: entry for entries in scores.values() for task, entry in entries.items()}
    rows = []
    for task, entry in sorted(tasks.items(), key=lambda item: (item[1]["type"], item[0])):
        cells = [f"{entries[task]['score']:.2f}" if task in entries else "-" for entries in scores.values()]
        rows.append([task, entry["type"], entry["metric"], *cells])
    return markdown_table(["Task", "Type", "Metric", *scores], rows)


def plot_report(file: Path, models: dict[str, dict], published: dict[str, list[float]], benchmark: Benchmark) -> None:
    """Plot bars by task type, as in Figure 5, or by local task if there are no results on MTEB."""
    # For each model: the height of each bar, and whether it is hatched.
    if any(model["tasks"] for model in models.values()):
        groups = list(COLUMNS.values())
        bars = {f"{name} (paper)": [(score, False) for score in row] for name, row in published.items()}
        for name, model in models.items():
            means = {column: model["types"].get(column, {"mean": 0.0, "tasks": 0}) for column in COLUMNS}
            bars[name] = [(mean["mean"], not benchmark.is_complete(column, mean)) for column, mean in means.items()]
    else:
        groups = sorted({task for model in models.values() for task in model["local"]})
        bars = {
            name: [(model["local"].get(task, {"score": 0.0})["score"], False) for task in groups]
            for name, model in models.items()
        }
    _draw_bars(file, groups, bars, own=set(models))


def _draw_bars(file: Path, groups: list[str], bars: dict[str, list[tuple[float, bool]]], own: set[str]) -> None:
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(bars)
    for number, (name, row) in enumerate(bars.items()):
        # Published models are pale, your own are dark.
        color = colormaps["Dark2"](number % 8) if name in own else (*colormaps["tab10"](number % 10)[:3], 0.4)
        centers = [group - 0.425 + (number + 0.5) * width for group in range(len(groups))]
        drawn = axes.bar(centers, [height for height, _ in row], width, label=name, color=color)
        for bar, (_, hatched) in zip(drawn, row):
            bar.set_hatch("//" if hatched else None)
    axes.set_xticks(range(len(groups)), groups)
    axes.set(ylabel="score (%)", title="Means by task type; hatched: not all tasks of the type")
    axes.legend(fontsize="small", ncols=2, loc="upper left", bbox_to_anchor=(1, 1))
    write_png(file, figure)


def write_report(folder: Path, benchmark: Benchmark, published: dict[str, list[float]]) -> str:
    """Write `report.md`, `report.json` and `report.png` into the folder; return the Markdown."""
    models = collect_scores(folder, benchmark)
    text = format_report(models, published, benchmark)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {"models": models, "published": published})
    plot_report(folder / "report.png", models, published, benchmark)
    return text
