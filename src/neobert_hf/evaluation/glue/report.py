"""The report of GLUE results: Table 3 or Figure 1 of the paper with your own models."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.common.files import write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import read_entry, read_yaml
from neobert_hf.evaluation.glue.trials import read_results


# Results of trials, by model and task.
Results = dict[str, dict[str, list[dict]]]


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
    return read_entry(Published, file, read_yaml(file, "published"))


def best_trials(results: list[dict]) -> list[dict]:
    """The runs, one for each seed, with the hyperparameters that have the best mean score.

    Hyperparameters with which a run got no score are left out. Empty if this leaves none.
    """
    groups = defaultdict(list)
    for result in results:
        groups[result["hyperparameters"]].append(result)
    scored = [runs for runs in groups.values() if all(run["score"] is not None for run in runs)]
    return max(scored, key=mean_score, default=[])


def mean_score(runs: list[dict]) -> float:
    """The mean over runs in percent."""
    return statistics.mean(100 * run["score"] for run in runs)


def score_cell(runs: list[dict]) -> str:
    if not runs:
        return "-"
    deviation = f" ± {statistics.stdev(100 * run['score'] for run in runs):.1f}" if len(runs) > 1 else ""
    return f"{mean_score(runs):.1f}{deviation}"


def published_table(best: Results, published: Published) -> list[str]:
    """The paper's rows, then your models, on the tasks for which your models have scores; empty if there are none."""
    columns = [task for task in published.columns if any(tasks.get(task) for tasks in best.values())]
    if not columns:
        return []
    rows = []
    for model, row in published.rows.items():
        scores = [score for task, score in zip(published.columns, row) if task in columns]
        # The paper's average is rounded from scores with more digits.
        average = row[-1] if len(columns) == len(published.columns) else statistics.mean(scores)
        rows.append([f"{model} (paper)", *(f"{score:.1f}" for score in (*scores, average))])
    for model, tasks in best.items():
        found = [tasks.get(task, []) for task in columns]
        average = f"{statistics.mean(map(mean_score, found)):.1f}" if all(found) else "-"
        rows.append([f"**{model}**", *map(score_cell, found), average])
    return [
        *markdown_table(["Model", *(published.columns[task] for task in columns), "Avg."], rows),
        "",
        "Scores on the development set in percent; ± is the standard deviation over seeds. If a task has two metrics, "
        "or two sets (MNLI), the score is their mean. Averages are over the tasks shown.",
        "",
    ]


def gains_table(best: Results, published: Published) -> list[str]:
    """By how many percent the average of each of your models differs from that of another; empty if there are none."""
    rows = []
    for model, entry in published.gains.items():
        before, after = best.get(entry["over"], {}), best.get(model, {})
        if common := [task for task in published.columns if before.get(task) and after.get(task)]:
            old, new = (statistics.mean(mean_score(tasks[task]) for task in common) for tasks in (before, after))
            paper = f"{entry['percent']:+.1f}%" if "percent" in entry else "-"
            rows.append([f"**{model}** over {entry['over']}", f"{100 * (new / old - 1):+.1f}%", paper, len(common)])
    note = ["", "Gains are in percent of the average score of the other model, over the tasks that both have.", ""]
    return [*markdown_table(["Gain", "Yours", "Paper", "Tasks"], rows), *note] if rows else []


def details_row(model: str, task: str, results: list[dict]) -> list[str]:
    """Score, metrics and hyperparameters of a model on a task, and how many runs these are of."""
    best = best_trials(results)
    diverged = sum(result["diverged"] is not None for result in results)
    runs = f"{len(best)} of {len(results)}" + (f", {diverged} diverged" if diverged else "")
    if not best:
        return [model, task, "failed", "-", "-", runs]
    means = {name: 100 * statistics.mean(run["metrics"][name] for run in best) for name in best[0]["metrics"]}
    metrics = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    return [model, task, score_cell(best), metrics, best[0]["hyperparameters"], runs]


def write_report(folder: Path, published: Published | None) -> str:
    """Write `report.md` on all models in a folder; returns the Markdown."""
    models: Results = defaultdict(lambda: defaultdict(list))
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        for result in read_results(model).values():
            models[model.name][result["task"]].append(result)
    lines = ["# GLUE", ""]
    if published is not None:
        best = {model: {task: best_trials(runs) for task, runs in tasks.items()} for model, tasks in models.items()}
        lines += published_table(best, published) + gains_table(best, published)
    head = ["Model", "Task", "Score", "Metrics", "Hyperparameters", "Runs"]
    rows = [details_row(model, task, runs) for model, tasks in models.items() for task, runs in tasks.items()]
    text = "\n".join([*lines, *markdown_table(head, rows), ""])
    write_text(folder / "report.md", text)
    return text
