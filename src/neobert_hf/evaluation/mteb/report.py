"""The report of MTEB results: Table 4 and Figure 5 of the paper, with one's own models."""

from collections import defaultdict
from pathlib import Path

import yaml
from matplotlib import colormaps
from matplotlib.figure import Figure

from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.common.results import read_result
from neobert_hf.evaluation.mteb.results import KEYS


# Task type: column of Table 4, and how many of the 56 tasks of MTEB(eng, v1) are of it.
COLUMNS = {
    "Classification": ("Class.", 12),
    "Clustering": ("Clust.", 11),
    "PairClassification": ("PairClass.", 3),
    "Reranking": ("Rerank.", 4),
    "Retrieval": ("Retriev.", 15),
    "STS": ("STS", 10),
    "Summarization": ("Summ.", 1),
}
TASKS = sum(number for _, number in COLUMNS.values())


def read_published(file: str | Path) -> dict[str, list[float]]:
    """Read rows of Table 4 by model: the seven columns and the average.

    Raises:
        ValueError: if a row has another length.
    """
    rows = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    for model, row in rows.items():
        if len(row) != len(COLUMNS) + 1:
            raise ValueError(f"{file}: {model} has {len(row)} numbers; there are {len(COLUMNS)} types and the average.")
    return rows


def collect(folder: Path, mteb_tasks: set[str]) -> dict:
    """Read the results of all models in a folder.

    Args:
        folder: `output_dir`, with a folder for each model.
        mteb_tasks: the names of the 56 tasks; all others are local.

    Returns:
        For each model its `tasks`, its `local` tasks, and its `types` (mean and number of tasks), `Avg.` included.
        Means are over tasks, in percent.
    """
    models = {}
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        results = [read_result(file, KEYS) for file in sorted(model.glob("*.json"))]
        groups, tasks, local = defaultdict(list), {}, {}
        for result in results:
            score = 100 * result["score"]
            entry = {"type": result["type"], "metric": result["metric"], "score": score}
            if result["task"] not in mteb_tasks:
                local[result["task"]] = entry
                continue
            tasks[result["task"]] = entry
            for group in (result["type"], "Avg."):
                groups[group].append(score)
        types = {group: {"mean": sum(scores) / len(scores), "tasks": len(scores)} for group, scores in groups.items()}
        if results:
            models[model.name] = {"types": types, "tasks": tasks, "local": local}
    return models


def markdown(models: dict, published: dict[str, list[float]]) -> str:
    """Tables: types and average next to the published rows, then every task."""
    lines = ["# MTEB", ""]
    if any(model["tasks"] for model in models.values()):
        heads = [f"{name} ({number})" for name, number in COLUMNS.values()]
        lines += _header(["Model", *heads, f"Avg. ({TASKS})"])
        for name, row in published.items():
            lines.append(f"| {name} (paper) | " + " | ".join(f"{score:.1f}" for score in row) + " |")
        partial = False
        for name, model in models.items():
            cells = []
            for group, number in [*((group, number) for group, (_, number) in COLUMNS.items()), ("Avg.", TASKS)]:
                mean = model["types"].get(group)
                complete = mean is not None and mean["tasks"] == number
                partial |= mean is not None and not complete
                cells.append("-" if mean is None else f"{mean['mean']:.1f}" + f" [{mean['tasks']}]" * (not complete))
            if model["tasks"]:
                lines.append(f"| **{name}** | " + " | ".join(cells) + " |")
        lines += ["", "Scores of MTEB(eng, v1) in percent; in brackets the number of tasks in each mean."]
        if partial:
            lines.append("A cell with [n] is over n tasks only and cannot be compared with the others of its column.")
        if published:
            lines.append("Rows of the paper: Table 4, after 2,000 steps of its contrastive fine-tuning.")
        lines.append("")
    for part, title in (("local", "Local tasks"), ("tasks", "Tasks of MTEB")):
        tasks = {name: entry for model in models.values() for name, entry in model[part].items()}
        if not tasks:
            continue
        lines += [f"## {title}", "", *_header(["Task", "Type", "Metric", *models])]
        for name, entry in sorted(tasks.items(), key=lambda task: (task[1]["type"], task[0])):
            scores = [model[part].get(name) for model in models.values()]
            cells = [name, entry["type"], entry["metric"], *("-" if s is None else f"{s['score']:.2f}" for s in scores)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _header(cells: list[str]) -> list[str]:
    return ["| " + " | ".join(cells) + " |", "|" + " --- |" * len(cells)]


def plot(models: dict, published: dict[str, list[float]], file: Path) -> None:
    """Bars by task type, as Figure 5; of local tasks if there are no others. Means of some tasks only are hatched."""
    bars = {}
    if any(model["tasks"] for model in models.values()):
        groups = [*COLUMNS, "Avg."]
        numbers = [*(number for _, number in COLUMNS.values()), TASKS]
        labels = [*(name for name, _ in COLUMNS.values()), "Avg."]
        bars |= {name: list(zip(row, [True] * len(row))) for name, row in published.items()}
        for name, model in models.items():
            means = [model["types"].get(group, {"mean": 0.0, "tasks": 0}) for group in groups]
            bars[name] = [(mean["mean"], mean["tasks"] == number) for mean, number in zip(means, numbers)]
    else:
        groups = labels = sorted({task for model in models.values() for task in model["local"]})
        for name, model in models.items():
            bars[name] = [(model["local"].get(task, {"score": 0.0})["score"], True) for task in groups]
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes, width = figure.subplots(), 0.85 / len(bars)
    for index, (name, row) in enumerate(bars.items()):
        # Published models pale, one's own dark.
        color = (*colormaps["tab10"](index % 10)[:3], 0.4) if name in published else colormaps["Dark2"](index % 8)
        label = f"{name} (paper)" if name in published else name
        places = [group + (index + 0.5) * width - 0.425 for group in range(len(groups))]
        drawn = axes.bar(places, [score for score, _ in row], width, label=label, color=color)
        for bar, (_, complete) in zip(drawn, row):
            bar.set_hatch(None if complete else "//")
    axes.set_xticks(range(len(groups)), labels)
    axes.set(ylabel="score (%)", title="Means by task type; hatched: not all tasks of the type")
    axes.legend(fontsize="small", ncols=2, loc="upper left", bbox_to_anchor=(1, 1))
    write_png(file, figure)


def write_report(folder: Path, mteb_tasks: set[str], published: dict[str, list[float]]) -> str:
    """Write `report.md`, `report.json` and `report.png` into the folder; returns the Markdown."""
    models = collect(folder, mteb_tasks)
    text = markdown(models, published)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {"models": models, "published": published})
    plot(models, published, folder / "report.png")
    return text
