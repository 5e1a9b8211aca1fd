"""The Sentence Transformers trainer with the paper's mixture of datasets and checkpoints that are whole or not used."""

from dataclasses import dataclass, field

import torch
from datasets import DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch.utils.data import BatchSampler, ConcatDataset

from neobert_hf.embedding_batches import ContrastiveCollator, TemperatureBatchSampler
from neobert_hf.resumable import ResumableTrainer, check_fixed


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
        super().__post_init__()
        check_fixed(self, FIXED)


def build_encoder(model: str, max_length: int, trust_remote_code: bool = False) -> SentenceTransformer:
    """Any Transformers encoder with mean pooling and cosine similarity.

    Args:
        model: path or Hub id. Of a Sentence Transformers model, the encoder and its tokenizer are used.
        max_length: tokens; longer texts are cut. Never more than the model has positions for.
        trust_remote_code: run code from the model's repository.
    """
    # Some checkpoints (DeBERTa-v3) are 16-bit, in which AdamW's steps get lost.
    options = {"trust_remote_code": trust_remote_code}
    transformer = Transformer(
        model,
        model_kwargs={"dtype": torch.float32} | options,
        processor_kwargs=options,
        config_kwargs=options,
    )
    transformer.max_seq_length = min(max_length, transformer.max_seq_length or max_length)
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


class EmbeddingTrainer(ResumableTrainer, SentenceTransformerTrainer):
    """Contrastive training on several datasets.

    Args:
        model: with the loss from `build_loss`.
        train_dataset: rows of `query`, `positive` and `negatives`, by name.
        batch_sizes: rows of a batch, by name.
        alpha: see `sampling_probabilities`.
        settings: see `ResumableTrainer`, as for what else is raised.

    Raises:
        ValueError: if a dataset has not enough different rows for a batch.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        args: EmbeddingArguments,
        train_dataset: DatasetDict,
        batch_sizes: dict[str, int],
        alpha: float,
        settings: dict,
        **kwargs,
    ):
        self.batch_sizes = batch_sizes
        self.alpha = alpha
        collator = ContrastiveCollator(preprocess_fn=model.preprocess, prompts=args.prompts)
        super().__init__(model, args, train_dataset, data_collator=collator, settings=settings, **kwargs)
        if self.engine != "plain":
            # Sentence Transformers saves the module as it is, which is a shard there.
            raise ValueError(
                "FSDP and DeepSpeed would save incomplete models here: use DDP (configs/accelerate/ddp.yaml)."
            )

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
