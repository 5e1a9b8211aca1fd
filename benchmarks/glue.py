"""What pretraining is worth in classification. Rewrites benchmarks/results/glue.md.

    python benchmarks/glue.py --text ../shared/data/text --data ../shared/data/classification_debian_sections

The small model of benchmarks/pretraining.py (pretrained here if it is not there yet), the same from random weights, and
TF-IDF with logistic regression. Interrupted, the same command goes on.
"""

import os
import platform
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset
from pretraining import ROOT, prepare, run, save_random, train
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.report import group_runs
from neobert_hf.evaluation.glue.results import Results
from neobert_hf.evaluation.glue.runs import Hyperparameters
from neobert_hf.evaluation.glue.tasks import load_task, read_tasks
from neobert_hf.training.metrics import ScoreMetric


TASKS = ROOT / "configs" / "glue" / "debian_sections.yaml"
TASK = "debian_sections"
MODELS = ("pretrained", "random")


@dataclass
class BenchmarkArguments:
    text: str = field(metadata={"help": "folder with train.parquet and validation.parquet, to pretrain on"})
    data: str = field(metadata={"help": "folder with train.parquet and validation.parquet of the task"})
    rows: int = field(default=8000, metadata={"help": "of the training split that are used, drawn with seed 0"})
    epochs: int = field(default=5, metadata={"help": "over them"})
    learning_rates: list[float] = field(
        default_factory=lambda: [3e-4, 1e-3], metadata={"help": "tried with each model"}
    )
    seeds: int = field(default=3, metadata={"help": "runs of each model and learning rate"})
    pretraining: str = field(default="runs/pretraining_benchmark", metadata={"help": "of benchmarks/pretraining.py"})
    output_dir: str = field(default="runs/glue_benchmark", metadata={"help": "data, runs and logs"})
    results: str = field(default="benchmarks/results", metadata={"help": "where the report goes"})
    limit: str = field(default="", metadata={"help": "further flags of every fine-tuning, for a trial"})
    pretraining_limit: str = field(default="", metadata={"help": "further flags of pretraining, for a trial"})


def write_subset(settings: BenchmarkArguments, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = Dataset.from_parquet(f"{settings.data}/train.parquet").shuffle(seed=0)
    whole.select(range(min(settings.rows, len(whole)))).to_parquet(folder / "train.parquet")
    Dataset.from_parquet(f"{settings.data}/validation.parquet").to_parquet(folder / "validation.parquet")


def fine_tune(settings: BenchmarkArguments, name: str, model: Path, rows: int) -> dict[Hyperparameters, list[dict]]:
    """All runs of a model, on one core; the best learning rate first."""
    output = Path(settings.output_dir)
    flags = (
        f"--task_config {TASKS} --task {TASK} --data_dir {output}/data --model {model} --name {name} "
        f"--output_dir {output} --max_length 64 --num_train_epochs {settings.epochs} --eval_steps {max(1, rows // 64)} "
        f"--grid true --batch_sizes 32 --learning_rates {' '.join(map(str, settings.learning_rates))} "
        f"--weight_decays 0.01 --seeds {' '.join(map(str, range(settings.seeds)))} --use_cpu true {settings.limit}"
    )
    run("run_glue.py", flags, output / f"{name}.txt", threads=1)
    return group_runs(Results(output / name).best_first(TASK))


def tf_idf(data: Path) -> dict[str, float]:
    """Logistic regression over words and pairs of words, on the same rows."""
    (task,) = read_tasks(str(TASKS)).values()
    splits, began = load_task(task, str(data)), time.monotonic()
    vectorizer = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))
    classifier = make_pipeline(vectorizer, LogisticRegression(C=10, max_iter=1000))
    classifier.fit(splits["train"]["text"][:], splits["train"]["label"][:])
    predictions = classifier.predict(splits["validation"]["text"][:])
    scores = ScoreMetric(task.metrics).compute(predictions=predictions, references=splits["validation"]["label"][:])
    return scores | {"seconds": time.monotonic() - began}


def table(runs: dict[str, dict], baseline: dict[str, float]) -> list[str]:
    rows = []
    for name, groups in runs.items():
        for hyperparameters, group in groups.items():
            cells = [name, f"{hyperparameters.learning_rate:g}"]
            for metric in ("accuracy", "macro_f1"):
                values = [100 * result["metrics"][metric] for result in group]
                deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.1f}{deviation}")
            steps = ", ".join(str(result["best_step"]) for result in group)
            cells.append(f"{steps} of {group[0]['settings']['max_steps']}")
            rows.append([*cells, f"{statistics.mean(result['seconds'] for result in group):.0f}"])
    scores = [f"{100 * baseline[metric]:.1f}" for metric in ("accuracy", "macro_f1")]
    rows.append(["TF-IDF, logistic regression", "-", *scores, "-", f"{baseline['seconds']:.0f}"])
    return markdown_table(["", "learning rate", "accuracy", "macro F1", "best step of", "seconds a run"], rows)


