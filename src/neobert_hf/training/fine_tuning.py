"""Fine-tuning as in the paper (appendix C), for every kind of head: length, evaluations, the best checkpoint.

Optional additions are LoRA, and smaller learning rates for lower layers (https://arxiv.org/abs/1801.06146).
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from neobert_hf.common.files import atomic_folder
from neobert_hf.training.adapters import LoraArguments, add_adapters, describe_adapters, load_adapters, merge_adapters
from neobert_hf.training.arguments import BF16, choose_precision, fix
from neobert_hf.training.run_checkpoints import read_progress
from neobert_hf.training.trainer import EarlyStopping, ResumableTrainer


# What this recipe needs of Transformers' settings.
FIXED = {
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

# Endings of the names of timings, which the Trainer's evaluations also log.
TIMINGS = ("runtime", "_per_second", "_preparation_time")


@dataclass
class FineTuningArguments(LoraArguments, TrainingArguments):
    """Transformers' arguments with the defaults of the paper (appendix C, one point of its grid) and of its code."""

    per_device_train_batch_size: int = field(default=32, metadata={"help": "rows per step"})
    learning_rate: float = field(default=2e-5, metadata={"help": "peak learning rate"})
    weight_decay: float = field(default=0.01, metadata={"help": "decoupled weight decay; not on norms and biases"})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "rows evaluated at a time"})
    num_train_epochs: float = field(default=10, metadata={"help": "passes over the training split"})
    warmup_steps: float = field(default=0.06, metadata={"help": "optimizer steps, or a share of all if below 1"})
    early_stopping_patience: int = field(
        default=15, metadata={"help": "stop after this many evaluations without a better score"}
    )
    eval_steps: float | None = field(
        default=None, metadata={"help": "steps between evaluations; min(500, a tenth of an epoch) if unset"}
    )
    layer_decay: float = field(
        default=1.0, metadata={"help": "the learning rate of a block is that of the block above it times this"}
    )
    report_to: str | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    save_total_limit: int | None = field(default=1, metadata={"help": "complete checkpoints to keep besides the best"})
    bf16: bool | None = field(default=None, metadata=BF16)

    def __post_init__(self):
        fix(self, FIXED, {})
        choose_precision(self)
        self._check_intervals()
        LoraArguments.__post_init__(self)
        TrainingArguments.__post_init__(self)

    def _check_intervals(self) -> None:
        """Refuse settings to evaluate, save or log other than at `eval_steps`: `planned` would overwrite them."""
        for name, untouched in (("eval", "no"), ("save", "steps"), ("logging", "steps")):
            if (strategy := getattr(self, f"{name}_strategy")) not in (untouched, "steps"):
                raise ValueError(
                    f"`{name}_strategy` is {strategy!r}, but this recipe evaluates, saves and logs every `eval_steps`."
                )
        if self.eval_strategy == "steps" and self.eval_steps is None:
            # Transformers would use 500, more steps than a small run has.
            raise ValueError("`eval_strategy` is 'steps' without `eval_steps`: set `eval_steps`, or leave both out.")
        for name in ("save_steps", "logging_steps"):
            every = getattr(self, name)
            # 500 is Transformers' default.
            if every not in (500, self.eval_steps):
                raise ValueError(
                    f"`{name}` is {every}, but this recipe evaluates, saves and logs at the same steps: set "
                    "`eval_steps` instead."
                )

    def planned(self, rows: int) -> "FineTuningArguments":
        """The arguments of a run on `rows` training rows, with its steps, evaluations and checkpoints."""
        if self.eval_steps is not None and (self.eval_steps < 1 or self.eval_steps % 1):
            raise ValueError(f"`eval_steps` is {self.eval_steps}; it must be a whole number of steps, 1 or more.")
        if self.max_steps == 0:
            raise ValueError("`max_steps` is 0: nothing would be trained. Leave it out to use `num_train_epochs`.")
        batches = -(-rows // self.per_device_train_batch_size)
        steps = -(-batches // self.gradient_accumulation_steps)
        every = int(self.eval_steps or max(1, min(500, steps // 10)))
        return replace(
            self,
            max_steps=self.max_steps if self.max_steps > 0 else max(1, int(self.num_train_epochs * steps)),
            **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "steps"),
            **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), every),
        )


class LengthGroups(LengthGroupedSampler):
    """Groups rows of about the same length, in an order determined by seed and epoch.

    Transformers' own sampler draws from torch's global generator, whose state a resumed run restores only after it has
    skipped the rows already seen. From the second epoch on, it would skip other rows, and see some twice.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class FineTuningTrainer(ResumableTrainer):
    """Fine-tuning with early stopping, of a model from `build_model` with arguments from `planned`.

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
        """The mean loss of a micro-batch, by its share of the step's labels: the sum is that of one large batch."""
        labels = inputs.get("labels")
        found = super().compute_loss(model, inputs, return_outputs)
        if num_items_in_batch is None or labels is None or not self.model.training:
            return found
        share = (labels != -100).sum() / num_items_in_batch
        return (found[0] * share, found[1]) if return_outputs else found * share

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer, with a separate learning rate for each block if `layer_decay` is below 1."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if new and self.args.layer_decay < 1:
            factors = layer_factors(self.model, self.args.layer_decay)
            optimizer.param_groups[:] = [
                group
                | {"params": [weight for weight in group["params"] if factors[weight] == factor]}
                | {"lr": group["lr"] * factor}
                for group in optimizer.param_groups
                for factor in sorted(set(factors.values()))
            ]
        return optimizer

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return LengthGroups(sampler.batch_size, sampler.lengths, self.args.seed)
        return sampler

    def _get_eval_sampler(self, eval_dataset) -> Sampler:
        # Scores are matched to rows by position; `group_by_length` would change the order here, too.
        return SequentialSampler(eval_dataset)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        if self.args.lora_rank is not None:
            load_adapters(self.model, Path(resume_from_checkpoint))
            return
        # For some models (NomicBERT, GTE), tensors in files have other names and shapes than in the modules. The
        # Trainer's own loading would leave them out with a warning.
        with torch.random.fork_rng():
            loaded = type(self.model).from_pretrained(
                resume_from_checkpoint, config=self.model.config, dtype=torch.float32
            )
        self.model.load_state_dict(loaded.state_dict())

    def save_best(self, folder: Path) -> None:
        """Write the best checkpoint as a model for `from_pretrained`. Adapters are merged into it."""
        read_progress(self.best_checkpoint)
        training_files = shutil.ignore_patterns("*.pt", "*.pth", "*.bin", "trainer_state.json", "complete.json")
        with atomic_folder(folder) as partial_folder:
            if self.args.lora_rank is None:
                shutil.copytree(self.best_checkpoint, partial_folder, ignore=training_files, dirs_exist_ok=True)
            else:
                self.load_best()
                merge_adapters(self.model)
                self.model.save_pretrained(partial_folder)
                self.processing_class.save_pretrained(partial_folder)

    def evaluations(self) -> list[dict]:
        """Step, loss and metrics of each evaluation, without timings."""
        return [
            {key.removeprefix("eval_"): value for key, value in entry.items() if not key.endswith(TIMINGS)}
            for entry in self.state.log_history
            if "eval_score" in entry
        ]


def layer_factors(model: PreTrainedModel, decay: float) -> dict[nn.Parameter, float]:
    """The factor on each parameter's learning rate: 1 above the blocks, and smallest in the embeddings."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        raise ValueError(f"{type(model).__name__} has no blocks: leave `layer_decay` out.")
    name, blocks = max(lists.items(), key=lambda item: sum(weight.numel() for weight in item[1].parameters()))
    depths, below = {}, True
    for parameter_name, weight in model.named_parameters():
        inside = parameter_name.startswith(f"{name}.")
        below = below and not inside
        number = int(parameter_name.removeprefix(f"{name}.").split(".")[0]) if inside else len(blocks)
        depths[weight] = 0 if below else number + 1
    return {weight: decay ** (len(blocks) + 1 - depth) for weight, depth in depths.items()}
