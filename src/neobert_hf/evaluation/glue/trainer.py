"""Fine-tuning on one GLUE task as the paper does: model, length, evaluations, early stopping, the best checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict, concatenate_datasets
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
)
from transformers.core_model_loading import revert_weight_conversion

from neobert_hf.common.atomic_writes import atomic_folder
from neobert_hf.evaluation.glue.metric import GlueMetric
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.arguments import check_fixed
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from neobert_hf.training.trainer import ResumableTrainer


# Settings of Transformers that would undo what this recipe promises, and the only values it runs with.
FIXED = {
    # Skipping is what makes a resume exact; only row numbers are drawn again.
    "ignore_data_skip": False,
    # It would hide NaN from the logged loss.
    "logging_nan_inf_filter": False,
    "auto_find_batch_size": False,
    "save_only_model": False,
    # Batch sizes are the paper's, in one pass: steps, evaluations and warm-up count batches.
    "gradient_accumulation_steps": 1,
    # It would leave the best weights in a run that SIGTERM stops.
    "load_best_model_at_end": False,
    "metric_for_best_model": "score",
    "greater_is_better": True,
    # The evaluations without improvement are counted by a callback.
    "restore_callback_states_from_checkpoint": True,
}

# The dropout before the classifier, where models do not call it `classifier_dropout`.
DROPOUTS = {
    "albert": "classifier_dropout_prob",
    "deberta": "cls_dropout",
    "deberta-v2": "cls_dropout",
    "distilbert": "seq_classif_dropout",
}

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
    eval_steps: float | None = field(
        default=None, metadata={"help": "steps between evaluations; min(500, a tenth of an epoch) if unset"}
    )
    report_to: str | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    save_total_limit: int | None = field(default=1, metadata={"help": "complete checkpoints kept beside the best"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "fixed"})
    metric_for_best_model: str | None = field(default="score", metadata={"help": "fixed"})
    restore_callback_states_from_checkpoint: bool = field(default=True, metadata={"help": "fixed"})

    def of_run(self, folder: Path, rows: int, **hyperparameters) -> "GlueArguments":
        """The arguments of one run.

        Args:
            folder: of the run.
            rows: of the training split.
            hyperparameters: `per_device_train_batch_size`, `learning_rate`, `weight_decay`, `seed`.

        Raises:
            ValueError: on settings that this recipe does not run with.
        """
        if self.eval_steps is not None and (self.eval_steps < 1 or self.eval_steps != int(self.eval_steps)):
            raise ValueError(f"`eval_steps` is {self.eval_steps}; it must be a whole number of steps, 1 or more.")
        batches = -(-rows // hyperparameters["per_device_train_batch_size"])
        every = int(self.eval_steps or max(1, min(500, batches // 10)))
        arguments = replace(
            self,
            output_dir=str(folder),
            max_steps=self.max_steps if self.max_steps > 0 else int(self.num_train_epochs * batches),
            **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "steps"),
            **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), every),
            **hyperparameters,
        )
        check_fixed(arguments, FIXED)
        return arguments


def build_classifier(
    model: str, task: GlueTask, dropout: float, backbone: list[Path], trust_remote_code: bool = False
) -> PreTrainedModel:
    """Any encoder of Transformers with a classifier for the task.

    Args:
        model: path or Hub id: the configuration and, without `backbone`, the weights.
        task: how many labels, and their names.
        dropout: before the classifier, under whatever name the model has it.
        backbone: checkpoints whose backbone to start from instead, the mean of several. The head is new.
        trust_remote_code: run code from the model's repository.

    Raises:
        ValueError: if weights do not fit the configuration.
    """
    options = {"trust_remote_code": trust_remote_code}
    names = task.labels or ["score"]
    config = AutoConfig.from_pretrained(model, **options)
    # They set `num_labels`, too.
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification" if task.labels is not None else "regression"
    setattr(config, DROPOUTS.get(config.model_type, "classifier_dropout"), dropout)
    # Some checkpoints (DeBERTa-v3) are 16-bit, in which AdamW's steps get lost.
    options["dtype"] = torch.float32
    if backbone:
        classifier = AutoModelForSequenceClassification.from_config(config, **options)
        load_backbone(classifier, backbone)
        return classifier
    try:
        return AutoModelForSequenceClassification.from_pretrained(model, config=config, **options)
    except RuntimeError as error:
        raise ValueError(
            f"The weights of {model} do not fit its config.json (hidden_size {config.hidden_size}) with "
            f"{config.num_labels} labels; the report above has the shapes that were found and expected. ({error})"
        ) from error


def load_backbone(classifier: PreTrainedModel, checkpoints: list[Path]) -> None:
    """Load all but the head from a checkpoint, or the mean of several, taken in float32.

    Args:
        classifier: gets the weights.
        checkpoints: folders with `model.safetensors`, of models with the same backbone under the same names.

    Raises:
        ValueError: if a tensor is missing, too many or of another shape, in any of them.
    """
    prefix = f"{classifier.base_model_prefix}."
    # Under the names of the files: Transformers stores NomicBERT's and GTE's projections otherwise than it holds them.
    stored = revert_weight_conversion(classifier, classifier.state_dict())
    expected = {key: value for key, value in stored.items() if key.startswith(prefix)}
    poolers = {key for key in expected if key.startswith(f"{prefix}pooler.")}
    means = {}
    for checkpoint in checkpoints:
        file = checkpoint / "model.safetensors"
        if not file.is_file():
            raise ValueError(f"{checkpoint} holds no model.safetensors: save the whole model in one file.")
        with safe_open(file, "pt") as tensors:
            found = {key for key in tensors.keys() if key.startswith(prefix)}
            if not means:
                # Masked language models have no pooler: it is new then, as the head is.
                expected = {key: value for key, value in expected.items() if key in found or key not in poolers}
            if differing := sorted(found ^ expected.keys()):
                kind = "lacks" if differing[0] in expected else "has beyond the model's own"
                raise ValueError(f"{file} is of another backbone: it {kind} {', '.join(differing[:5])}.")
            for key, weight in expected.items():
                if (shape := tensors.get_slice(key).get_shape()) != list(weight.shape):
                    raise ValueError(
                        f"{file} is of another backbone: {key} has the shape {shape} there; expected is "
                        f"{list(weight.shape)}."
                    )
                share = tensors.get_tensor(key).float() / len(checkpoints)
                means[key] = means[key] + share if key in means else share
    # It draws a head, which is not used; the classifier keeps its own.
    with torch.random.fork_rng():
        loaded = type(classifier).from_pretrained(None, config=classifier.config, state_dict=means, dtype=torch.float32)
    backbone = {key: weight for key, weight in loaded.state_dict().items() if key.startswith(prefix)}
    classifier.load_state_dict(backbone, strict=False)


def last_checkpoints(run: str, number: int) -> list[Path]:
    """The newest complete checkpoints of a pretraining run.

    Raises:
        CheckpointError: if there are not so many.
    """
    checkpoints = complete_checkpoints(Path(run))
    if not 1 <= number <= len(checkpoints):
        raise CheckpointError(
            f"{run} holds {len(checkpoints)} complete checkpoints, and `average_checkpoints` is {number}. Give the "
            "folder of a pretraining run as `model`; `save_total_limit` says how many it keeps."
        )
    return checkpoints[-number:]


def tokenize(data: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """Ids of one text, or of a pair of which the longer one is cut first."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

    texts = [name for name in next(iter(data.values())).column_names if name != "label"]
    return data.map(encode, batched=True, remove_columns=texts, desc="tokenizing")


