"""The report of GLUE results: Table 3 of the paper with one's own models, and scores against the learning rate."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.evaluation.glue.runs import Hyperparameters, Results


@dataclass
class Published:
    """A table of published rows.

    Args:
        columns: headings by task, in order.
        rows: scores of each model in percent, and their average.
    """

    columns: dict[str, str]
    rows: dict[str, list[float]]


def read_published(file: str) -> Published:
    """Read a file such as `configs/glue/table3.yaml`.

    Raises:
        ValueError: if a row has another length.
    """
    table = Published(**yaml.safe_load(Path(file).read_text(encoding="utf-8")))
    for model, row in table.rows.items():
        if len(row) != len(table.columns) + 1:
            raise ValueError(f"{file}: {model} has {len(row)} numbers; there are {len(table.columns)} tasks and Avg.")
    return table


def group_runs(results: list[dict]) -> dict[Hyperparameters, list[dict]]:
    """The runs with the same hyperparameters, one for each seed; the best mean first."""
    groups = defaultdict(list)
    for result in results:
        groups[Hyperparameters(**result["hyperparameters"])].append(result)
    return dict(sorted(groups.items(), key=lambda group: -_mean(group[1])))


def _mean(runs: list[dict], metric: str | None = None) -> float:
    return 100 * statistics.mean(run["score"] if metric is None else run["metrics"][metric] for run in runs)


def collect(folder: Path) -> dict:
    """Read the results of all models in a folder.

    Returns:
        For each model and task: the best hyperparameters by their mean over seeds, that mean with its standard
        deviation (None of one seed), the mean of each metric, and how many runs and sets there were. In percent.
    """
    models = {}
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        tasks = {}
        for task in sorted(path.name for path in model.iterdir() if path.is_dir()):
            results = Results(model).of_task(task)
            if not results:
                continue
            groups = group_runs(results)
            best, runs = next(iter(groups.items()))
            tasks[task] = {
                "score": _mean(runs),
                "std": statistics.stdev(100 * run["score"] for run in runs) if len(runs) > 1 else None,
                "seeds": len(runs),
                "metrics": {metric: _mean(runs, metric) for metric in runs[0]["metrics"]},
                "hyperparameters": str(best),
                "runs": len(results),
                "searched": len(groups),
            }
        if tasks:
            models[model.name] = tasks
    return models


def collect_diverged(folder: Path) -> list[str]:
    """The runs of all models that ended without a score, as `model/task/run`."""
    models = sorted(path for path in folder.iterdir() if path.is_dir())
    return [
        f"{model.name}/{run}"
        for model in models
        for task in sorted(path.name for path in model.iterdir() if path.is_dir())
        for run in Results(model).diverged(task)
    ]


def _cell(entry: dict | None) -> str:
    if entry is None:
        return "-"
    return f"{entry['score']:.1f}" + (f" ± {entry['std']:.1f}" if entry["std"] is not None else "")


def _average(tasks: dict, columns: dict[str, str]) -> str:
    scores = [tasks[task]["score"] for task in columns if task in tasks]
    if not scores:
        return "-"
    return f"{statistics.mean(scores):.1f}" + (f" [{len(scores)}]" if len(scores) < len(columns) else "")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def markdown(models: dict, diverged: list[str], published: Published | None) -> str:
    """Tables: the tasks of the paper next to its rows, then every task with its metrics and hyperparameters."""
    lines = ["# GLUE", ""]
    if published is not None:
        columns = published.columns
        rows = [[f"{model} (paper)", *(f"{score:.1f}" for score in row)] for model, row in published.rows.items()]
        for model, tasks in models.items():
            if tasks.keys() & columns.keys():
                rows.append([f"**{model}**", *(_cell(tasks.get(task)) for task in columns), _average(tasks, columns)])
        lines += _table(["Model", *columns.values(), "Avg."], rows)
        lines += [
            "Scores on the development set in percent; ± the standard deviation over seeds. Of two metrics, and of the "
            "two sets of MNLI, the mean. An average with [n] is over n tasks and cannot be compared with the others.",
            "",
        ]
    details = []
    for model, tasks in models.items():
        for task, entry in tasks.items():
            metrics = ", ".join(f"{name} {value:.2f}" for name, value in entry["metrics"].items())
            runs = f"{entry['seeds']} of {entry['runs']}"
            details.append([model, task, _cell(entry), metrics, entry["hyperparameters"], runs])
    lines += _table(["Model", "Task", "Score", "Metrics", "Hyperparameters", "Runs"], details)
    if diverged:
        lines += [f"Diverged, and in no mean: {', '.join(diverged)}.", ""]
    return "\n".join(lines)


def plot(results: Results, tasks: list[str], file: Path) -> None:
    """Score against learning rate, for each task and each batch size and weight decay; means over seeds."""
    figure = Figure(figsize=(4.5 * min(3, len(tasks)), 3.5 * -(-len(tasks) // 3)), layout="constrained")
    for axes, task in zip(figure.subplots(-(-len(tasks) // 3), min(3, len(tasks)), squeeze=False).flat, tasks):
        lines = defaultdict(list)
        for point, runs in group_runs(results.of_task(task)).items():
            lines[point.batch_size, point.weight_decay].append((point.learning_rate, _mean(runs)))
        batch_sizes = sorted({batch_size for batch_size, _ in lines})
        decays = sorted({decay for _, decay in lines})
        for (batch_size, decay), points in sorted(lines.items()):
            style = {"color": f"C{batch_sizes.index(batch_size)}", "ls": ("-", "--", ":")[decays.index(decay) % 3]}
            axes.plot(*zip(*sorted(points)), marker="o", ms=3, label=f"batch {batch_size}, decay {decay:g}", **style)
        axes.set(title=task, xlabel="learning rate", ylabel="score (%)", xscale="log")
        axes.legend(fontsize="xx-small")
    write_png(file, figure)


def write_report(folder: Path, model: str, published: Published | None) -> str:
    """Write `report.md` and `report.json` on all models into the folder, and `learning_rates.png` into that of one.

    Args:
        folder: `output_dir`, with a folder for each model.
        model: the folder whose plot is drawn.
        published: rows of the paper; none if None.

    Returns:
        The Markdown.
    """
    models, diverged = collect(folder), collect_diverged(folder)
    text = markdown(models, diverged, published)
    write_text(folder / "report.md", text)
    write_json(
        folder / "report.json",
        {"models": models, "diverged": diverged, "published": published.rows if published else {}},
    )
    if model in models:
        plot(Results(folder / model), list(models[model]), folder / model / "learning_rates.png")
    return text
