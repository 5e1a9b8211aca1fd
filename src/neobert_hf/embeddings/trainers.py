"""Sentence Transformers' trainers with the paper's mixture of datasets and checkpoints that are whole or not used."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from sentence_transformers import (
    CrossEncoderTrainer,
    MultiVectorEncoderTrainer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoderTrainer,
)
from sentence_transformers.base.model import BaseModel
from torch.utils.data import BatchSampler, ConcatDataset

from neobert_hf.common.atomic_writes import write_json
from neobert_hf.embeddings.batches import (
    ContrastiveCollator,
    Mixture,
    MixtureBatchSampler,
    MultiVectorCollator,
    RerankingCollator,
    draw_datasets,
)
from neobert_hf.training.arguments import check_fixed
from neobert_hf.training.launching import check_launch, end_processes
from neobert_hf.training.trainer import ResumableTrainer


# What these recipes fix beside the settings that all recipes fix.
FIXED = {
    # A short last batch would have fewer negatives.
    "dataloader_drop_last": True,
    # Skipping is what makes a resume exact; only row numbers are drawn again.
    "ignore_data_skip": False,
}
# Others let a text into a batch twice, where it is a false negative, and not all are drawn by the seed.
BATCH_SAMPLERS = ("no_duplicates", "no_duplicates_hashed")


@dataclass
class EmbeddingArguments(SentenceTransformerTrainingArguments):
    """Sentence Transformers' arguments with the defaults of the paper (section 5.2.1, appendix D) and its code."""

    max_steps: int = field(default=2_000, metadata={"help": "optimizer steps"})
    per_device_train_batch_size: int = field(
        default=64,
        metadata={"help": "rows of a batch without hard negatives; with them fewer, so that the texts stay as many"},
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "at its peak"})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "as in Transformers"})
    warmup_steps: float = field(default=2_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    weight_decay: float = field(default=0.01, metadata={"help": "decoupled; not on norms and biases"})
    adam_beta2: float = field(default=0.95, metadata={"help": "decay rate of the second moment"})
    bf16: bool = field(default=True, metadata={"help": "autocast; weights and optimizer stay float32"})
    batch_sampler: str = field(
        default="no_duplicates",
        metadata={"help": "of each dataset; no_duplicates_hashed is faster and reads all rows first"},
    )
    report_to: str | None = field(default="tensorboard", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    logging_steps: float = field(default=20, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=500, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=2, metadata={"help": "complete checkpoints that are kept"})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "fixed"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "fixed"})

    def __post_init__(self):
        if self.batch_sampler not in BATCH_SAMPLERS:
            raise ValueError(
                f"`batch_sampler` is {self.batch_sampler}; this recipe needs {' or '.join(BATCH_SAMPLERS)}."
            )
        super().__post_init__()
        check_fixed(self, FIXED)


class MixtureTrainer(ResumableTrainer):
    """Training on a mixture of datasets: the part that all kinds of models share.

    Args:
        model: a Sentence Transformers model.
        args: its training arguments.
        mixture: what it is trained on.
        settings: every setting that the result depends on, see `ResumableTrainer`.
        kwargs: for Sentence Transformers' trainer of this kind of model, such as `loss` and `evaluator`.

    Raises:
        ValueError: if a dataset has not enough different rows for a batch. For the rest, see `ResumableTrainer`.
    """

    # Every kind has a class of its own with the same fields.
    training_args_class = SentenceTransformerTrainingArguments

    def __init__(self, model: BaseModel, args: EmbeddingArguments, mixture: Mixture, settings: dict, **kwargs):
        self.mixture = mixture
        super().__init__(model, args, mixture.datasets, settings=settings, **kwargs)
        if self.engine != "plain":
            # Sentence Transformers saves the module as it is, which is a shard there.
            raise ValueError(
                "FSDP and DeepSpeed would save incomplete models here: use DDP (configs/accelerate/ddp.yaml)."
            )

    def run(self, checkpoint: Path | None, start: str) -> None:
        """Train to the end, evaluate, write `model/` and `log.json`, and leave the process group.

        Args:
            checkpoint: where an interrupted run goes on, if there was one.
            start: what is trained otherwise, for the message.
        """
        check_launch(self.accelerator)
        if self.is_world_process_zero():
            print(self.describe(), flush=True)
            print(f"resuming from {checkpoint}" if checkpoint else f"starting from {start}", flush=True)
        self.train_to_the_end(checkpoint)
        if self.evaluator is not None and not self.evaluated_at_the_end():
            self.evaluate()
        output = Path(self.args.output_dir)
        self.save_whole(output / "model")
        if self.is_world_process_zero():
            write_json(output / "log.json", self.state.log_history)
            print(f"{output / 'model'}, {output / 'log.json'}", flush=True)
        end_processes(self.accelerator)

    def describe(self) -> str:
        """The datasets, the size of the model, and the machine."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        machine = f"{self.args.world_size} x {self.args.device.type}"
        micro_batches = f"{self.args.gradient_accumulation_steps} batches a step and process"
        return "\n".join([*self.mixture.describe(), f"{parameters:,} parameters; {machine}; {micro_batches}"])

    def evaluated_at_the_end(self) -> bool:
        """Whether the last step was one of those that evaluation follows."""
        steps = [entry["step"] for entry in self.state.log_history if "eval_runtime" in entry]
        return self.args.max_steps in steps

    def get_batch_sampler(self, dataset, batch_size, drop_last, valid_label_columns=None, generator=None, seed=0):
        name = next(name for name, rows in self.train_dataset.items() if rows is dataset)
        batch_size = self.mixture.batch_sizes[name]
        # Not the hard negatives: that two rows have none would count as a text in common.
        texts = dataset.with_format(None).select_columns(["query", "positive"])
        sampler = super().get_batch_sampler(texts, batch_size, drop_last, valid_label_columns, torch.Generator(), seed)
        if len(next(iter(sampler), [])) < batch_size:
            raise ValueError(
                f"Dataset {name} has {len(dataset):,} rows and not {batch_size} of them without a text in common, as a "
                "batch needs. Give it a smaller `batch_size`, or add data."
            )
        return sampler

    def get_multi_dataset_batch_sampler(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], generator=None, seed=0
    ) -> MixtureBatchSampler:
        draws = draw_datasets(self.mixture.sizes, self.mixture.alpha, self.args.max_steps, seed)
        batches_per_step = self.args.world_size * self.args.gradient_accumulation_steps
        return MixtureBatchSampler(dataset, batch_samplers, draws, batches_per_step)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        # Transformers calls this on every process and checks inside its own; Sentence Transformers' does not check.
        if self.args.should_save:
            super()._save(output_dir, state_dict)


class EmbeddingTrainer(MixtureTrainer, SentenceTransformerTrainer):
    """Of dense embeddings. See `MixtureTrainer`."""

    data_collator_class = ContrastiveCollator


class SparseTrainer(MixtureTrainer, SparseEncoderTrainer):
    """Of sparse embeddings (SPLADE). See `MixtureTrainer`."""

    data_collator_class = ContrastiveCollator


class MultiVectorTrainer(MixtureTrainer, MultiVectorEncoderTrainer):
    """Of late interaction (ColBERT). See `MixtureTrainer`."""

    data_collator_class = MultiVectorCollator


class RerankerTrainer(MixtureTrainer, CrossEncoderTrainer):
    """Of rerankers; `data_collator` sets how many wrong documents a query gets. See `MixtureTrainer`."""

    data_collator_class = RerankingCollator
