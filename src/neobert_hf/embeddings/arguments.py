"""Settings of the recipes that train embedding models and rerankers."""

from dataclasses import dataclass, field
from typing import Annotated

from sentence_transformers import SentenceTransformerTrainingArguments

from neobert_hf.common.settings import (
    Count,
    CountOrZero,
    LocalPath,
    NotNegative,
    PathOrId,
    Positive,
    Range,
    RangedSettings,
    Share,
    check_needed,
)
from neobert_hf.training.adapters import LoraArguments
from neobert_hf.training.arguments import check_fixed, check_inherited, check_unused


# What these recipes fix beside the settings that all recipes fix.
FIXED = {
    # A short last batch would have fewer negatives.
    "dataloader_drop_last": True,
    # Skipping is what makes a resume exact; only row numbers are drawn again.
    "ignore_data_skip": False,
}
# Settings that these recipes do not use, and their own setting in its place, if there is one.
UNUSED = {
    "num_train_epochs": "max_steps",
    "data_seed": "seed",
    "multi_dataset_batch_sampler": "alpha",
    "label_smoothing_factor": None,
    "train_sampling_strategy": None,
}
# Others let a text into a batch twice, where it is a false negative, and not all are drawn by the seed.
BATCH_SAMPLERS = ("no_duplicates", "no_duplicates_hashed")
# Named after what of the teacher is learned, by which loss of Sentence Transformers.
DISTILLATIONS = ("margin_mse", "kl", "mse")


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
        check_inherited(self)
        if self.batch_sampler not in BATCH_SAMPLERS:
            raise ValueError(
                f"`batch_sampler` is {self.batch_sampler}; this recipe needs {' or '.join(BATCH_SAMPLERS)}."
            )
        super().__post_init__()
        check_fixed(self, FIXED)
        check_unused(self, SentenceTransformerTrainingArguments, UNUSED)


