"""The report of GLUE results: Table 3 or Figure 1 of the paper with your own models."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import read_yaml
from neobert_hf.evaluation.glue.recipe import Hyperparameters, read_results
from neobert_hf.evaluation.results import note_on_data


@dataclass
class Published:
    """What the paper reports.

    Args:
        columns: headings by task, in order.
        rows: each model's scores in percent, then their average.
        gains: by model, `over` which other model it gains, and how many `percent` of that one's average, if the paper
            says so.
    """

    columns: dict[str, str]
    rows: dict[str, list[float]]
    gains: dict[str, dict] = field(default_factory=dict)


def read_published(file: str) -> Published:
    """Read a file such as `configs/glue/table3.yaml`."""
    return Published(**read_yaml(file))


def summarize(results: list[dict]) -> dict:
    """The best hyperparameters of a task by their mean over seeds, and their scores in percent.

    Returns:
        `score`, the mean over seeds; `std`, its standard deviation, None for one seed; `seeds`; the mean of each of
        `metrics`; `hyperparameters`; how many `runs` there were; the fingerprints of the `data`.
    """
    groups = defaultdict(list)
    for result in results:
        groups[str(Hyperparameters(**result["hyperparameters"]))].append(result)
    means = {point: statistics.mean(100 * run["score"] for run in runs) for point, runs in groups.items()}
    best = max(means, key=means.get)
    runs = groups[best]
    return {
        "score": means[best],
        "std": statistics.stdev(100 * run["score"] for run in runs) if len(runs) > 1 else None,
        "seeds": len(runs),
        "metrics": {name: 100 * statistics.mean(run["metrics"][name] for run in runs) for name in runs[0]["metrics"]},
        "hyperparameters": best,
        "runs": len(results),
        "data": results[0]["settings"]["data"],
    }


def collect(folder: Path) -> dict[str, dict[str, dict]]:
    """What `summarize` returns, by model and task, of all models in a folder."""
    models = {}
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        by_task = defaultdict(list)
        for result in read_results(model).values():
            by_task[result["task"]].append(result)
        if by_task:
            models[model.name] = {task: summarize(results) for task, results in by_task.items()}
    return models


def score_cell(summary: dict | None) -> str:
    if summary is None:
        return "-"
    return f"{summary['score']:.1f}" + ("" if summary["std"] is None else f" ± {summary['std']:.1f}")


def published_table(models: dict[str, dict], published: Published) -> list[str]:
    """The paper's rows, then your models, on the tasks for which your models have scores; empty if there are none."""
    columns = [task for task in published.columns if any(task in tasks for tasks in models.values())]
    if not columns:
        return []
    rows = []
    for model, row in published.rows.items():
        scores = [score for task, score in zip(published.columns, row) if task in columns]
        # The paper's average is rounded from scores with more digits.
        average = row[-1] if len(columns) == len(published.columns) else statistics.mean(scores)
        rows.append([f"{model} (paper)", *(f"{score:.1f}" for score in (*scores, average))])
    for model, tasks in models.items():
        scores = [tasks[task]["score"] for task in columns if task in tasks]
        average = f"{statistics.mean(scores):.1f}" if len(scores) == len(columns) else "-"
        rows.append([f"**{model}**", *(score_cell(tasks.get(task)) for task in columns), average])
    return [
        *markdown_table(["Model", *(published.columns[task] for task in columns), "Avg."], rows),
        "",
        "Scores on the development set in percent; ± is the standard deviation over seeds. If a task has two metrics, "
        "or two sets (MNLI), the score is their mean. Averages are over the tasks shown.",
        "",
    ]


def gains_table(models: dict[str, dict], published: Published) -> list[str]:
    """By how many percent the average of each of your models differs from that of another; empty if there are none."""
    rows = []
    for model, entry in published.gains.items():
        before, after = models.get(entry["over"], {}), models.get(model, {})
        if common := [task for task in published.columns if task in before and task in after]:
            old, new = (statistics.mean(tasks[task]["score"] for task in common) for tasks in (before, after))
            paper = f"{entry['percent']:+.1f}%" if "percent" in entry else "-"
            rows.append([f"**{model}** over {entry['over']}", f"{100 * (new / old - 1):+.1f}%", paper, len(common)])
    note = ["", "Gains are in percent of the average score of the other model, over the tasks that both have.", ""]
    return [*markdown_table(["Gain", "Yours", "Paper", "Tasks"], rows), *note] if rows else []


def details_table(models: dict[str, dict]) -> list[str]:
    """Every model on every task, with its metrics and hyperparameters."""
    rows = []
    for model, tasks in models.items():
        for task, summary in tasks.items():
            metrics = ", ".join(f"{name} {value:.2f}" for name, value in summary["metrics"].items())
            runs = f"{summary['seeds']} of {summary['runs']}"
            rows.append([model, task, score_cell(summary), metrics, summary["hyperparameters"], runs])
    return [*markdown_table(["Model", "Task", "Score", "Metrics", "Hyperparameters", "Runs"], rows), ""]


def write_report(folder: Path, published: Published | None) -> str:
    """Write `report.md` and `report.json` on all models in a folder; returns the Markdown."""
    models = collect(folder)
    lines = ["# GLUE", ""]
    if published is not None:
        lines += published_table(models, published) + gains_table(models, published)
    lines += details_table(models)
    lines += note_on_data([(task, summary["data"]) for tasks in models.values() for task, summary in tasks.items()])
    text = "\n".join(lines)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {"models": models})
    return text
