"""Sentence Transformers' trainers with the paper's mixture of datasets and checkpoints that are whole or not used."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import DatasetDict
from sentence_transformers import (
    CrossEncoderTrainer,
    MultiVectorEncoderTrainer,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoderTrainer,
)
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch.utils.data import BatchSampler, ConcatDataset

from neobert_hf.common.atomic_writes import write_json
from neobert_hf.common.token_limits import tokens_read
from neobert_hf.embeddings.batches import (
    ContrastiveCollator,
    MultiVectorCollator,
    RerankingCollator,
    TemperatureBatchSampler,
    sampling_probabilities,
)
from neobert_hf.training.arguments import check_fixed
from neobert_hf.training.launching import check_launch, end_processes
from neobert_hf.training.trainer import ResumableTrainer


# Settings of Transformers that would undo what this recipe promises, and the only values it runs with.
FIXED = {
    # A short last batch would have fewer negatives.
    "dataloader_drop_last": True,
    # Skipping is what makes a resume exact; only row numbers are drawn again.
    "ignore_data_skip": False,
    # It would hide NaN from the logged loss.
    "logging_nan_inf_filter": False,
    "auto_find_batch_size": False,
    "load_best_model_at_end": False,
    "save_only_model": False,
}


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
        # Others let a text into a batch twice, where it is a false negative, and not all are drawn by the seed.
        if self.batch_sampler not in (allowed := ("no_duplicates", "no_duplicates_hashed")):
            raise ValueError(f"`batch_sampler` is {self.batch_sampler}; this recipe needs {' or '.join(allowed)}.")
        super().__post_init__()
        check_fixed(self, FIXED)


def load_transformer(
    model: str, max_length: int, trust_remote_code: bool = False, task: str = "feature-extraction"
) -> Transformer:
    """The first module of every kind of model, in float32.

    Args:
        model: path or Hub id. Of a Sentence Transformers model, the encoder and its tokenizer are used.
        max_length: tokens; longer texts are cut. Never more than the model has positions for.
        trust_remote_code: run code from the model's repository.
        task: which head it has: `feature-extraction` (none), `fill-mask` or `sequence-classification`.
    """
    # Some checkpoints (DeBERTa-v3) are 16-bit, in which AdamW's steps get lost.
    options = {"trust_remote_code": trust_remote_code}
    transformer = Transformer(
        model,
        transformer_task=task,
        model_kwargs={"dtype": torch.float32} | options,
        processor_kwargs=options,
        config_kwargs=options,
    )
    transformer.max_seq_length = tokens_read(transformer.model, max_length, transformer.max_seq_length)
    return transformer


def build_encoder(model: str, max_length: int, trust_remote_code: bool = False) -> SentenceTransformer:
    """Any Transformers encoder with mean pooling and cosine similarity; arguments as of `load_transformer`."""
    transformer = load_transformer(model, max_length, trust_remote_code)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[transformer, pooling], similarity_fn_name="cosine")


def build_loss(
    model: SentenceTransformer, temperature: float, mini_batch_size: int | None, dimensions: list[int]
) -> torch.nn.Module:
    """InfoNCE over the batch: each query against all its documents and hard negatives.

    Args:
        model: what is trained.
        temperature: of the cosine similarities.
        mini_batch_size: compute so many texts at a time (GradCache), for batches that do not fit in memory. The
            gradients are the same. Whole batches if None.
        dimensions: train these prefixes of the embeddings as well (Matryoshka). None if empty.

    References:
        The paper, section 5.2.1; https://arxiv.org/abs/2101.06983 (GradCache), https://arxiv.org/abs/2205.13147
        (Matryoshka).
    """
    if temperature <= 0:
        raise ValueError(f"`temperature` is {temperature}; it must be above 0.")
    size = model.get_embedding_dimension()
    if any(not 0 < dimension <= size for dimension in dimensions):
        raise ValueError(f"`matryoshka_dims` is {dimensions}; the model allows 1 to {size}.")
    if mini_batch_size is None:
        loss = MultipleNegativesRankingLoss(model, scale=1 / temperature)
    else:
        loss = CachedMultipleNegativesRankingLoss(model, scale=1 / temperature, mini_batch_size=mini_batch_size)
    # The full size stays what it was trained for.
    return MatryoshkaLoss(model, loss, sorted({size, *dimensions}, reverse=True)) if dimensions else loss


class MixtureTrainer(ResumableTrainer):
    """Training on several datasets: the part that all kinds of models share.

    Args:
        model: with a loss for it.
        train_dataset: rows of `query`, `positive` and `negatives`, by name.
        batch_sizes: rows of a batch, by name.
        alpha: see `sampling_probabilities`.
        settings: see `ResumableTrainer`, as for what else is raised.

    Raises:
        ValueError: if a dataset has not enough different rows for a batch.
    """

    # Every kind has a class of its own with the same fields.
    training_args_class = SentenceTransformerTrainingArguments

    def __init__(
        self,
        model: BaseModel,
        args: EmbeddingArguments,
        train_dataset: DatasetDict,
        batch_sizes: dict[str, int],
        alpha: float,
        settings: dict,
        **kwargs,
    ):
        self.batch_sizes = batch_sizes
        self.alpha = alpha
        super().__init__(model, args, train_dataset, settings=settings, **kwargs)
        if self.engine != "plain":
            # Sentence Transformers saves the module as it is, which is a shard there.
            raise ValueError(
                "FSDP and DeepSpeed would save incomplete models here: use DDP (configs/accelerate/ddp.yaml)."
            )

    def run(self, resume: Path | None, start: str) -> None:
        """Train to the end, evaluate, write `model/` and `log.json`, and leave the process group.

        Args:
            resume: the checkpoint to go on from, if there is one.
            start: what is trained otherwise, for the message.
        """
        check_launch(self.accelerator)
        if self.is_world_process_zero():
            print(self.describe(), flush=True)
            print(f"resuming from {resume}" if resume else f"starting from {start}", flush=True)
        self.train_to_the_end(resume)
        evaluated = any(
            "eval_runtime" in entry and entry["step"] == self.args.max_steps for entry in self.state.log_history
        )
        if self.evaluator is not None and not evaluated:
            self.evaluate()
        output = Path(self.args.output_dir)
        self.save_whole(output / "model")
        if self.is_world_process_zero():
            write_json(output / "log.json", self.state.log_history)
            print(f"{output / 'model'}, {output / 'log.json'}", flush=True)
        end_processes(self.accelerator)

    def describe(self) -> str:
        """The datasets with their sizes, probabilities and batches, and the machine."""
        lines = [f"{'dataset':<20}{'rows':>12}{'drawn':>8}{'rows of a batch':>17}"]
        rows = {name: len(dataset) for name, dataset in self.train_dataset.items()}
        for name, probability in zip(rows, sampling_probabilities(list(rows.values()), self.alpha).tolist()):
            lines.append(f"{name:<20}{rows[name]:>12,}{probability:>8.1%}{self.batch_sizes[name]:>17}")
        arguments = self.args
        lines.append(
            f"{sum(parameter.numel() for parameter in self.model.parameters()):,} parameters; {arguments.world_size} x "
            f"{arguments.device.type}; {arguments.gradient_accumulation_steps} batches a step and process"
        )
        return "\n".join(lines)

    # Data

    def get_batch_sampler(self, dataset, batch_size, drop_last, valid_label_columns=None, generator=None, seed=0):
        name = next(name for name, part in self.train_dataset.items() if part is dataset)
        # Not the hard negatives: that two rows have none would count as a text in common.
        texts = dataset.with_format(None).select_columns(["query", "positive"])
        sampler = super().get_batch_sampler(
            texts, self.batch_sizes[name], drop_last, valid_label_columns, torch.Generator(), seed
        )
        first = next(iter(sampler), [])
        if len(first) < self.batch_sizes[name]:
            raise ValueError(
                f"Dataset {name} has {len(dataset):,} rows and not {self.batch_sizes[name]} of them without a text in "
                "common, as a batch needs. Give it a smaller `batch_size`, or add data."
            )
        return sampler

    def get_multi_dataset_batch_sampler(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], generator=None, seed=0
    ) -> TemperatureBatchSampler:
        batches = self.args.world_size * self.args.gradient_accumulation_steps
        return TemperatureBatchSampler(dataset, batch_samplers, self.args.max_steps, batches, self.alpha, seed)

    # Checkpoints

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
