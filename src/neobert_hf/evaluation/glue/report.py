"""The report of GLUE results: Table 3 or Figure 1 of the paper with your own models, and scores by learning rate."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.common.results import note_on_data
from neobert_hf.common.settings import read_yaml
from neobert_hf.evaluation.glue.results import Results
from neobert_hf.evaluation.glue.runs import Hyperparameters


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
    table = Published(**read_yaml(file))
    for model, row in table.rows.items():
        if len(row) != len(table.columns) + 1:
            raise ValueError(f"{file}: {model} has {len(row)} numbers; there are {len(table.columns)} tasks and Avg.")
    return table


def group_runs(results: list[dict]) -> dict[Hyperparameters, list[dict]]:
    """The runs with the same hyperparameters, one for each seed; the best mean first."""
    groups = defaultdict(list)
    for result in results:
        groups[Hyperparameters(**result["hyperparameters"])].append(result)
    return dict(sorted(groups.items(), key=lambda group: -mean_score(group[1])))


def mean_score(runs: list[dict]) -> float:
    """The mean score of runs, in percent."""
    return 100 * statistics.mean(run["score"] for run in runs)


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def summarize(results: list[dict]) -> dict:
    """The best hyperparameters of a task by their mean over seeds, and their scores in percent.

    Returns:
        `score`, the mean over seeds; `std`, its standard deviation, None for one seed; `seeds`; the mean of each of
        `metrics`; `hyperparameters`; how many `runs` there were, and how many hyperparameters were `searched`;
        the fingerprints of the `data`.
    """
    groups = group_runs(results)
    best, runs = next(iter(groups.items()))
    metrics = {name: 100 * statistics.mean(run["metrics"][name] for run in runs) for name in runs[0]["metrics"]}
    return {
        "score": mean_score(runs),
        "std": statistics.stdev(100 * run["score"] for run in runs) if len(runs) > 1 else None,
        "seeds": len(runs),
        "metrics": metrics,
        "hyperparameters": str(best),
        "runs": len(results),
        "searched": len(groups),
        "data": results[0]["settings"].get("data"),
    }


def collect(folder: Path) -> tuple[dict[str, dict], list[str]]:
    """Read the results of all models in a folder.

    Returns:
        What `summarize` returns, by model and task, and the runs without a score as `model/task/run`.
    """
    models = defaultdict(dict)
    diverged = []
    for model in subfolders(folder):
        for task in subfolders(model):
            results = Results(model).of_task(task.name)
            if scored := [result for result in results if result["score"] is not None]:
                # If some seeds of a setting diverged, the mean of the others would be too good.
                failed = [result["hyperparameters"] for result in results if result["score"] is None]
                safe = [result for result in scored if result["hyperparameters"] not in failed]
                models[model.name][task.name] = summarize(safe or scored)
            diverged += [f"{model.name}/{result['run']}" for result in results if result["score"] is None]
    return dict(models), diverged


def score_cell(summary: dict | None) -> str:
    if summary is None:
        return "-"
    return f"{summary['score']:.1f}" + ("" if summary["std"] is None else f" ± {summary['std']:.1f}")


def published_table(models: dict[str, dict], published: Published) -> list[str]:
    """The paper's rows, then your models, on the tasks for which your models have scores; empty if there are none."""
    places = [place for place, task in enumerate(published.columns) if any(task in tasks for tasks in models.values())]
    if not places:
        return []
    columns = {task: heading for place, (task, heading) in enumerate(published.columns.items()) if place in places}
    rows = []
    for model, row in published.rows.items():
        scores = [row[place] for place in places]
        # The paper's average is rounded from scores with more digits.
        average = row[-1] if len(columns) == len(published.columns) else statistics.mean(scores)
        rows.append([f"{model} (paper)", *(f"{score:.1f}" for score in (*scores, average))])
    for model, tasks in models.items():
        if scores := [tasks[task]["score"] for task in columns if task in tasks]:
            number = "" if len(scores) == len(columns) else f" [{len(scores)}]"
            cells = [score_cell(tasks.get(task)) for task in columns]
            rows.append([f"**{model}**", *cells, f"{statistics.mean(scores):.1f}{number}"])
    return markdown_table(["Model", *columns.values(), "Avg."], rows)