@dataclass
class RecipeArguments(RangedSettings):
    """What is trained, on which data."""

    model: PathOrId = field(metadata={"help": "an encoder: path or Hub id"})
    datasets: LocalPath = field(metadata={"help": "YAML file that describes the datasets"})
    only: list[str] = field(default_factory=list, metadata={"help": "use these datasets of the file; all if empty"})
    max_length: Annotated[int, Range(3)] = field(default=1024, metadata={"help": "tokens; longer texts are cut"})
    max_negatives: CountOrZero | None = field(default=None, metadata={"help": "hard negatives of a row; all if unset"})
    alpha: Annotated[float, Range(0, 10)] = field(
        default=0.5, metadata={"help": "datasets are drawn by their size to the power of this"}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


@dataclass
class MiningArguments(RecipeArguments):
    """How hard negatives are found for the datasets that have none; see `mining.py`.

    The two margins and the cross-encoder are called as in Sentence Transformers' `mine_hard_negatives`.
    """

    miner: PathOrId | None = field(
        default=None, metadata={"help": "embedding model that finds hard negatives where a dataset has none"}
    )
    relative_margin: Share = field(
        # 95% of the right document's score: the best of the filters that NV-Retriever compares (arXiv 2407.15831,
        # TopK-PercPos), and what Sentence Transformers recommends.
        default=0.05,
        metadata={"help": "with `miner`: leave out what scores above the right document less this share of its score"},
    )
    absolute_margin: NotNegative | None = field(
        # The same paper's TopK-MarginPos, which it uses with 0.05, of cosines.
        default=None,
        metadata={"help": "with `miner`: leave out what scores less than this below the right document, too"},
    )
    cross_encoder: PathOrId | None = field(
        default=None,
        metadata={"help": "with `miner`: reranker whose scores take the miner's place in both margins"},
    )

    def __post_init__(self):
        super().__post_init__()
        check_needed(self, "miner", ("absolute_margin", "cross_encoder"))


@dataclass
class DistillationArguments(RecipeArguments):
    """From which model is learned, and what of it; see `distillation.py`."""

    teacher: PathOrId | None = field(
        default=None, metadata={"help": "embedding model or reranker whose scores or embeddings are learned"}
    )
    distillation: str | None = field(
        default=None, metadata={"help": "margin_mse or kl, of the scores of a row's documents; mse, of embeddings"}
    )
    teacher_temperature: Positive | None = field(
        default=None,
        metadata={"help": "the teacher's scores are divided by it; if unset, cosines by `temperature`, others by 1"},
    )
    contrastive_weight: NotNegative | None = field(
        default=None, metadata={"help": "of the contrastive loss beside distillation; none if unset"}
    )
    teacher_dir: LocalPath | None = field(
        default=None, metadata={"help": "where the teacher's results are kept; `output_dir`/teacher if unset"}
    )

    def __post_init__(self):
        super().__post_init__()
        if (self.teacher is None) != (self.distillation is None):
            raise ValueError(
                f"`teacher` is {self.teacher!r} and `distillation` is {self.distillation!r}: set both, or leave both "
                "out."
            )
        if self.distillation not in (None, *DISTILLATIONS):
            raise ValueError(f"`distillation` is {self.distillation!r}; it must be one of {', '.join(DISTILLATIONS)}.")
        check_needed(self, "teacher", ("teacher_temperature", "contrastive_weight", "teacher_dir"))


@dataclass
class DenseArguments(DistillationArguments, LoraArguments, MiningArguments):
    """What is trained, on which data, with which loss."""

    temperature: Annotated[float, Range(1e-6)] = field(
        default=0.07, metadata={"help": "of the cosine similarities in the loss"}
    )
    mini_batch_size: Count | None = field(
        default=None, metadata={"help": "texts computed at a time, for batches beyond the memory (GradCache)"}
    )
    matryoshka_dims: list[Count] = field(
        default_factory=list, metadata={"help": "train these prefixes of the embeddings as well"}
    )
    guide: PathOrId | None = field(
        default=None, metadata={"help": "embedding model that tells which texts of a batch are no negatives (GIST)"}
    )
    negatives: Count | None = field(default=None, metadata={"help": "with `miner`: of a row, at most so many"})
    whiten: CountOrZero = field(
        default=0, metadata={"help": "texts by which a linear layer after the pooling is made that whitens; 0: none"}
    )

    def __post_init__(self):
        super().__post_init__()
        if (self.miner is None) != (self.negatives is None):
            raise ValueError(
                f"`miner` is {self.miner!r} and `negatives` is {self.negatives}: set both, or leave both out."
            )
        if self.distillation is not None:
            self._check_distillation()

    def _check_distillation(self) -> None:
        """Refuse what has no meaning beside a teacher."""
        reasons = {
            "guide": "the teacher tells by itself how well a document fits a query",
            "mini_batch_size": "no loss of distillation computes its batches in parts",
        }
        if self.distillation == "mse":
            reasons |= {
                "miner": "embeddings are learned of queries and their right documents, and no others",
                "teacher_temperature": "embeddings are learned as they are",
                "matryoshka_dims": "a prefix of the teacher's embeddings need not mean anything",
            }
        for name, reason in reasons.items():
            if value := getattr(self, name):
                raise ValueError(
                    f"`{name}` is {value!r} and `distillation` is {self.distillation}: leave one of them out, since "
                    f"{reason}."
                )


@dataclass
class SparseArguments(RecipeArguments):
    """What is trained, on which data, and how sparse it becomes (regularisers: https://arxiv.org/abs/2205.04733)."""

    query_weight: NotNegative = field(default=5e-5, metadata={"help": "of the FLOPS regulariser of queries"})
    document_weight: NotNegative = field(default=3e-5, metadata={"help": "of the FLOPS regulariser of documents"})


@dataclass
class RerankerArguments(LoraArguments, MiningArguments):
    """What is trained, on which data, against which documents."""

    negatives: Count = field(
        default=4, metadata={"help": "wrong documents of a query: its hard negatives, then others"}
    )
    # With them a small model learned nothing in 300 steps; see benchmarks/NOTES.md.
    instructions: bool = field(
        default=False, metadata={"help": "put the instruction of a dataset before its queries, as embedding models do"}
    )