def score_parts(prediction: EvalPrediction, task: GlueTask, parts: dict[str, int]) -> dict[str, float]:
    """Metrics on each validation split, and their mean as `score`.

    Args:
        prediction: of all splits, one after the other.
        task: which metrics.
        parts: rows by split.

    Raises:
        FloatingPointError: if a score of the model is not finite, which would count as label 0.
    """
    logits, labels = prediction.predictions, prediction.label_ids
    if not np.isfinite(logits).all():
        raise FloatingPointError("The model gives scores that are not finite. Train with a smaller `learning_rate`.")
    predictions = logits.argmax(-1) if task.labels is not None else logits[:, 0]
    metric, values, start = GlueMetric(task.metrics), {}, 0
    for part, rows in parts.items():
        rows_of = slice(start, start := start + rows)
        computed = metric.compute(predictions=predictions[rows_of], references=labels[rows_of])
        values |= {name if len(parts) == 1 else f"{part}_{name}": value for name, value in computed.items()}
    return values | {"score": sum(values.values()) / len(values)}


class EarlyStopping(EarlyStoppingCallback):
    """Without its warning that the best weights are not loaded: `save_best` takes them from their checkpoint."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass


class GlueTrainer(ResumableTrainer):
    """Fine-tuning with early stopping.

    Args:
        model: from `build_classifier`.
        args: from `GlueArguments.of_run`.
        task: what is trained.
        data: its splits, tokenised.
        tokenizer: pads, and is saved with the model.
        patience: stop after so many evaluations without a better score.
        settings: see `ResumableTrainer`, as for what else is raised.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: GlueArguments,
        task: GlueTask,
        data: DatasetDict,
        tokenizer: PreTrainedTokenizerBase,
        patience: int,
        settings: dict,
    ):
        self.patience = patience
        scores: Callable[[EvalPrediction], dict] = partial(
            score_parts, task=task, parts={name: len(data[name]) for name in task.validation}
        )
        super().__init__(
            model,
            args,
            train_dataset=data[task.train],
            eval_dataset=concatenate_datasets([data[name] for name in task.validation]),
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=scores,
            callbacks=[EarlyStopping(patience)],
            settings=settings,
        )

    def is_finished(self, checkpoint: Path) -> bool:
        """Also after early stopping: one evaluation more could be a better one."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        stopping = state.stateful_callbacks["EarlyStopping"]["attributes"]
        return super().is_finished(checkpoint) or stopping["early_stopping_patience_counter"] >= self.patience

    def save_best(self, folder: Path) -> None:
        """Make a model of the best checkpoint, for `from_pretrained`."""
        best = Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"
        of_training = shutil.ignore_patterns("*.pt", "*.pth", "*.bin", "trainer_state.json", "complete.json")
        with atomic_folder(folder) as whole:
            shutil.copytree(best, whole, ignore=of_training, dirs_exist_ok=True)

    def evaluations(self) -> list[dict]:
        """Step, loss and metrics of each evaluation."""
        return [
            {key.removeprefix("eval_"): value for key, value in entry.items() if not key.endswith(TIMINGS)}
            for entry in self.state.log_history
            if "eval_score" in entry
        ]
