"""Fine-tuning on one GLUE task as the paper does: length, evaluations, early stopping, the best checkpoint."""

import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from datasets import DatasetDict, concatenate_datasets
from transformers import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
)

from neobert_hf.common.atomic_writes import atomic_folder
from neobert_hf.common.settings import Count, Range
from neobert_hf.evaluation.glue.metric import GlueMetric
from neobert_hf.evaluation.glue.runs import Run
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.arguments import check_fixed, check_inherited
from neobert_hf.training.run_checkpoints import check_content
from neobert_hf.training.trainer import ResumableTrainer


# Settings of Transformers that would undo what this recipe promises, and the only values it runs with.
FIXED = {
    # The Trainer skips what a resumed run has trained on, which makes a resume exact; only row numbers are drawn again.
    "ignore_data_skip": False,
    # Batch sizes are the paper's, in one pass: steps, evaluations and warm-up count batches.
    "gradient_accumulation_steps": 1,
    # It would also leave the last rows out of every evaluation.
    "dataloader_drop_last": False,
    # The best evaluation would be one of fewer.
    "eval_delay": 0,
    "metric_for_best_model": "score",
    "greater_is_better": True,
    # The evaluations without improvement are counted by a callback.
    "restore_callback_states_from_checkpoint": True,
}

# What evaluations of the Trainer also log, by the ends of the names.
TIMINGS = ("runtime", "_per_second", "_preparation_time")


@dataclass
class GlueArguments(TrainingArguments):
    """Transformers' arguments with the defaults of the paper (appendix C) and its code.

    Batch size, learning rate and weight decay are those of `hyperparameters` or of the grid, unless they are given.
    """

    per_device_train_batch_size: int | None = field(default=None, metadata={"help": "instead of the task's"})
    learning_rate: float | None = field(default=None, metadata={"help": "at its peak; instead of the task's"})
    weight_decay: float | None = field(default=None, metadata={"help": "instead of the task's"})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "rows evaluated at a time"})
    num_train_epochs: float = field(default=10, metadata={"help": "over the training split"})
    warmup_steps: float = field(default=0.06, metadata={"help": "optimizer steps, or a share of all if below 1"})
    early_stopping_patience: Count = field(default=15, metadata={"help": "evaluations without a better score"})
    eval_steps: float | None = field(
        default=None, metadata={"help": "steps between evaluations; min(500, a tenth of an epoch) if unset"}
    )
    report_to: str | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    save_total_limit: int | None = field(default=1, metadata={"help": "complete checkpoints kept beside the best"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "fixed"})
    metric_for_best_model: str | None = field(default="score", metadata={"help": "fixed"})
    restore_callback_states_from_checkpoint: bool = field(default=True, metadata={"help": "fixed"})

    def __post_init__(self):
        check_inherited(self)
        super().__post_init__()

    def for_run(self, run: Run, folder: Path, rows: int) -> "GlueArguments":
        """The arguments of one run on so many training rows: its hyperparameters, steps, evaluations, checkpoints."""
        if self.eval_steps is not None and (self.eval_steps not in Range(1, 2**53) or self.eval_steps % 1):
            raise ValueError(f"`eval_steps` is {self.eval_steps}; it must be a whole number of steps, 1 or more.")
        batches = -(-rows // run.hyperparameters.batch_size)
        if self.max_steps < 1 and not 1 <= self.num_train_epochs * batches < 2**53:
            raise ValueError(
                f"`num_train_epochs` is {self.num_train_epochs}; over {batches:,} batches it must make 1 step or more, "
                f"and fewer than {2**53:,}."
            )
        every = int(self.eval_steps or max(1, min(500, batches // 10)))
        arguments = replace(
            self,
            output_dir=str(folder),
            per_device_train_batch_size=run.hyperparameters.batch_size,
            learning_rate=run.hyperparameters.learning_rate,
            weight_decay=run.hyperparameters.weight_decay,
            seed=run.seed,
            max_steps=self.max_steps if self.max_steps > 0 else int(self.num_train_epochs * batches),
            **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "steps"),
            **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), every),
        )
        check_fixed(arguments, FIXED)
        return arguments


@dataclass
class TaskData:
    """A task and the rows of its splits: texts and `label`, or ids and `label` after `tokenize`."""

    task: GlueTask
    splits: DatasetDict

    @property
    def validation_rows(self) -> dict[str, int]:
        return {name: len(self.splits[name]) for name in self.task.validation}

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> "TaskData":
        """At most `max_length` ids of one text, or of a pair of which the longer one is cut first."""

        def encode(batch: dict[str, list]) -> dict[str, list]:
            return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

        texts = [name for name in self.splits[self.task.train].column_names if name != "label"]
        return TaskData(self.task, self.splits.map(encode, batched=True, remove_columns=texts, desc="tokenizing"))


def score_splits(prediction: EvalPrediction, task: GlueTask, rows: dict[str, int]) -> dict[str, float]:
    """Metrics on each validation split, and their mean as `score`.

    Args:
        prediction: of all splits, one after the other.
        rows: of each split.
    """
    logits, labels = prediction.predictions, prediction.label_ids
    # `argmax` would take them for label 0.
    if not np.isfinite(logits).all():
        raise FloatingPointError("The model gives scores that are not finite. Train with a smaller `learning_rate`.")
    predictions = logits.argmax(-1) if task.labels is not None else logits[:, 0]
    metric = GlueMetric(task.metrics)
    values, start = {}, 0
    for split, number in rows.items():
        part = slice(start, start + number)
        computed = metric.compute(predictions=predictions[part], references=labels[part])
        values |= {name if len(rows) == 1 else f"{split}_{name}": value for name, value in computed.items()}
        start += number
    return values | {"score": sum(values.values()) / len(values)}


class EarlyStopping(EarlyStoppingCallback):
    """Without its warning that the best weights are not loaded: `save_best` takes them from their checkpoint."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass


class GlueTrainer(ResumableTrainer):
    """Fine-tuning with early stopping, of a model from `build_classifier` with arguments from `for_run`, on ids."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: GlueArguments,
        data: TaskData,
        tokenizer: PreTrainedTokenizerBase,
        settings: dict,
    ):
        super().__init__(
            model,
            args,
            train_dataset=data.splits[data.task.train],
            eval_dataset=concatenate_datasets([data.splits[name] for name in data.task.validation]),
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=partial(score_splits, task=data.task, rows=data.validation_rows),
            callbacks=[EarlyStopping(args.early_stopping_patience)],
            settings=settings,
        )

    def is_finished(self, checkpoint: Path) -> bool:
        """Also after early stopping: one evaluation more could be a better one."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        without_improvement = state.stateful_callbacks["EarlyStopping"]["attributes"]["early_stopping_patience_counter"]
        return super().is_finished(checkpoint) or without_improvement >= self.args.early_stopping_patience

    def save_best(self, folder: Path) -> None:
        """Make a model of the best checkpoint, for `from_pretrained`."""
        best = Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"
        check_content(best)
        training_files = shutil.ignore_patterns("*.pt", "*.pth", "*.bin", "trainer_state.json", "complete.json")
        with atomic_folder(folder) as partial_folder:
            shutil.copytree(best, partial_folder, ignore=training_files, dirs_exist_ok=True)

    def evaluations(self) -> list[dict]:
        """Step, loss and metrics of each evaluation."""
        return [
            {key.removeprefix("eval_"): value for key, value in entry.items() if not key.endswith(TIMINGS)}
            for entry in self.state.log_history
            if "eval_score" in entry
        ]
