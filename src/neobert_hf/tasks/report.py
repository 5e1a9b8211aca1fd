"""The report on a task of your own, and the card of its model."""

from itertools import chain
from pathlib import Path

from datasets import DatasetDict
from huggingface_hub import EvalResult, ModelCardData

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.paths import name_of_model
from neobert_hf.common.recipe import Result
from neobert_hf.common.report import markdown_table
from neobert_hf.data.sources import name_of
from neobert_hf.tasks.rows import is_local
from neobert_hf.tasks.task import OwnTask, TaskSettings
from neobert_hf.training.fine_tuning import FineTuningTrainer


def write_report(task: OwnTask, settings: TaskSettings, trainer: FineTuningTrainer, inputs: DatasetDict) -> Result:
    """Score the trained model and the baseline on all held-out rows, save the model, and write what was found.

    Args:
        trainer: with the weights of the best evaluation.
        inputs: what `build_trainer` returned.
    """
    folder, scores, baselines, details = trainer.run.folder, {}, {}, []
    trainer.compute_metrics = None
    for split, rows in [(split, rows) for split, rows in task.tables.items() if split != "train"]:
        logits = trainer.predict(inputs[split]).predictions
        found = task.predict(rows, inputs[split], logits)
        scores[split] = task.metrics(rows, found)
        baselines[split] = task.metrics(rows, task.baseline(rows))
        details += ["", f"## {split.capitalize()}", ""]
        if report := task.label_report(rows, found):
            details += ["```", report.rstrip(), "```", ""]
        details += worst_rows(rows["place"][:], task.errors(rows, found, logits))
    evaluations, best = trainer.evaluations(), trainer.state.best_global_step
    table, data = score_table(task, scores, baselines), name_of(settings.data)
    introduction = (
        f"{settings.model} on {data}: {len(task.tables['train']):,} training rows; the best of "
        f"{len(evaluations)} evaluations, at step {best:,}. {'Metrics in percent; the' if task.in_percent else 'The'} "
        "step was chosen on validation, so the metrics on validation are a little too good."
    )
    text = "\n".join([f"# {task.title}", "", introduction, "", *table, *details, ""])

    task.finish(trainer.model)
    trainer.save_whole(folder / "model")
    write_text(folder / "model" / "README.md", model_card(task, settings, trainer, scores, table))
    content = {"scores": scores, "baselines": baselines, "evaluations": evaluations, "best_step": best}
    write_json(folder / "report.json", content | {"identity": trainer.run.identity})
    write_text(folder / "report.md", text)
    print("\n".join(["", *table, "", *ending(trainer), f"{folder / 'report.md'} has the worst errors."]), flush=True)
    return Result(folder / "model", scores, baseline=baselines)


def ending(trainer: FineTuningTrainer) -> list[str]:
    """Where the model is, and of which step it is."""
    state, patience = trainer.state, trainer.args.early_stopping_patience
    stopped = f"all {state.max_steps:,} steps were trained"
    if state.global_step < state.max_steps:
        stopped = f"training stopped early at step {state.global_step:,} of {state.max_steps:,}, since {patience} "
        stopped += "evaluations had brought no better score"
    model = trainer.run.folder / "model"
    return [f"The model is in {model}, with the weights of step {state.best_global_step:,}; {stopped}."]


def score_table(task: OwnTask, scores: dict[str, dict], baselines: dict[str, dict]) -> list[str]:
    """The scores of model and baseline on each split, as Markdown."""
    # Some splits have more metrics: F1 of questions with and without an answer exists only if a split has both.
    names = list(dict.fromkeys(chain(*scores.values())))
    rows = []
    for split, found in scores.items():
        for who, values in (("fine-tuned", found), (task.baseline_name, baselines[split])):
            shown = {
                name: f"{100 * value:.2f}" if task.in_percent else f"{value:.4g}" for name, value in values.items()
            }
            cells = [shown.get(name, "-") for name in names]
            rows.append([split, f"{len(task.tables[split]):,}", who, *cells])
    return markdown_table(["Split", "Rows", "Model", *names], rows)


def worst_rows(places: list[str], errors: list[tuple[float, str, str, str]]) -> list[str]:
    """The ten rows with the largest errors, as Markdown.

    Args:
        places: file and number of each row.
        errors: what `Task.errors` returns.
    """
    wrong = sorted((row for row in zip(places, errors) if row[1][0] > 0), key=lambda row: -row[1][0])
    if not wrong:
        return ["No row is wrong."]
    rows = []
    for place, (_, *cells) in wrong[:10]:
        rows.append([Path(place).name, *(" ".join(cell.split())[:160].replace("|", "\\|") for cell in cells)])
    table = markdown_table(["Row", "Right", "Found", "Text"], rows)
    return [f"The {len(rows)} worst of {len(wrong):,} errors:", "", *table]


def model_card(
    task: OwnTask, settings: TaskSettings, trainer: FineTuningTrainer, scores: dict[str, dict], table: list[str]
) -> str:
    """The card that the Hub shows, and from which `neobert-hf publish` reads the results.

    It may be published, so it names no path of this machine.
    """
    data = Path(name_of(settings.data)).name if is_local(settings.data) else settings.data
    base = name_of_model(None, settings.model) if is_local(settings.model) else settings.model
    results = [
        EvalResult(task.kind, data, data, metric, value, dataset_split=split)
        for split, values in scores.items()
        for metric, value in values.items()
    ]
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=task.kind,
        model_name=data,
        base_model=None if is_local(settings.model) else base,
        datasets=None if is_local(settings.data) else [data],
        eval_results=results,
        tags=["neobert_hf"],
    )
    code = ", trust_remote_code=True" if getattr(trainer.model.config, "auto_map", None) else ""
    step = f"{trainer.state.best_global_step:,}"
    purpose = (
        f"{task.purpose()} It is `{base}`, fine-tuned on {len(task.tables['train']):,} rows of {data}. The validation "
        f"rows chose its weights, those of step {step}, so their metrics are a little too good."
    )
    licence = f"None is named yet: write `license: ...` at the top. Those of `{base}` and of the data limit the choice."
    program = ["```python", *task.example(f'"path or id of this model"{code}'), "```"]
    lines = ["---", metadata.to_yaml(), "---", "", f"# {task.title}", "", purpose, "", *program, ""]
    return "\n".join([*lines, "## Scores", "", *table, "", "## Licence", "", licence, ""])
