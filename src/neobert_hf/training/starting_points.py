"""Models to fine-tune: any Transformers encoder with a new head, from one checkpoint or the average of several."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints, read_progress


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
    for checkpoint in checkpoints[-number:]:
        read_progress(checkpoint)
    return checkpoints[-number:]


def task_config(
    start: StartingPoint, labels: list[str] | None, problem: str | None, dropout: float
) -> PreTrainedConfig:
    """The model's configuration with the settings of its new head.

    Args:
        labels: the names of the head's outputs, in order; None keeps those of the configuration.
        problem: `problem_type` of Transformers, for text classifiers.
        dropout: the dropout before the head.
    """
    config = AutoConfig.from_pretrained(start.model, trust_remote_code=start.trust_remote_code)
    if labels is not None:
        # These two also set `num_labels`.
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    config.problem_type = problem
    for name in _dropout_names(config):
        setattr(config, name, dropout)
    return config


def _dropout_names(config: PreTrainedConfig) -> tuple[str, ...]:
    return DROPOUTS.get(config.model_type, ("classifier_dropout",))


def build_model(start: StartingPoint, auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Any Transformers encoder in float32, with a new head.

    Args:
        auto_class: the class with the head, such as `AutoModelForTokenClassification`.
        config: from `task_config`.
    """
    # Some checkpoints (DeBERTa-v3) are 16-bit, a precision in which AdamW's small steps are rounded away.
    options = {"config": config, "dtype": torch.float32, "trust_remote_code": start.trust_remote_code}
    if start.backbone:
        model = auto_class.from_config(**options)
        load_backbone(model, start.backbone)
        _say_other_dropout(model)
        return model
    _refuse_other_head(start, auto_class, config)
    try:
        model = auto_class.from_pretrained(start.model, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        # The message of Transformers is long, since it lists all supported configurations.
        raise ValueError(
            f"There is no {auto_class.__name__} for {start.model} (`model_type` {config.model_type}): use another "
            "encoder."
        ) from None
    except RuntimeError as error:
        raise ValueError(
            f"The weights of {start.model} do not fit its config.json (hidden_size {config.hidden_size}) with "
            f"{config.num_labels} labels; the report above shows the shapes that were found and expected. ({error})"
        ) from error
    _say_other_dropout(model)
    return model


def _refuse_other_head(start: StartingPoint, auto_class: Any, config: PreTrainedConfig) -> None:
    """Refuse a model that has a head of this kind for other labels: its outputs would be mistaken for the data's."""
    stored = AutoConfig.from_pretrained(start.model, trust_remote_code=start.trust_remote_code)
    head = auto_class.__name__.removeprefix("AutoModel")
    # An encoder without a head has labels as well, the default ones.
    if not any(name.endswith(head) for name in stored.architectures or []):
        return
    advice = "Start from the encoder that it was trained from."
    if stored.num_labels != config.num_labels:
        raise ValueError(
            f"{start.model} has a head for {stored.num_labels} labels, but the data have {config.num_labels}. {advice}"
        )
    for number, name in stored.id2label.items():
        # `LABEL_0` and so on are the names of labels that nobody named.
        if name not in (f"LABEL_{number}", found := config.id2label[number]):
            raise ValueError(
                f"{start.model} has a head for other labels, or for the same labels in another order: label {number} "
                f"is {name!r} there and {found!r} in the data. {advice}"
            )


def _say_other_dropout(model: PreTrainedModel) -> None:
    """Print a note if a head does not use the dropout given to `task_config`: some models have no setting for it."""
    wanted = getattr(model.config, _dropout_names(model.config)[0], None)
    of_head = [module for name, module in model.named_modules() if not name.startswith(f"{model.base_model_prefix}.")]
    found = [module.p for module in of_head if isinstance(module, torch.nn.Dropout)] or [0.0]
    if wanted not in found:
        print(
            f"`classifier_dropout` {wanted} is not used: {type(model).__name__} has no such setting. The dropout "
            f"before its head is {max(found)}.",
            flush=True,
        )


def tokenizer_of(start: StartingPoint) -> PreTrainedTokenizerBase:
    options = {"trust_remote_code": start.trust_remote_code}
    config = AutoConfig.from_pretrained(start.model, **options)
    return load_tokenizer(start.model, getattr(config, "vocab_size", None), **options)


def load_backbone(classifier: PreTrainedModel, checkpoints: list[Path]) -> None:
    """Load the backbone's weights from a checkpoint, or the mean of several, in float32; the head stays as it is.

    Raises:
        ValueError: if a checkpoint is of another backbone.
    """
    prefix, means = f"{classifier.base_model_prefix}.", {}
    for checkpoint in checkpoints:
        # `from_pretrained` converts the names and shapes in files to those of the modules. The head that it makes for
        # this copy is not used, and the random generator is restored afterwards.
        with torch.random.fork_rng():
            options = {"config": classifier.config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
            loaded, report = type(classifier).from_pretrained(checkpoint, output_loading_info=True, **options)
        # Masked language models have no pooler. It is new then, like the head.
        missing = [name for name in report["missing_keys"] if name.startswith(prefix) and ".pooler." not in name]
        unknown = [name for name in report["unexpected_keys"] if name.startswith(prefix)]
        # A head for other labels has another shape, and is not used.
        reshaped = [f"{name} {list(shape)}" for name, shape, _ in report["mismatched_keys"] if name.startswith(prefix)]
        if missing or unknown or reshaped:
            problem = "lacks" if missing else "has beyond the model's own" if unknown else "has in another shape"
            names = ", ".join(sorted(missing or unknown or reshaped)[:5])
            raise ValueError(f"{checkpoint} is of another backbone: it {problem} {names}.")
        for name, tensor in loaded.base_model.state_dict().items():
            means[name] = means.get(name, 0) + tensor / len(checkpoints)
    classifier.base_model.load_state_dict(means)
