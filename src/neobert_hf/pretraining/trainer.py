"""The Trainer of masked language modelling: what Transformers' own lacks for the paper's recipe.

Micro-batches from a cursor, losses and throughput over all processes, held-out loss by document length. Forward,
backward, accumulation, engines and logging stay with Transformers.
"""

import copy
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM, has_varlen_kernel, swiglu_width
from neobert_hf.pretraining.batches import Documents, HeldOutBatchSampler, MLMBatchSampler
from neobert_hf.pretraining.collator import MLMCollator
from neobert_hf.pretraining.optimizers import build_optimizer, build_schedule
from neobert_hf.training.arguments import check_fixed
from neobert_hf.training.run_checkpoints import check_engine, read_progress
from neobert_hf.training.trainer import ResumableTrainer, ignore_sigterm


# Dense bf16 FLOP/s of the data sheets; the first name that the device's contains.
DATASHEET_PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}

# Held-out losses are reported for documents of up to so many tokens (after cutting), and of more than the last.
LENGTH_EDGES = (128, 256, 512, 1024, 2048)

# Settings of Transformers that would undo what this recipe promises, and the only values it runs with.
FIXED = {
    # The sampler's cursor resumes; the Trainer would read and throw away everything before it.
    "ignore_data_skip": True,
    # The row number, of which the mask is a function, is not an argument of the model.
    "remove_unused_columns": False,
    # It would hide NaN from the logged loss.
    "logging_nan_inf_filter": False,
    # The loss is a mean over the labels of the whole global batch.
    "average_tokens_across_devices": True,
    # It would gather the tokens of every micro-batch at once; counted here once a log.
    "include_num_input_tokens_seen": "no",
}

# Settings of Transformers in whose place the recipe has its own, or that it has no use for.
UNUSED = {
    "optim": "optimizer",
    "lr_scheduler_type": "schedule",
    "gradient_accumulation_steps": "global_batch_tokens",
    "per_device_train_batch_size": "micro_batch_tokens",
    "per_device_eval_batch_size": "micro_batch_tokens",
    "num_train_epochs": "max_steps",
    "data_seed": "seed",
    "optim_args": None,
    "lr_scheduler_kwargs": None,
    "label_smoothing_factor": None,
    "neftune_noise_alpha": None,
    "auto_find_batch_size": None,
    "load_best_model_at_end": None,
    "save_only_model": None,
    "dataloader_drop_last": None,
}


@dataclass
class PretrainingArguments(TrainingArguments):
    """Transformers' arguments with the paper's defaults (sections 3.3 and A), and the recipe's own."""

    optimizer: Literal["adamw", "adam", "soap", "muon"] = field(
        default="adamw", metadata={"help": "see optimization.py"}
    )
    schedule: Literal["cosine_to_floor", "linear", "constant"] = field(
        default="cosine_to_floor", metadata={"help": "of the learning rate, after the warm-up; see optimization.py"}
    )
    decay_norms_and_biases: bool = field(
        default=True, metadata={"help": "weight decay on every parameter, as in the released code"}
    )
    peak_tflops: float | None = field(
        default=None, metadata={"help": "of one device, for MFU; the data sheet's or measured at the start if unset"}
    )
    learning_rate: float = field(default=6e-4, metadata={"help": "at its peak"})
    max_steps: int = field(default=1_000_000, metadata={"help": "optimizer steps"})
    warmup_steps: float = field(default=2_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    weight_decay: float = field(default=0.1, metadata={"help": "decoupled"})
    adam_beta2: float = field(default=0.95, metadata={"help": "decay rate of the second moment"})
    bf16: bool = field(default=True, metadata={"help": "autocast; weights and optimizer stay float32"})
    report_to: None | str | list[str] = field(
        default="tensorboard", metadata={"help": "tensorboard, wandb, trackio, ... or none"}
    )
    logging_steps: float = field(default=100, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=1_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=3, metadata={"help": "complete checkpoints that are kept"})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "there are none"})
    ignore_data_skip: bool = field(default=True, metadata={"help": "fixed"})
    remove_unused_columns: bool = field(default=False, metadata={"help": "fixed"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "fixed"})

    def __post_init__(self):
        super().__post_init__()
        check_fixed(self, FIXED)
        defaults = {field.name: field.default for field in fields(TrainingArguments)}
        for name, instead in UNUSED.items():
            if getattr(self, name) != defaults[name]:
                advice = f"set `{instead}` instead" if instead else "leave it out"
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; this recipe does not use it: {advice}.")
        for name in ("save_strategy", "eval_strategy"):
            if getattr(self, name) not in ("steps", "no"):
                raise ValueError(f"`{name}` is {getattr(self, name).value!r}; it must be 'steps' or 'no'.")
        if self.warmup_steps < 0 or self.get_warmup_steps(self.max_steps) > self.max_steps:
            raise ValueError(
                f"`warmup_steps` is {self.warmup_steps}, `max_steps` {self.max_steps}: no step would follow."
            )