def gains_table(models: dict[str, dict], published: Published) -> list[str]:
    """By how many percent the average of each of your models differs from that of another; empty if there are none.

    Only tasks that both have count; if these are not all, their number stands behind the gain.
    """
    rows = []
    for model, entry in published.gains.items():
        before, after = models.get(entry["over"], {}), models.get(model, {})
        if common := [task for task in published.columns if task in before and task in after]:
            old, new = (statistics.mean(tasks[task]["score"] for task in common) for tasks in (before, after))
            number = "" if len(common) == len(published.columns) else f" [{len(common)}]"
            paper = f"{entry['percent']:+.1f}%" if "percent" in entry else "-"
            rows.append([f"**{model}** over {entry['over']}", f"{100 * (new / old - 1):+.1f}%{number}", paper])
    return markdown_table(["Gain", "Yours", "Paper"], rows) if rows else []


def details_table(models: dict[str, dict]) -> list[str]:
    """Every model on every task, with its metrics and hyperparameters."""
    rows = []
    for model, tasks in models.items():
        for task, summary in tasks.items():
            metrics = ", ".join(f"{name} {value:.2f}" for name, value in summary["metrics"].items())
            runs = f"{summary['seeds']} of {summary['runs']}"
            rows.append([model, task, score_cell(summary), metrics, summary["hyperparameters"], runs])
    return markdown_table(["Model", "Task", "Score", "Metrics", "Hyperparameters", "Runs"], rows)


def markdown(models: dict[str, dict], diverged: list[str], published: Published | None) -> str:
    lines = ["# GLUE", ""]
    if published is not None and (table := published_table(models, published)):
        lines += table
        lines += [
            "",
            "Scores on the development set in percent; ± is the standard deviation over seeds. If a task has two "
            "metrics, or two sets (MNLI), the score is their mean. Averages are over the tasks shown. An average with "
            "[n] is over n of them and cannot be compared with the others.",
            "",
        ]
    if published is not None and (table := gains_table(models, published)):
        lines += [*table, "", "Gains are relative: in percent of the average score of the other model.", ""]
    lines += [*details_table(models), ""]
    lines += note_on_data([(task, entry["data"]) for tasks in models.values() for task, entry in tasks.items()])
    if diverged:
        lines += [f"Diverged, and not part of any mean: {', '.join(diverged)}.", ""]
    return "\n".join(lines)


def learning_rate_panel(task: str, results: list[dict]) -> Panel:
    """Scores by learning rate (means over seeds), a line for each batch size and weight decay."""
    points = defaultdict(list)
    for hyperparameters, runs in group_runs(results).items():
        line = (hyperparameters.batch_size, hyperparameters.weight_decay)
        points[line].append((hyperparameters.learning_rate, mean_score(runs)))
    batch_sizes = sorted({batch_size for batch_size, _ in points})
    decays = sorted({decay for _, decay in points})
    lines = []
    for batch_size, decay in sorted(points):
        # A color for each batch size, a dash for each weight decay.
        dash = ("-", "--", ":")[decays.index(decay) % 3]
        style = {"marker": "o", "color": f"C{batch_sizes.index(batch_size)}", "linestyle": dash}
        lines.append(Line(sorted(points[batch_size, decay]), f"batch {batch_size}, decay {decay:g}", style))
    labels = {"title": task, "xlabel": "learning rate", "ylabel": "score (%)", "xscale": "log"}
    return Panel(lines, labels, legend={"fontsize": "xx-small"})


def write_report(folder: Path, model: str, published: Published | None) -> str:
    """Write `report.md` and `report.json` on all models in a folder, and `learning_rates.png` of this model.

    Returns:
        The Markdown.
    """
    models, diverged = collect(folder)
    text = markdown(models, diverged, published)
    write_text(folder / "report.md", text)
    rows = published.rows if published else {}
    write_json(folder / "report.json", {"models": models, "diverged": diverged, "published": rows})
    if model in models:
        results = Results(folder / model)
        panels = [learning_rate_panel(task, results.best_first(task)) for task in models[model]]
        plot_lines(folder / model / "learning_rates.png", panels, columns=3)
    return text