def gain(runs: dict[str, dict]) -> str:
    """Pretrained minus random of the same seeds, each at its best learning rate."""
    best = {name: {run["seed"]: run for run in next(iter(groups.values()))} for name, groups in runs.items()}
    parts = []
    for label, value in (
        ("score (the mean of both metrics)", lambda run: run["score"]),
        ("accuracy", lambda run: run["metrics"]["accuracy"]),
        ("macro F1", lambda run: run["metrics"]["macro_f1"]),
    ):
        differences = [100 * (value(run) - value(best["random"][seed])) for seed, run in best["pretrained"].items()]
        mean, lower, upper = mean_interval(differences)
        parts.append(f"{label} {mean:+.2f} points ({lower:+.2f} to {upper:+.2f})")
    return (
        "Pretrained minus random weights on the same seeds (order of the rows, new head), in brackets a 95% interval "
        f"of the mean by Student's t: {'; '.join(parts)}."
    )


def plot(runs: dict[str, dict], baseline: dict[str, float], file: Path) -> None:
    lines = []
    for number, (name, groups) in enumerate(runs.items()):
        hyperparameters, group = next(iter(groups.items()))
        label = f"{name}, learning rate {hyperparameters.learning_rate:g}"
        for result in group:
            points = [(entry["step"], 100 * entry["accuracy"]) for entry in result["evaluations"]]
            lines.append(Line(points, label, {"marker": "o", "color": f"C{number}"}))
            label = None  # once for all seeds
    steps = [step for line in lines for step, _ in line.points]
    level = [(step, 100 * baseline["accuracy"]) for step in (min(steps), max(steps))]
    lines.append(Line(level, "TF-IDF, logistic regression", {"color": "gray", "linestyle": "--"}))
    labels = {"xlabel": "step", "ylabel": "accuracy (%)", "title": "Validation accuracy, one line a seed"}
    plot_lines(file, [Panel(lines, labels)])


def report(settings: BenchmarkArguments, rows: dict[str, int], runs: dict[str, dict], baseline: dict) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "datasets", "scikit-learn"))
    sections = (
        "# Classification with a small NeoBERT",
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), float32, two runs at a time of one core each; "
        f"Python {platform.python_version()}, {versions}. Not measured on GPU, and not on GLUE itself, which is on the "
        "Hub as the published model is: this machine does not reach it.",
        f"Command: `python benchmarks/glue.py {shlex.join(sys.argv[1:])}`, which runs "
        f"`examples/run_glue.py --task_config configs/glue/{TASKS.name} --task {TASK}` for the two models.",
        f"One-line descriptions of software to the section of the Debian archive that it is in (41 classes): "
        f"{rows['train']:,} rows to train on, {rows['validation']:,} to evaluate on, {settings.epochs} epochs in "
        "batches of 32 with 6% warm-up. As in GLUE's protocol the score is that of the best evaluation, of which there "
        "are two an epoch. The model is that of `configs/pretrain/small.yaml`, pretrained as in "
        "[pretraining.md](pretraining.md), and the same from random weights; nothing of the baseline is tuned. Mean ± "
        f"standard deviation over {settings.seeds} seeds, in percent:",
        "\n".join(table(runs, baseline)),
        gain(runs),
        "![accuracy](glue.png)",
    )
    return "\n\n".join(sections) + "\n"


def main() -> None:
    (settings,) = parse_config(BenchmarkArguments)
    output, pretraining, results = (
        Path(path) for path in (settings.output_dir, settings.pretraining, settings.results)
    )
    # 1. Data and models
    write_subset(settings, output / "data" / TASK)
    if not (pretraining / "stage_1" / "log.json").exists():
        prepare(Path(settings.text), pretraining / "data")
        data = f"--train_data {pretraining}/data/train --validation_data {pretraining}/data/validation"
        train(pretraining, "small.yaml", "stage_1", f"{data} {settings.pretraining_limit}", 2)
    models = {"pretrained": pretraining / "stage_1" / "model", "random": output / "random_weights"}
    save_random(models["pretrained"], models["random"])

    # 2. Fine-tuning of both side by side, and the baseline
    (task,) = read_tasks(str(TASKS)).values()
    rows = {split: len(part) for split, part in load_task(task, str(output / "data")).items()}
    with ThreadPoolExecutor(2) as executor:
        groups = executor.map(lambda name: fine_tune(settings, name, models[name], rows["train"]), MODELS)
        runs = dict(zip(MODELS, groups))
    baseline = tf_idf(output / "data")

    # 3. Report
    plot(runs, baseline, results / "glue.png")
    plain = {name: [result for group in groups.values() for result in group] for name, groups in runs.items()}
    write_json(results / "glue.json", {"runs": plain, "tf_idf": baseline, "rows": rows})
    write_text(results / "glue.md", report(settings, rows, runs, baseline))


if __name__ == "__main__":
    main()
