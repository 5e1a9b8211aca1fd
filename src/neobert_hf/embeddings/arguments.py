"""Settings that the recipes for embedding models and rerankers share. Those of one recipe stand with it."""

from dataclasses import dataclass, field, fields
from typing import ClassVar

from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import SchedulerType

from neobert_hf.common.settings import check_numbers
from neobert_hf.training.arguments import BF16, fix, follow_hardware, refused_by


# The end of the name of the metric by which the best weights are chosen.
NDCG = "ndcg@10"
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


@dataclass
class EmbeddingArguments(SentenceTransformerTrainingArguments):
    """Sentence Transformers' arguments with the defaults of the paper (section 5.2.1, appendix D) and its code."""

    refused: ClassVar = refused_by(FIXED, UNUSED)

    max_steps: int = field(default=2_000, metadata={"help": "optimizer steps"})
    per_device_train_batch_size: int = field(
        default=64,
        metadata={
            "help": "rows of a batch without hard negatives; batches with hard negatives have fewer rows, so that "
            "the number of texts stays the same"
        },
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "peak value"})
    lr_scheduler_type: SchedulerType | str = field(
        default="constant_with_warmup", metadata={"help": "a schedule of Transformers"}
    )
    warmup_steps: float = field(default=2_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    weight_decay: float = field(default=0.01, metadata={"help": "decoupled; not on norms and biases"})
    adam_beta2: float = field(default=0.95, metadata={"help": "decay rate of the second moment"})
    bf16: bool | None = field(default=None, metadata=BF16)
    report_to: str | None = field(default="tensorboard", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    logging_steps: float = field(default=20, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=500, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=2, metadata={"help": "number of complete checkpoints to keep"})
    load_best_model_at_end: bool = field(
        default=False, metadata={"help": "end with the weights of the best evaluation, not with the last ones"}
    )
    metric_for_best_model: str | None = field(
        default=None, metadata={"help": "a metric in log.json; nDCG@10 of the retrieval if unset"}
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "with `load_best_model_at_end`: stop after this many evaluations without a better score"},
    )

    def __post_init__(self):
        check_numbers(self, {"max_steps": "1 or more", "early_stopping_patience": "1 or more"})
        fix(self, FIXED, UNUSED)
        follow_hardware(self)
        if self.early_stopping_patience is not None and not self.load_best_model_at_end:
            raise ValueError(
                f"`early_stopping_patience` is {self.early_stopping_patience}; it needs `load_best_model_at_end: true`."
            )
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            # Transformers would take the loss, which these recipes do not evaluate. The trainer adds what is ranked.
            self.metric_for_best_model = NDCG
        # A callback counts the evaluations without improvement.
        self.restore_callback_states_from_checkpoint = True
        super().__post_init__()


@dataclass
class PairSettings:
    """The model to train, and the data to train it on.

    The pairs are one table, `pairs`, which from Python may be one in memory, or those of the mixture in `datasets`.
    """

    # Whether the recipe learns numbers that the data give to pairs.
    learns_scores: ClassVar = False

    model: str = field(metadata={"help": "an encoder: path or Hub id", "path": "or Hub id"})
    pairs: str | None = field(
        default=None,
        metadata={
            "help": "a table of pairs, in place of `datasets`: file, pattern, folder or Hub dataset",
            "path": "or Hub id",
        },
    )
    query: str = field(default="query", metadata={"help": "column of `pairs` with the queries"})
    positive: str = field(default="positive", metadata={"help": "column of `pairs` with a right text for each query"})
    instruction: str = field(default="", metadata={"help": "what is put before the queries of `pairs`"})
    held_out: float = field(
        default=0.1,
        metadata={
            "help": "share of the queries of `pairs` that are not trained on, at most 1,000; retrieval is measured "
            "with them; 0 for none"
        },
    )
    datasets: str | None = field(
        default=None, metadata={"help": "YAML file that describes a mixture of datasets", "path": True}
    )
    only: list[str] = field(default_factory=list, metadata={"help": "use these datasets of the file; all if empty"})
    max_length: int = field(default=1024, metadata={"help": "tokens; longer texts are cut"})
    max_negatives: int | None = field(
        default=None, metadata={"help": "use at most this many hard negatives of a row; all if unset"}
    )
    alpha: float = field(
        default=0.5, metadata={"help": "datasets are drawn in proportion to their size to the power of this"}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        if self.pairs is None and self.datasets is None:
            raise ValueError("There is nothing to train on: give a table as `pairs`, or a YAML file as `datasets`.")
        ranges = {"held_out": "0 or more and below 1", "max_length": "1 or more", "max_negatives": "0 or more"}
        check_numbers(self, ranges | {"alpha": "a number"})

    def models(self) -> dict[str, str]:
        """The models that the run reads, by the name of their setting."""
        names = [
            each.name for each in fields(self) if each.metadata.get("path") == "or Hub id" and each.name != "pairs"
        ]
        return {name: path for name in names if (path := getattr(self, name)) is not None}


@dataclass
class MiningSettings(PairSettings):
    """How hard negatives are found for the datasets that have none; see `mining.py`."""

    miner: str | None = field(
        default=None,
        metadata={"help": "embedding model that finds hard negatives where a dataset has none", "path": "or Hub id"},
    )
