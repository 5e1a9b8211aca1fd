"""Shared by the recipes that train a pretrained model further: adapting to a domain, longer texts."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from neobert_hf.common.fingerprints import checkpoint_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.settings import Count, differences, list_differences
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining.arguments import BatchArguments, DataArguments, ModelArguments, PretrainingArguments
from neobert_hf.pretraining.recipe import check_is_neobert, checkpoint_settings
from neobert_hf.pretraining.trainer import PretrainingData
from neobert_hf.training.arguments import check_fixed


# Only with these settings are the best weights those of the lowest held-out loss, which the reports describe.
FIXED = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_delay": 0,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
    # A callback counts the evaluations without improvement, and this restores its count.
    "restore_callback_states_from_checkpoint": True,
}


@dataclass
class AdaptationArguments(PretrainingArguments):
    """Pretraining's arguments, for a short training whose learning rate warms up again and falls to a tenth."""

    learning_rate: float = field(default=1e-4, metadata={"help": "peak learning rate"})
    max_steps: int = field(default=20_000, metadata={"help": "most optimizer steps; see epochs"})
    warmup_steps: float = field(default=0.05, metadata={"help": "optimizer steps, or a share of all if below 1"})
    eval_steps: float | None = field(default=0.05, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=1_000, metadata={"help": "fixed: at every `eval_steps`"})
    early_stopping_patience: Count = field(
        default=4, metadata={"help": "stop after this many evaluations without a lower held-out loss"}
    )
    logging_steps: float = field(default=0.01, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=1, metadata={"help": "complete checkpoints kept besides the best"})
    eval_strategy: str = field(default="steps", metadata={"help": "fixed"})
    metric_for_best_model: str | None = field(default="loss", metadata={"help": "fixed"})
    greater_is_better: bool | None = field(default=False, metadata={"help": "fixed"})
    restore_callback_states_from_checkpoint: bool = field(default=True, metadata={"help": "fixed"})

    def __post_init__(self):
        super().__post_init__()
        check_fixed(self, FIXED)
        if self.save_steps not in (1_000, self.eval_steps):
            raise ValueError(
                f"`save_steps` is {self.save_steps:g}; this recipe saves at every evaluation: set `eval_steps` instead."
            )

    def planned(self, settings: BatchArguments, epochs: float, material: PretrainingData) -> "AdaptationArguments":
        """The arguments of a run over a text: its steps, and evaluations spaced so that the last one is at its end."""
        batches_of_a_step = settings.accumulation_steps(1)
        tokens, most = epochs * material.manifest.tokens, self.max_steps * batches_of_a_step
        steps = math.ceil(material.train.sampler.micro_batches_for(tokens, most) / batches_of_a_step)
        every = min(steps, math.ceil(self.eval_steps if self.eval_steps >= 1 else self.eval_steps * steps))
        last = every * math.ceil(steps / every)
        last -= every if last > self.max_steps else 0
        planned = replace(self, max_steps=last, eval_steps=every, save_steps=every)
        planned.gradient_accumulation_steps = settings.accumulation_steps(self.world_size)
        return planned


def load_masked_lm(source: str, **changes) -> NeoBERTForMaskedLM:
    """Load the model that training starts from, in float32.

    Args:
        changes: values that its config gets.

    Raises:
        FileNotFoundError, ValueError: if it is not a masked language model of NeoBERT.
    """
    check_model_exists(source, "model")
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise FileNotFoundError(
            f"`model`: {source} holds no config.json; it must be a folder that `save_pretrained` wrote, such as the "
            "`model` inside the folder of a run."
        )
    check_is_neobert(source, "model")
    try:
        # The decoder runs on the masked tokens only.
        return NeoBERTForMaskedLM.from_pretrained(source, dtype=torch.float32, sparse_prediction=True, **changes)
    except ValueError as error:
        raise ValueError(f"`model` is {source!r}, which is not a masked language model of NeoBERT: {error}") from error


def adaptation_settings(data: DataArguments, arguments: AdaptationArguments, material: PretrainingData) -> dict:
    """All settings that the weights depend on. The initial model is compared by its content, not by its path."""
    own = {"init_from": checkpoint_fingerprint(data.init_from), "eval_steps": arguments.eval_steps}
    own |= {"early_stopping_patience": arguments.early_stopping_patience}
    return checkpoint_settings(ModelArguments(), data, arguments, material.manifests) | own


def read_start(file: Path, made_of: dict) -> dict:
    """Read the file that describes the initial model in the same folder.

    Args:
        made_of: the settings that the model must have been made with. The file has them under `made_of`.

    Raises:
        ValueError: naming the settings that differ.
    """
    stored = json.loads(file.read_text(encoding="utf-8"))
    if differing := differences(stored["made_of"], made_of):
        raise ValueError(
            f"{file.parent} was made with other settings:\n{list_differences(differing)}\nRepeat those, or choose "
            "another `output_dir`."
        )
    return stored
