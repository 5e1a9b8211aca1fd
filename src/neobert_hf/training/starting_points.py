"""Models to fine-tune: any Transformers encoder with a new head, from one checkpoint or the average of several."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints


# The names of the setting for dropout before the head, by model type, where it is not `classifier_dropout`.
DROPOUTS = {
    "albert": ("classifier_dropout_prob",),
    "deberta": ("cls_dropout",),
    "deberta-v2": ("cls_dropout",),
    "distilbert": ("seq_classif_dropout", "qa_dropout"),
}


@dataclass
class StartingPoint:
    """What fine-tuning starts from.

    Args:
        model: path or Hub id of the configuration, the tokenizer and, without `backbone`, the weights.
        name: the model's name in result files.
        backbone: checkpoints to take the backbone's weights from instead; several are averaged.
        trust_remote_code: run code from the model's repository.
    """

    model: str
    name: str = ""
    backbone: list[Path] = field(default_factory=list)
    trust_remote_code: bool = False

    def __post_init__(self):
        check_model_exists(self.model, "model")

    def fingerprint(self) -> str:
        """A text that identifies these weights, since others may have the same name."""
        return " + ".join(map(model_fingerprint, self.backbone or [self.model]))


def newest_checkpoints(run: str, number: int) -> list[Path]:
    """The newest complete checkpoints of a pretraining run, oldest first."""
    checkpoints = complete_checkpoints(Path(run))
    if not 1 <= number <= len(checkpoints):
        raise CheckpointError(
            f"{run} holds {len(checkpoints)} complete checkpoints, but `average_checkpoints` is {number}. Give the "
            "folder of a pretraining run as `model`; `save_total_limit` sets how many a run keeps."
        )
    return checkpoints[-number:]


def task_config(
    start: StartingPoint, labels: list[str] | None, problem: str | None, dropout: float
) -> PreTrainedConfig:
    """The model's configuration with the settings of its new head.

    Args:
        labels: the names of the head's outputs, in order; None keeps those of the configuration.
        problem: `problem_type` of Transformers, for text classifiers.
        dropout: the dropout before the head, for models that have a setting for it.
    """
    config = AutoConfig.from_pretrained(start.model, trust_remote_code=start.trust_remote_code)
    if labels is not None:
        # These two also set `num_labels`.
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    config.problem_type = problem
    for name in DROPOUTS.get(config.model_type, ("classifier_dropout",)):
        setattr(config, name, dropout)
    return config


def build_model(start: StartingPoint, auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Any Transformers encoder in float32, with a new head.

    Args:
        auto_class: the class with the head, such as `AutoModelForTokenClassification`.
        config: from `task_config`.
    """
    # Some checkpoints (DeBERTa-v3) are 16-bit, a precision in which AdamW's small steps are rounded away.
    options = {"config": config, "dtype": torch.float32, "trust_remote_code": start.trust_remote_code}
    if not start.backbone:
        return auto_class.from_pretrained(start.model, **options)
    model = auto_class.from_config(**options)
    load_backbone(model, start.backbone)
    return model


def tokenizer_of(start: StartingPoint) -> PreTrainedTokenizerBase:
    options = {"trust_remote_code": start.trust_remote_code}
    config = AutoConfig.from_pretrained(start.model, **options)
    return load_tokenizer(start.model, getattr(config, "vocab_size", None), **options)


def load_backbone(classifier: PreTrainedModel, checkpoints: list[Path]) -> None:
    """Load the backbone's weights from a checkpoint, or the mean of several, in float32; the head stays as it is.

    Raises:
        ValueError: if a checkpoint lacks weights of the backbone.
    """
    prefix, means = f"{classifier.base_model_prefix}.", {}
    for checkpoint in checkpoints:
        # With the class of the classifier, since its names are known to fit. The head of this copy is not used.
        options = {"config": classifier.config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
        loaded, report = type(classifier).from_pretrained(checkpoint, output_loading_info=True, **options)
        # Masked language models have no pooler. It is new then, like the head.
        found = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
        if wrong := sorted(name for name in found if name.startswith(prefix) and ".pooler." not in name):
            raise ValueError(f"{checkpoint} is of another backbone: it has no {wrong[0]} of this shape.")
        for name, tensor in loaded.base_model.state_dict().items():
            means[name] = means.get(name, 0) + tensor / len(checkpoints)
    classifier.base_model.load_state_dict(means)
