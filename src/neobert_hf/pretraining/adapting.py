"""What recipes share that let a trained model go on learning: adapting to a domain, longer texts, shrinking."""

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


# The only settings with which the best weights are those of the lowest held-out loss, which reports are about.
FIXED = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_delay": 0,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
    # The evaluations without improvement are counted by a callback.
    "restore_callback_states_from_checkpoint": True,
}


@dataclass
class AdaptationArguments(PretrainingArguments):
    """Pretraining's arguments, for a short training that warms up again and falls to a tenth."""

    learning_rate: float = field(default=1e-4, metadata={"help": "at its peak"})
    max_steps: int = field(default=20_000, metadata={"help": "optimizer steps at most; see epochs"})
    warmup_steps: float = field(default=0.05, metadata={"help": "optimizer steps, or a share of all if below 1"})
    eval_steps: float | None = field(default=0.05, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=1_000, metadata={"help": "fixed: at every `eval_steps`"})
    early_stopping_patience: Count = field(default=4, metadata={"help": "evaluations without a lower held-out loss"})
    logging_steps: float = field(default=0.01, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=1, metadata={"help": "complete checkpoints kept beside the best"})
    eval_strategy: str = field(default="steps", metadata={"help": "fixed"})
    metric_for_best_model: str | None = field(default="loss", metadata={"help": "fixed"})
    greater_is_better: bool | None = field(default=False, metadata={"help": "fixed"})
    restore_callback_states_from_checkpoint: bool = field(default=True, metadata={"help": "fixed"})

    def __post_init__(self):
        super().__post_init__()
        check_fixed(self, FIXED)
        if self.save_steps not in (1_000, self.eval_steps):
            raise ValueError(
                f"`save_steps` is {self.save_steps:g}; this recipe saves where it evaluates: set `eval_steps`."
            )

    def planned(self, settings: BatchArguments, epochs: float, material: PretrainingData) -> "AdaptationArguments":
        """The arguments of a run over a text: its steps, and evaluations of which the last is at its end."""
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
    """Load what training starts from, in float32.

    Args:
        changes: of its config.

    Raises:
        FileNotFoundError, ValueError: if it is no masked language model of NeoBERT.
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
        raise ValueError(f"`model` is {source!r}, which is no masked language model of NeoBERT: {error}") from error


def adaptation_settings(data: DataArguments, arguments: AdaptationArguments, material: PretrainingData) -> dict:
    """All settings that the weights depend on. Of the model that training starts from, the content counts."""
    own = {"init_from": checkpoint_fingerprint(data.init_from), "eval_steps": arguments.eval_steps}
    own |= {"early_stopping_patience": arguments.early_stopping_patience}
    return checkpoint_settings(ModelArguments(), data, arguments, material.manifests) | own


def read_start(file: Path, made_of: dict) -> dict:
    """What a file says of the model in its folder, which training starts from.

    Args:
        made_of: the settings that it has to be made with, which the file names under `made_of`.

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
