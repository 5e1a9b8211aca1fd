"""The Trainer of masked language modelling, with what Transformers' own Trainer lacks for the paper's recipe.

It adds micro-batches from a cursor, and losses and throughput over all processes.
Forward, backward, accumulation, engines and logging are those of Transformers.
"""

import copy
import math
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader

from neobert_hf.data.batches import MLMBatchSampler
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining.data import MicroBatches, PretrainingData
from neobert_hf.pretraining.flops import peak_flops, training_flops
from neobert_hf.pretraining.optimizers import build_optimizer, build_schedule
from neobert_hf.pretraining.settings import PretrainingArguments
from neobert_hf.training.run import Run, check_engine, read_progress
from neobert_hf.training.trainer import ResumableTrainer


# What is counted in every micro-batch: tokens without padding, labels, those that were predicted correctly, and the sum
# of the squared lengths of the documents, for the FLOPs of attention.
COUNTED = ("tokens", "labels", "correct", "squared_lengths")


class MLMTrainer(ResumableTrainer):
    """Trains `NeoBERTForMaskedLM` on the micro-batches of an `MLMBatchSampler`.

    Args:
        run: see `ResumableTrainer`.
        optimizer_from: a checkpoint whose optimizer state training starts with (stage 2 of the paper). Not used on
            resume.
    """

    def __init__(
        self,
        model: NeoBERTForMaskedLM,
        args: PretrainingArguments,
        data: PretrainingData,
        run: Run,
        optimizer_from: Path | None = None,
    ):
        self.data = data
        self.optimizer_from = optimizer_from
        super().__init__(
            model,
            args,
            data_collator=data.train.collator,
            train_dataset=data.train.documents,
            eval_dataset=data.held_out[0].documents if data.held_out else None,
            processing_class=data.tokenizer,
            run=run,
        )
        if optimizer_from is not None:
            self._check_continued_optimizer()
        self.architecture = model.config
        self.micro_batches_per_step = args.gradient_accumulation_steps * args.world_size
        self.peak = peak_flops(args.device) if args.bf16 else None
        if self.is_fsdp_enabled and getattr(self.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 2:
            # Accelerate would keep the residual stream, the loss and the gradients in bf16. With weights gathered in
            # float32 and autocast (below), the run matches a single process to 6e-8, as under DDP.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        # The counts of this process since they were last collected, and of all processes since the last log.
        self._own_counts = torch.zeros(len(COUNTED), dtype=torch.int64, device=args.device)
        self._window = Counter()
        self._window_start = time.perf_counter()

    def _check_continued_optimizer(self) -> None:
        check_engine(self.optimizer_from, self.engine)
        stored = read_progress(self.optimizer_from).identity["optimizer"]
        if stored != self.args.optimizer or self.engine == "DeepSpeed":
            raise ValueError(
                f"`continue_optimizer` needs the `optimizer` of {self.optimizer_from}, {stored!r}, and DDP or FSDP2; "
                f"this run has {self.args.optimizer!r} and the engine {self.engine}. Or set it to false."
            )

    def get_train_dataloader(self) -> DataLoader:
        # Not prepared by accelerate: the sampler already gives each process its share.
        return self._loader(self.data.train)

    def _loader(self, data: MicroBatches) -> DataLoader:
        return DataLoader(
            data.documents,
            batch_sampler=data.sampler,
            collate_fn=data.collator,
            # Iterating draws a seed. Drawn from the global generator, which the Trainer restores just before, it would
            # change dropout after a resume.
            generator=torch.Generator(),
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.args)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            optimizer = self.optimizer if optimizer is None else optimizer
            decay = (self.args.decay_steps, self.args.decay_shape)
            self.lr_scheduler = build_schedule(self.args.schedule, optimizer, warmup, num_training_steps, *decay)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is None and self.optimizer_from is not None:
            self._load_moments()
        self._window_start = time.perf_counter()
        return prepared

    def _load_moments(self) -> None:
        """Load the moments of the earlier stage, but keep this stage's learning rate, schedule and weight decay."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        schedule = copy.deepcopy(self.lr_scheduler.state_dict())
        self._load_optimizer_and_scheduler(str(self.optimizer_from))
        for group, own in zip(self.optimizer.param_groups, groups):
            group.update(own)
        self.lr_scheduler.load_state_dict(schedule)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True):
        # Under FSDP2 with the policy above, nothing else would let it compute in bf16.
        return self.accelerator.autocast()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._count(inputs, outputs.logits)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _count(self, inputs: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
        """Add a micro-batch to the counts of this process, without waiting for the device."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        # The logits are those of labelled positions, so their number is known; counting would wait for the device.
        labelled = torch.nonzero_static((labels != -100).flatten(), size=len(logits)).squeeze(1)
        if "cu_seq_lens_q" in inputs:
            lengths = inputs["cu_seq_lens_q"].diff().long()
        elif "attention_mask" in inputs:
            lengths = inputs["attention_mask"].sum(1)
        else:
            lengths = torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
        counts = [
            (ids != self.processing_class.pad_token_id).sum(),
            torch.full((), len(logits), device=ids.device),
            (logits.argmax(-1) == labels.flatten()[labelled]).sum(),
            (lengths**2).sum(),
        ]
        self._own_counts += torch.stack(counts)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        sampler = self._sampler_at_this_step()
        self.state.epoch = sampler.epoch()
        if "loss" in logs:
            logs |= self._throughput(logs["loss"])
            if (share := sampler.mlm_probability(sampler.cursor["micro_batches"] - 1)) is not None:
                logs["mlm_probability"] = share
        super().log(logs, start_time)

    def _sampler_at_this_step(self) -> MLMBatchSampler:
        self.data.train.sampler.advance(self.state.global_step * self.micro_batches_per_step)
        return self.data.train.sampler

    def _throughput(self, loss: float) -> dict[str, float]:
        """Perplexity, accuracy and speed since the last log; `mfu` on GPUs whose data sheet `flops.py` has."""
        self._collect_counts()
        counts, seconds = self._window, time.perf_counter() - self._window_start
        self._window, self._window_start = Counter(), time.perf_counter()
        found = {
            "perplexity": math.exp(min(loss, 100)),
            "accuracy": counts["correct"] / max(counts["labels"], 1),
            "tokens_per_second": counts["tokens"] / seconds,
            "tokens_seen": self.state.num_input_tokens_seen,
        }
        if self.peak is not None:
            flops = training_flops(self.architecture, counts["tokens"], counts["squared_lengths"], counts["labels"])
            found["mfu"] = flops / seconds / self.args.world_size / self.peak
        return found

    def _collect_counts(self) -> None:
        """Add up the counts of all processes. The number of tokens is part of the checkpointed state."""
        counts = dict(zip(COUNTED, self.accelerator.reduce(self._own_counts, "sum").tolist()))
        self._own_counts.zero_()
        self._window.update(counts)
        self.state.num_input_tokens_seen += counts["tokens"]

    @contextmanager
    def _clock_stopped(self):
        """Leave the time of evaluating and saving out of the training time."""
        self._stopped_at = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - self._stopped_at

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Log what `measure` finds on each held-out folder; that of a second one is called `loss_2` and so on."""
        metrics = {}
        with self._clock_stopped():
            for number, held_out in enumerate(self.data.held_out, start=1):
                ending = "" if number == 1 else f"_{number}"
                found = self.measure(held_out).items()
                metrics |= {f"{metric_key_prefix}_{name}{ending}": value for name, value in found}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def measure(self, held_out: MicroBatches) -> dict[str, float]:
        """Loss in nats per label, perplexity and accuracy on held-out documents, over all processes."""
        model = self._wrap_model(self.model, training=False)
        if not self.accelerator._models and model is self.model:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        for number, inputs in enumerate(self._loader(held_out)):
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                logits = model(**inputs).logits.float()
            if held_out.sampler.is_repeat(number):
                continue
            labels = inputs["labels"][inputs["labels"] != -100]
            losses = F.cross_entropy(logits, labels, reduction="none").double()
            totals += torch.stack((torch.ones_like(losses), losses, logits.argmax(-1) == labels)).sum(1)
        labels, loss, correct = self.accelerator.reduce(totals, "sum").tolist()
        return {
            "loss": loss / labels,
            "perplexity": math.exp(min(loss / labels, 100)),
            "accuracy": correct / labels,
        }

    def since_log(self) -> dict:
        return super().since_log() | {"counts": dict(self._window), "seconds": self._stopped_at - self._window_start}

    def go_on_since_log(self, measured: dict) -> None:
        super().go_on_since_log(measured)
        self._window, self._window_start = Counter(measured["counts"]), time.perf_counter() - measured["seconds"]

    def cursor(self) -> dict:
        return self._sampler_at_this_step().cursor

    def _save_checkpoint(self, model, trial) -> None:
        with self._clock_stopped():
            self._collect_counts()
            super()._save_checkpoint(model, trial)