def training_flops(config: NeoBERTConfig, tokens: int, squared_lengths: int, labels: int) -> float:
    """Multiplications and additions of forward and backward pass.

    Three times the forward pass: 2 for each weight of the blocks and token, 4 * hidden_size for each layer and pair of
    tokens that attend to each other, and the decoder on the labelled tokens only.
    """
    mlp = 3 * swiglu_width(config) if config.hidden_act == "swiglu" else 2 * config.intermediate_size
    weights = config.num_hidden_layers * config.hidden_size * (4 * config.hidden_size + mlp)
    attention = 4 * config.hidden_size * config.num_hidden_layers * squared_lengths
    return 3.0 * (2 * weights * tokens + attention + 2 * config.hidden_size * config.vocab_size * labels)


def peak_flops(device: torch.device, bf16: bool) -> tuple[float, str]:
    """FLOP/s that one device could do, and the source of the number: its data sheet, or a second of products."""
    if device.type == "cuda" and bf16:
        name = torch.cuda.get_device_name(device)
        for part, peak in DATASHEET_PEAKS.items():
            if part in name:
                return peak, f"data sheet of {name}, dense bf16"
    peak, shape = product_flops(device, torch.bfloat16 if bf16 else torch.float32)
    return peak, f"measured, {shape} products"


