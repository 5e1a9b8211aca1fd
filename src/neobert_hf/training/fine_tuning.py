"""Fine-tuning as in the paper (appendix C), for every kind of head: the model, the arguments, the trainer.

The model is any encoder of Transformers with a new head.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.training.adapters import LoraArguments, add_adapters, describe_adapters, load_adapters, merge_adapters
from neobert_hf.training.arguments import BF16, fix, follow_hardware, refused_by
from neobert_hf.training.trainer import TIMINGS, EarlyStopping, ResumableTrainer


# The names of the setting for dropout before the head, by model type, where it is not `classifier_dropout`.
DROPOUTS = {
    "albert": ("classifier_dropout_prob",),
    "deberta": ("cls_dropout",),
    "deberta-v2": ("cls_dropout",),
    "distilbert": ("seq_classif_dropout", "qa_dropout"),
}
# The ends of the names of classes with a head, which has as many outputs as there are labels.
HEADS = ("ForSequenceClassification", "ForTokenClassification")
# What this recipe needs of Transformers' settings.
FIXED = {
    # `load_best` does it.
    "load_best_model_at_end": False,
    # False: a resumed run skips the rows it has trained on, which makes resuming exact. Only row numbers are drawn
    # again for that.
    "ignore_data_skip": False,
    # True would also leave the last rows out of every evaluation.
    "dataloader_drop_last": False,
    # A delay would leave fewer evaluations to choose the best from.
    "eval_delay": 0,
    "metric_for_best_model": "score",
    "greater_is_better": True,
    # A callback counts the evaluations without improvement.
    "restore_callback_states_from_checkpoint": True,
}
# Settings that `planned` gives their values, and one that would make resuming inexact: Transformers' sampler of rows of
# the same length draws other rows after a resume. NeoBERT does not compute padding, so it would gain nothing.
UNUSED = {
    "save_steps": "eval_steps",
    "logging_steps": "eval_steps",
    "eval_strategy": "eval_steps",
    "save_strategy": "eval_steps",
    "logging_strategy": "eval_steps",
    "train_sampling_strategy": None,
}


def load_for_task(
    name: str,
    auto_class: Any,
    labels: list[str] | None,
    problem: str | None = None,
    dropout: float = 0.1,
    pooling: str | None = None,
    backbone: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Any Transformers encoder in float32 with a new head, and its tokenizer.

    Args:
        name: path or Hub id of the configuration, the tokenizer and, without `backbone`, the weights.
        auto_class: the class with the head, such as `AutoModelForTokenClassification`.
        labels: the names of the head's outputs, in order; None keeps those of the configuration.
        problem: `problem_type` of Transformers, for text classifiers.
        dropout: the dropout before the head, for models that have a setting for it.
        pooling: `classifier_pooling` of models that have it: which hidden states a text classifier reads.
        backbone: folder of a model with another head, whose backbone is taken instead.
        trust_remote_code: run code from the model's repository.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(name, getattr(config, "vocab_size", None), trust_remote_code=trust_remote_code)
    has_head_of_other_size = (
        labels is not None
        and any(architecture.endswith(HEADS) for architecture in config.architectures or [])
        and config.num_labels != len(labels)
    )
    if labels is not None:
        # These two also set `num_labels`.
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = problem
    for setting in DROPOUTS.get(config.model_type, ("classifier_dropout",)):
        setattr(config, setting, dropout)
    if pooling is not None:
        if not hasattr(config, "classifier_pooling"):
            raise ValueError(f"`pooling` is {pooling!r}, but {name} has no such choice: leave it out.")
        config.classifier_pooling = pooling
    # Some checkpoints (DeBERTa-v3) are 16-bit, a precision in which AdamW's small steps are rounded away.
    options = {"config": config, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if backbone is None and has_head_of_other_size:
        print(f"{name} has a head for other labels: it gets a new one", flush=True)
        backbone = Path(name)
    if backbone is None:
        return auto_class.from_pretrained(name, **options), tokenizer
    model = auto_class.from_config(**options)
    trained = type(model).from_pretrained(backbone, dtype=torch.float32)
    model.base_model.load_state_dict(trained.base_model.state_dict())
    return model, tokenizer


@dataclass
class FineTuningArguments(LoraArguments, TrainingArguments):
    """Transformers' arguments with the defaults of the paper (appendix C, one point of its grid) and of its code."""

    refused: ClassVar = refused_by(FIXED, UNUSED)

    per_device_train_batch_size: int = field(default=32, metadata={"help": "rows per step"})
    learning_rate: float = field(default=2e-5, metadata={"help": "peak learning rate"})
    weight_decay: float = field(default=0.01, metadata={"help": "decoupled weight decay; not on norms and biases"})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "rows evaluated at a time"})
    num_train_epochs: float = field(default=10, metadata={"help": "passes over the training split"})
    warmup_steps: float = field(default=0.06, metadata={"help": "optimizer steps, or a share of all if below 1"})
    early_stopping_patience: int = field(
        default=15, metadata={"help": "stop after this many evaluations without a better score"}
    )
    eval_steps: int | None = field(
        default=None,
        metadata={"help": "steps between evaluations, each with a checkpoint; half an epoch, but 10 to 500, if unset"},
    )
    seed: int = field(default=0, metadata={"help": "of the new head, the order of the rows and dropout"})
    report_to: str | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    save_total_limit: int | None = field(default=1, metadata={"help": "complete checkpoints to keep besides the best"})
    bf16: bool | None = field(default=None, metadata=BF16)

    def __post_init__(self):
        fix(self, FIXED, UNUSED)
        if self.max_steps == 0:
            raise ValueError("`max_steps` is 0; it must be 1 or more, or left out for `num_train_epochs`.")
        follow_hardware(self)
        LoraArguments.__post_init__(self)
        TrainingArguments.__post_init__(self)

    def planned(self, rows: int) -> "FineTuningArguments":
        """The arguments of a run on `rows` training rows, with its steps, evaluations and checkpoints."""
        batches = -(-rows // self.per_device_train_batch_size)
        steps = -(-batches // self.gradient_accumulation_steps)
        planned = replace(
            self, max_steps=self.max_steps if self.max_steps > 0 else max(1, int(self.num_train_epochs * steps))
        )
        # Set afterwards, since they are refused where a user gives them.
        planned.eval_steps = self.eval_steps or self.evaluated_every(steps)
        planned.save_steps = planned.logging_steps = planned.eval_steps
        planned.eval_strategy = planned.save_strategy = planned.logging_strategy = IntervalStrategy.STEPS
        planned.do_eval = True
        return planned

    def evaluated_every(self, epoch: int) -> int:
        """The steps between evaluations, if they are not set, where an epoch has so many."""
        return min(500, max(10, epoch // 2))


class FineTuningTrainer(ResumableTrainer):
    """Fine-tuning with early stopping, of a model from `load_for_task` with arguments from `planned`.

    `compute_metrics` must return a `score`: the larger, the better.
    """

    def __init__(self, model: PreTrainedModel, args: FineTuningArguments, **kwargs):
        if args.lora_rank is not None:
            add_adapters(model, args, args.seed)
            print(describe_adapters(model), flush=True)
        super().__init__(model, args, callbacks=[EarlyStopping(args.early_stopping_patience)], **kwargs)
        # So that the Trainer counts the labels of all micro-batches of a step, for `compute_loss`.
        self.model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean loss of a micro-batch, by its share of the step's labels: the sum is that of one large batch.

        Transformers expects this of the model, but most of its losses do not do it.
        """
        labels = inputs.get("labels")
        found = super().compute_loss(model, inputs, return_outputs)
        if num_items_in_batch is None or labels is None or not self.model.training:
            return found
        share = (labels != -100).sum() / num_items_in_batch
        return (found[0] * share, found[1]) if return_outputs else found * share

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        if self.args.lora_rank is not None:
            load_adapters(self.model, Path(resume_from_checkpoint))
            return
        # For some models (NomicBERT, GTE), tensors in files have other names and shapes than in the modules. The
        # Trainer's own loading would leave them out with a warning.
        config = self.model.config
        loaded = type(self.model).from_pretrained(resume_from_checkpoint, config=config, dtype=torch.float32)
        self.model.load_state_dict(loaded.state_dict())

    def plan(self) -> str:
        """How long training is, for a line at its start."""
        return f"{self.args.max_steps:,} steps on {self.args.device}, evaluated every {self.args.eval_steps:,}"

    def load_best(self) -> None:
        """Load the weights of the best evaluation into the model, with adapters merged into them: training is over."""
        best = Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"
        self._load_from_checkpoint(str(best))
        self.model.to(self.args.device)
        if self.args.lora_rank is not None:
            merge_adapters(self.model)

    def evaluations(self) -> list[dict]:
        """Step, loss and metrics of each evaluation, by name, without timings."""
        # Sorted, since entries that were read from a checkpoint are: a resumed run writes the same bytes.
        return [
            {key.removeprefix("eval_"): value for key, value in sorted(entry.items()) if not key.endswith(TIMINGS)}
            for entry in self.state.log_history
            if "eval_score" in entry
        ]
