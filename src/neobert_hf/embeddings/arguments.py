"""Settings of the recipes that train embedding models and rerankers."""

from dataclasses import dataclass, field

from sentence_transformers import SentenceTransformerTrainingArguments

from neobert_hf.training.adapters import LoraArguments
from neobert_hf.training.arguments import BF16, fix, follow_hardware


# What these recipes need of Transformers' settings.
FIXED = {
    # A short last batch would have fewer negatives.
    "dataloader_drop_last": True,
    # Skipping the batches already trained on makes a resume exact. It only draws their row numbers again.
    "ignore_data_skip": False,
}
# Settings that these recipes do not use, each with the setting that takes its place, if there is one.
UNUSED = {
    "num_train_epochs": "max_steps",
    "data_seed": "seed",
    "multi_dataset_batch_sampler": "alpha",
    "batch_sampler": None,
    "prompts": "datasets",
    "label_smoothing_factor": None,
    "train_sampling_strategy": None,
}
# The settings that name models.
MODELS = ("model", "miner", "guide", "first_model")


@dataclass
class EmbeddingArguments(SentenceTransformerTrainingArguments):
    """Sentence Transformers' arguments with the defaults of the paper (section 5.2.1, appendix D) and its code."""

    max_steps: int = field(default=2_000, metadata={"help": "optimizer steps"})
    per_device_train_batch_size: int = field(
        default=64,
        metadata={
            "help": "rows of a batch without hard negatives; batches with hard negatives have fewer rows, so that "
            "the number of texts stays the same"
        },
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "peak value"})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "a schedule of Transformers"})
    warmup_steps: float = field(default=2_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    weight_decay: float = field(default=0.01, metadata={"help": "decoupled; not on norms and biases"})
    adam_beta2: float = field(default=0.95, metadata={"help": "decay rate of the second moment"})
    bf16: bool | None = field(default=None, metadata=BF16)
    report_to: str | None = field(default="tensorboard", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    logging_steps: float = field(default=20, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=500, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=2, metadata={"help": "number of complete checkpoints to keep"})

    def __post_init__(self):
        fix(self, FIXED, UNUSED)
        follow_hardware(self)
        super().__post_init__()


@dataclass
class RecipeArguments:
    """The model to train, and the data to train it on."""

    model: str = field(metadata={"help": "an encoder: path or Hub id", "path": "or Hub id"})
    datasets: str = field(metadata={"help": "YAML file that describes the datasets", "path": True})
    only: list[str] = field(default_factory=list, metadata={"help": "use these datasets of the file; all if empty"})
    max_length: int = field(default=1024, metadata={"help": "tokens; longer texts are cut"})
    max_negatives: int | None = field(
        default=None, metadata={"help": "use at most this many hard negatives of a row; all if unset"}
    )
    alpha: float = field(
        default=0.5, metadata={"help": "datasets are drawn in proportion to their size to the power of this"}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def models(self) -> dict[str, str]:
        """The models that the run reads, by the name of their setting."""
        return {name: path for name in MODELS if (path := getattr(self, name, None)) is not None}


@dataclass
class MiningArguments(RecipeArguments):
    """How hard negatives are found for the datasets that have none; see `mining.py`."""

    miner: str | None = field(
        default=None,
        metadata={"help": "embedding model that finds hard negatives where a dataset has none", "path": "or Hub id"},
    )


@dataclass
class DenseArguments(LoraArguments, MiningArguments):
    """The model, the data and the loss of dense embeddings."""

    temperature: float = field(
        default=0.07, metadata={"help": "the cosine similarities in the loss are divided by this"}
    )
    mini_batch_size: int | None = field(
        default=None, metadata={"help": "texts computed at a time, for batches that do not fit in memory (GradCache)"}
    )
    matryoshka_dims: list[int] = field(
        default_factory=list, metadata={"help": "also train prefixes of the embeddings of these lengths"}
    )
    guide: str | None = field(
        default=None,
        metadata={
            "help": "embedding model that decides which texts of a batch are not used as negatives (GIST)",
            "path": "or Hub id",
        },
    )
    negatives: int | None = field(
        default=None, metadata={"help": "with `miner`: mine at most this many hard negatives for a row"}
    )

    def __post_init__(self):
        super().__post_init__()
        if (self.miner is None) != (self.negatives is None):
            raise ValueError(
                f"`miner` is {self.miner!r} and `negatives` is {self.negatives}: set both, or leave both out."
            )


@dataclass
class SparseArguments(RecipeArguments):
    """The model, the data and the sparsity of sparse embeddings (regularisers: https://arxiv.org/abs/2205.04733)."""

    query_weight: float = field(default=5e-5, metadata={"help": "weight of the FLOPS regulariser of queries"})
    document_weight: float = field(default=3e-5, metadata={"help": "weight of the FLOPS regulariser of documents"})


@dataclass
class RerankerArguments(LoraArguments, MiningArguments):
    """The model, the data and the negatives of a reranker."""

    negatives: int = field(
        default=4,
        metadata={"help": "negatives of a query: first its hard negatives, then right documents of other rows"},
    )


@dataclass
class ContextualArguments(RecipeArguments):
    """The model, the data and the context. The help texts say where a default comes from."""

    temperature: float = field(
        default=0.02, metadata={"help": "the cosine similarities are divided by this (reference code)"}
    )
    mini_batch_size: int = field(
        default=32, metadata={"help": "texts computed at a time; the trained weights do not depend on it"}
    )
    max_negatives: int | None = field(
        default=0, metadata={"help": "use at most this many hard negatives of a row (paper: none); all if unset"}
    )
    context_size: int = field(default=512, metadata={"help": "documents in a context (paper)"})
    context_dropout: float = field(
        default=0.005,
        metadata={"help": "share of the context that is hidden in training (Morris and Rush; reference code: 0)"},
    )
    soft_prompts: int = field(default=8, metadata={"help": "learned vectors after the context (reference code)"})
    text_position: int = field(
        default=0, metadata={"help": "position of a text's first token: 0 (ours) or `context_size` (reference code)"}
    )
    first_model: str = field(
        kw_only=True,
        metadata={"help": "embedding model that finds clusters and false negatives", "path": "or Hub id"},
    )
    false_negative_margin: float | None = field(
        default=0.0,
        metadata={
            "help": "a document is not used as a negative of a query if the first model scores it above the right "
            "document's score minus this (ours; the paper does not say); if unset, all documents are used"
        },
    )

    @property
    def context(self) -> dict[str, float]:
        """Those of the settings that the model's config holds."""
        names = ("context_size", "context_dropout", "soft_prompts", "text_position")
        return {name: getattr(self, name) for name in names}