def product_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of matrix products, the fastest five within a second, and their shape in words."""
    size = 8192 if device.type == "cuda" else 1024
    factors = torch.randn(2, size, size, device=device, dtype=dtype)
    fastest, start = math.inf, time.perf_counter()
    while (begin := time.perf_counter()) - start < 1:
        for _ in range(5):
            product = factors[0] @ factors[1]
        # `.item()` waits for the device.
        product[0, 0].item()
        fastest = min(fastest, (time.perf_counter() - begin) / 5)
    return 2 * size**3 / fastest, f"{size:,}-square {str(dtype).removeprefix('torch.')}"


def attention_backend(model: NeoBERTForMaskedLM, device: torch.device, dtype: torch.dtype, whole_rows: bool) -> str:
    """The attention that training runs, as the model chooses it; `whole_rows`: neither padding nor packing."""
    name = model.config._attn_implementation
    if name != "sdpa" or whole_rows:
        return name
    if has_varlen_kernel(device, dtype, model.config.head_dim, model.config.dropout):
        return "sdpa, FlashAttention of torch over all documents"
    return "sdpa, one call a document"


class Feed(NamedTuple):
    """Documents, which of them make up each micro-batch, and how."""

    documents: Documents
    sampler: MLMBatchSampler | HeldOutBatchSampler
    collator: MLMCollator


class MLMTrainer(ResumableTrainer):
    """Trains `NeoBERTForMaskedLM` on the micro-batches of an `MLMBatchSampler`.

    Args:
        train: what to train on.
        held_out: what to evaluate on, if anything.
        settings: see `ResumableTrainer`, as for what else is raised.
        optimizer_from: a checkpoint whose optimizer state training starts with (stage 2 of the paper). Not used on
            resume.
    """

    def __init__(
        self,
        model: NeoBERTForMaskedLM,
        args: PretrainingArguments,
        train: Feed,
        held_out: Feed | None,
        settings: dict,
        optimizer_from: Path | None = None,
        **kwargs,
    ):
        self.sampler, self.held_out = train.sampler, held_out
        self.optimizer_from = optimizer_from
        super().__init__(
            model,
            args,
            data_collator=train.collator,
            train_dataset=train.documents,
            eval_dataset=held_out.documents if held_out else None,
            settings=settings,
            **kwargs,
        )
        if optimizer_from is not None:
            if self.engine == "DeepSpeed":
                raise ValueError(
                    "`continue_optimizer` cannot be combined with DeepSpeed, whose optimizer state has its own layout. "
                    "Use DDP or FSDP2 for this stage, or set it to false."
                )
            check_engine(optimizer_from, read_progress(optimizer_from), self.engine)
        self.architecture = model.config
        self.micro_batches_per_step = args.gradient_accumulation_steps * args.world_size
        if args.peak_tflops is None:
            self.peak, self.peak_source = peak_flops(args.device, args.bf16)
        else:
            self.peak, self.peak_source = args.peak_tflops * 1e12, "given"
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
        self.attention = attention_backend(model, args.device, dtype, train.collator.layout == "naive")
        if self.is_fsdp_enabled and getattr(self.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 2:
            # Accelerate would hold the residual stream, the loss and the gradients in bf16. With weights gathered in
            # float32 and autocast (below) the run equals one process to 6e-8, as under DDP.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        # Real tokens, tokens with padding, labels, correct predictions, squared lengths: since the last log, here.
        self._counts = torch.zeros(5, dtype=torch.int64, device=args.device)
        self._window = [0] * 5
        self._window_start = time.perf_counter()

    # Data

    def get_train_dataloader(self) -> DataLoader:
        # Not prepared by accelerate: the sampler gives each process its share already.
        return self._loader(self.train_dataset, self.sampler, self.data_collator)

    def _loader(self, documents, sampler, collator) -> DataLoader:
        return DataLoader(
            documents,
            batch_sampler=sampler,
            collate_fn=collator,
            # Iterating draws a seed. From the global generator, which the Trainer restores just before, dropout would
            # differ after a resume.
            generator=torch.Generator(),
            num_workers=self.args.dataloader_num_workers,
            worker_init_fn=ignore_sigterm,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    # Optimization

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            args = self.args
            self.optimizer = build_optimizer(
                args.optimizer,
                self.model if model is None else model,
                args.learning_rate,
                (args.adam_beta1, args.adam_beta2),
                args.adam_epsilon,
                args.weight_decay,
                args.decay_norms_and_biases,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = build_schedule(self.args.schedule, optimizer, warmup, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is None and self.optimizer_from is not None:
            # The moments of the earlier stage, the learning rate and its schedule of this one.
            groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
            schedule = copy.deepcopy(self.lr_scheduler.state_dict())
            self._load_optimizer_and_scheduler(str(self.optimizer_from))
            for group, own in zip(self.optimizer.param_groups, groups):
                group.update(own)
            self.lr_scheduler.load_state_dict(schedule)
        self._window_start = time.perf_counter()
        return prepared

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True):
        return self.accelerator.autocast()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            ids, labels = inputs["input_ids"], inputs["labels"]
            labelled = labels != -100
            if "cu_seq_lens_q" in inputs:
                lengths = inputs["cu_seq_lens_q"].diff().long()
            elif "attention_mask" in inputs:
                lengths = inputs["attention_mask"].sum(1)
            else:
                lengths = torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
            correct = (outputs.logits.argmax(-1) == labels[labelled]).sum()
            padded = torch.full((), ids.numel(), device=ids.device)
            self._counts += torch.stack((lengths.sum(), padded, labelled.sum(), correct, (lengths**2).sum()))
        return (loss, outputs) if return_outputs else loss

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.sampler.advance(self.state.global_step * self.micro_batches_per_step)
        self.state.epoch = self.sampler.epoch()
        if "loss" in logs:
            logs |= self._throughput(logs["loss"])
        super().log(logs, start_time)
        if "loss" in logs:
            # Words are not for TensorBoard.
            self.state.log_history[-1] |= {"attention": self.attention, "peak": f"{self.peak:.3g}, {self.peak_source}"}

    def _throughput(self, loss: float) -> dict[str, float]:
        self._collect_counts()
        real, padded, labels, correct, squared = self._window
        seconds = time.perf_counter() - self._window_start
        self._window, self._window_start = [0] * 5, time.perf_counter()
        flops = training_flops(self.architecture, real, squared, labels)
        return {
            "perplexity": math.exp(min(loss, 100)),
            "accuracy": correct / max(labels, 1),
            "tokens_per_second": real / seconds,
            "padded_tokens_per_second": padded / seconds,
            "padding_share": 1 - real / max(padded, 1),
            "tokens_seen": self.state.num_input_tokens_seen,
            "mfu": flops / seconds / (self.peak * self.args.world_size),
        }

    def _collect_counts(self) -> None:
        """Add up over the processes. The total of real tokens is part of the state that checkpoints hold."""
        counts = self.accelerator.reduce(self._counts, "sum").tolist()
        self._counts.zero_()
        self._window = [total + count for total, count in zip(self._window, counts)]
        self.state.num_input_tokens_seen += counts[0]

    @contextmanager
    def _clock_stopped(self):
        """Evaluating and saving do not count as training time."""
        start = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - start

    # Evaluation

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss in nats a label, perplexity and accuracy on the held-out documents; losses by length after cutting."""
        sampler = self.held_out.sampler
        model = self._wrap_model(self.model, training=False)
        if not self.accelerator._models and model is self.model:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        totals = torch.zeros(len(LENGTH_EDGES) + 1, 3, dtype=torch.float64)
        edges = torch.tensor(LENGTH_EDGES)
        with self._clock_stopped():
            for number, inputs in enumerate(self._loader(*self.held_out)):
                lengths = inputs["cu_seq_lens_q"].diff()
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager():
                    logits, labels = model(**inputs).logits.float(), inputs["labels"]
                labelled = labels != -100
                if not sampler.counts(number):
                    continue
                loss = F.cross_entropy(logits, labels[labelled], reduction="none")
                correct = logits.argmax(-1) == labels[labelled]
                bins = torch.bucketize(lengths, edges).repeat_interleave(lengths)[labelled[0].cpu()]
                totals.index_add_(0, bins, torch.stack((torch.ones_like(loss), loss, correct), 1).double().cpu())
            if self.args.world_size > 1:
                totals = self.accelerator.reduce(totals.to(self.args.device), "sum").cpu()
        labels, loss, correct = totals.sum(0).tolist()
        if not labels:
            raise ValueError("No token of the held-out documents was masked: hold out more than a few words.")
        metrics = {"loss": loss / labels, "perplexity": math.exp(min(loss / labels, 100)), "accuracy": correct / labels}
        lower = 1
        for upper, (labels, loss, _) in zip((*LENGTH_EDGES, "more"), totals.tolist()):
            if labels:
                metrics[f"loss_{lower}_to_{upper}"] = loss / labels
            lower = upper + 1 if upper != "more" else upper
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints

    def cursor(self) -> dict:
        self.sampler.advance(self.state.global_step * self.micro_batches_per_step)
        return self.sampler.cursor

    def _save_checkpoint(self, model, trial) -> None:
        with self._clock_stopped():
            self._collect_counts()
            super()._save_checkpoint(model, trial)
