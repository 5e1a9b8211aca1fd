"""Fine-tuning on one GLUE task as in the paper: its hyperparameters, its tokenised rows, its score."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from datasets import DatasetDict, concatenate_datasets
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from neobert_hf.evaluation.glue.runs import Run
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer
from neobert_hf.training.metrics import ScoreMetric


@dataclass
class GlueArguments(FineTuningArguments):
    """Batch size, learning rate and weight decay come from `hyperparameters` or the grid, unless given here."""

    per_device_train_batch_size: int | None = field(default=None, metadata={"help": "instead of the task's value"})
    learning_rate: float | None = field(default=None, metadata={"help": "peak; instead of the task's value"})
    weight_decay: float | None = field(default=None, metadata={"help": "instead of the task's value"})

    def for_run(self, run: Run, folder: Path, rows: int) -> "GlueArguments":
        """The arguments of one run with `rows` training rows: its hyperparameters, steps, evaluations, checkpoints."""
        arguments = replace(
            self,
            output_dir=str(folder),
            per_device_train_batch_size=run.hyperparameters.batch_size,
            learning_rate=run.hyperparameters.learning_rate,
            weight_decay=run.hyperparameters.weight_decay,
            seed=run.seed,
        )
        return arguments.planned(rows)


@dataclass
class TaskData:
    """A task and the rows of its splits: texts and `label`, or ids and `label` after `tokenize`."""

    task: GlueTask
    splits: DatasetDict

    @property
    def validation_rows(self) -> dict[str, int]:
        return {name: len(self.splits[name]) for name in self.task.validation}

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> "TaskData":
        """Tokenise the texts to at most `max_length` ids; of a pair, the longer text is cut first."""

        def encode(batch: dict[str, list]) -> dict[str, list]:
            return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

        texts = [name for name in self.splits[self.task.train].column_names if name != "label"]
        return TaskData(self.task, self.splits.map(encode, batched=True, remove_columns=texts, desc="tokenizing"))


def score_splits(prediction: EvalPrediction, task: GlueTask, rows: dict[str, int]) -> dict[str, float]:
    """Metrics on each validation split, and their mean as `score`.

    Args:
        prediction: predictions and labels of all splits, one split after the other.
        rows: number of rows of each split.
    """
    logits, labels = prediction.predictions, prediction.label_ids
    # `argmax` would turn NaN into label 0.
    if not np.isfinite(logits).all():
        raise FloatingPointError("The model gives scores that are not finite. Train with a smaller `learning_rate`.")
    predictions = logits.argmax(-1) if task.labels is not None else logits[:, 0]
    metric = ScoreMetric(task.metrics)
    values, start = {}, 0
    for split, number in rows.items():
        part = slice(start, start + number)
        computed = metric.compute(predictions=predictions[part], references=labels[part])
        values |= {name if len(rows) == 1 else f"{split}_{name}": value for name, value in computed.items()}
        start += number
    return values | {"score": sum(values.values()) / len(values)}


class GlueTrainer(FineTuningTrainer):
    """Fine-tuning of a model from `build_classifier` with arguments from `for_run`, on ids."""

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
            settings=settings,
        )
