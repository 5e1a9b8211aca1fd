"""What the recipes for your own tasks share: settings, training, the report and the model card."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from huggingface_hub import EvalResult, ModelCardData
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, set_seed

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result
from neobert_hf.common.report import markdown_table
from neobert_hf.common.tokenizers import length_to_cut_at
from neobert_hf.data.sources import name_of
from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer, load_for_task
from neobert_hf.training.run import Run, check_alone


@dataclass
class TaskSettings:
    """Which model is trained, and on which rows."""

    model: str = field(metadata={"help": "an encoder: path or Hub id", "path": "or Hub id"})
    data: str = field(
        metadata={
            "help": "a Hub dataset, a folder with train.*, validation.* and test.*, or the training file",
            "path": "or Hub id",
        }
    )
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    validation_data: str | None = field(
        default=None, metadata={"help": "validation file, in place of that split of `data`", "path": True}
    )
    test_data: str | None = field(
        default=None, metadata={"help": "test file, in place of that split of `data`", "path": True}
    )
    validation_share: float = field(
        default=0.1, metadata={"help": "share of the training rows to hold out if there are no validation rows"}
    )
    score_test: bool = field(default=True, metadata={"help": "score the best model on the test split, if there is one"})
    max_length: int = field(default=512, metadata={"help": "most tokens of an input"})
    classifier_dropout: float = field(default=0.1, metadata={"help": "dropout before the head"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        if not 0 < self.validation_share < 1:
            raise ValueError(f"`validation_share` is {self.validation_share}; it is a share above 0 and below 1.")


class Task(ABC):
    """A kind of task, with its checked rows. What is not said here is in one of the three subclasses.

    Attributes:
        kind: the Hub's name of the task.
        auto_class: the Auto class of the model.
        tables: the checked rows of every split; see `parse_splits`.
        encoded: the model's inputs of every split, which `encode` sets.
        labels: names of the model's outputs; None if the head has two outputs of its own.
        problem, pooling: `problem_type` and `classifier_pooling` of Transformers, for text classifiers.
        reduce_logits: reduces the logits that an evaluation keeps.
        collator_class: makes a batch of the inputs.
        baseline_name: what `baseline` is.
    """

    kind: str
    auto_class: Any
    tables: DatasetDict
    encoded: DatasetDict
    labels: list[str] | None = None
    problem: str | None = None
    pooling: str | None = None
    reduce_logits: Any = None
    collator_class: Any = DataCollatorWithPadding
    baseline_name: str

    @abstractmethod
    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        """Tokenise every split into `encoded`."""

    @abstractmethod
    def predict(self, split: str, logits: Any) -> Any:
        """What the model found for each row of a split: classes, tags or an answer."""

    @abstractmethod
    def baseline(self, split: str) -> Any:
        """What a simple method found that learned from the same rows, in the form of `predict`."""

    @abstractmethod
    def metrics(self, split: str, found: Any) -> dict[str, float]:
        """The metrics of what was found for a split, the one by which the best checkpoint is chosen first."""

    def label_report(self, split: str, found: Any) -> str:
        """Precision and recall of each label, as a library prints them; empty if there are no labels."""
        return ""

    @abstractmethod
    def errors(self, split: str, found: Any, logits: Any) -> list[tuple[float, str, str, str]]:
        """How wrong each row is, 0 if it is right; what is right, what the model found, and the text."""


def train_on_task(
    make_task: Callable[[], Task], recipe: str, settings: TaskSettings, arguments: FineTuningArguments
) -> Result:
    """The steps that all recipes of tasks share.

    Args:
        make_task: reads the rows of all splits, and checks them.
        recipe: its name.
    """
    check_alone(arguments)
    inputs = {name: getattr(settings, name) for name in ("model", "data", "validation_data", "test_data")}
    # `max_steps` follows from the rows, and `max_length` from the model.
    leave_out = ("subset", "score_test", "max_steps", "max_length")
    folder = {"inputs": inputs, "writes": ("report.md", "report.json"), "leave_out": leave_out}
    with Run.start(recipe, arguments, settings, **folder) as run:
        check_model_exists(settings.model, "model")

        # 1. The rows of all splits, checked
        task = make_task()

        # 2. Training to the end; `model/` has the weights of the best evaluation
        trainer = fine_tune(task, settings, arguments, run)

        # 3. Scores on all held-out rows beside those of a baseline, and the model card
        return write_report(task, settings, trainer)


def fine_tune(task: Task, settings: TaskSettings, arguments: FineTuningArguments, run: Run) -> FineTuningTrainer:
    """Train to the end, from the run's checkpoint if there is one, and write the best model to `model/`.

    Returns:
        The trainer, with the weights of the best evaluation.
    """
    set_seed(arguments.seed)
    model, tokenizer = load_for_task(
        settings.model,
        task.auto_class,
        task.labels,
        task.problem,
        settings.classifier_dropout,
        task.pooling,
        trust_remote_code=settings.trust_remote_code,
    )
    length = length_to_cut_at(model, tokenizer, settings.max_length)
    task.encode(tokenizer, length)

    arguments = arguments.planned(len(task.encoded["train"]))
    run.identify(
        model=model_fingerprint(settings.model),
        max_length=length,
        labels=task.labels,
        max_steps=arguments.max_steps,
        eval_steps=arguments.eval_steps,
        early_stopping_patience=arguments.early_stopping_patience,
        data={split: fingerprint(task.tables[split].remove_columns("place")) for split in ("train", "validation")},
    )

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        scores = task.metrics("validation", task.predict("validation", evaluated.predictions))
        return scores | {"score": next(iter(scores.values()))}

    trainer = FineTuningTrainer(
        model,
        arguments,
        run=run,
        train_dataset=task.encoded["train"],
        eval_dataset=task.encoded["validation"],
        data_collator=task.collator_class(tokenizer),
        processing_class=tokenizer,
        preprocess_logits_for_metrics=task.reduce_logits,
        compute_metrics=compute_metrics,
    )
    print(
        f"{', '.join(f'{len(rows):,} {split}' for split, rows in task.tables.items())} rows; "
        f"{arguments.max_steps:,} steps on {arguments.device}, evaluated every {arguments.eval_steps} steps; "
        f"{f'resuming from {run.checkpoint}' if run.checkpoint else f'starting from {settings.model}'}",
        flush=True,
    )
    trainer.train_to_the_end()
    trainer.save_best(run.folder / "model")
    return trainer


def write_report(task: Task, settings: TaskSettings, trainer: FineTuningTrainer) -> Result:
    """Score the best model and the baseline on all held-out rows; write `report.md`, `report.json` and the card."""
    folder, scores, baselines, details = trainer.run.folder, {}, {}, []
    trainer.compute_metrics = None
    for split in [split for split in task.tables if split != "train"]:
        logits = trainer.predict(task.encoded[split]).predictions
        found = task.predict(split, logits)
        scores[split] = task.metrics(split, found)
        baselines[split] = task.metrics(split, task.baseline(split))
        details += ["", f"## {split.capitalize()}", ""]
        if report := task.label_report(split, found):
            details += ["```", report.rstrip(), "```", ""]
        details += worst_rows(task.tables[split]["place"][:], task.errors(split, found, logits))
    evaluations, best = trainer.evaluations(), trainer.state.best_global_step
    table, data = score_table(task, scores, baselines), name_of(settings.data)
    introduction = (
        f"{settings.model} on {data}: {len(task.tables['train']):,} training rows; the best of "
        f"{len(evaluations)} evaluations, at step {best:,}. Metrics in percent; the step was chosen on validation, so "
        "the metrics on validation are a little too good."
    )
    text = "\n".join([f"# {task.kind}", "", introduction, "", *table, *details, ""])
    content = {"scores": scores, "baselines": baselines, "evaluations": evaluations, "best_step": best}
    write_json(folder / "report.json", content | {"settings": trainer.run.identity})
    write_text(folder / "report.md", text)
    # The card may be published, so it names no path of this machine.
    write_text(folder / "model" / "README.md", model_card(task.kind, Path(data).name, scores, table))
    print("\n".join(["", *table, "", f"{folder / 'model'}; {folder / 'report.md'} has the worst errors"]), flush=True)
    return Result(folder / "model", scores, baseline=baselines)


def score_table(task: Task, scores: dict[str, dict], baselines: dict[str, dict]) -> list[str]:
    """The scores of model and baseline on each split, as Markdown."""
    # Some splits have more metrics: F1 of questions with and without an answer exists only if a split has both.
    names = list(dict.fromkeys(chain(*scores.values())))
    rows = []
    for split, found in scores.items():
        for who, values in (("fine-tuned", found), (task.baseline_name, baselines[split])):
            cells = [f"{100 * values[name]:.2f}" if name in values else "-" for name in names]
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


def model_card(kind: str, data: str, scores: dict[str, dict[str, float]], table: list[str]) -> str:
    """The card that the Hub shows, and from which `neobert-hf publish` reads the results."""
    results = [
        EvalResult(kind, data, data, metric, value, dataset_split=split)
        for split, values in scores.items()
        for metric, value in values.items()
    ]
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag=kind, model_name=data, eval_results=results, tags=["neobert_hf"]
    )
    return "\n".join(["---", metadata.to_yaml(), "---", "", f"# {kind}", "", *table, ""])
