"""Settings of pretraining: the architecture, and Transformers' arguments with the paper's defaults."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments

from neobert_hf.common.settings import check_numbers
from neobert_hf.training.arguments import BF16, fix, follow_hardware, refused_by


# Settings of Transformers that must have these values: any other would break what this recipe promises.
FIXED = {
    "load_best_model_at_end": False,
    # A resume continues at the sampler's cursor; the Trainer would read and discard every batch before it.
    "ignore_data_skip": True,
    # The row number, which determines the mask, is not an argument of the model and would be removed.
    "remove_unused_columns": False,
    # The loss is a mean over the labels of the whole global batch.
    "average_tokens_across_devices": True,
    # The model has none.
    "ddp_find_unused_parameters": False,
}

# Settings of Transformers that this recipe does not use, each with the setting that replaces it, if there is one.
UNUSED = {
    "optim": "optimizer",
    "lr_scheduler_type": "schedule",
    "gradient_accumulation_steps": "global_batch_tokens",
    "per_device_train_batch_size": "micro_batch_tokens",
    "per_device_eval_batch_size": "micro_batch_tokens",
    "data_seed": "seed",
    "optim_args": None,
    "lr_scheduler_kwargs": None,
    "label_smoothing_factor": None,
    "neftune_noise_alpha": None,
    "dataloader_drop_last": None,
    "train_sampling_strategy": None,
}


@dataclass
class ModelArguments:
    """The architecture (Table 1). Values that are not given are those of `init_from`, or else the published ones."""

    hidden_size: int | None = field(default=None, metadata={"help": "width"})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "encoder blocks"})
    num_attention_heads: int | None = field(default=None, metadata={"help": "must divide the width"})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "width of the MLP; SwiGLU uses two thirds of it"}
    )
    hidden_act: str | None = field(default=None, metadata={"help": "swiglu or gelu"})
    rope: bool | None = field(default=None, metadata={"help": "rotary positions instead of learned ones"})
    rope_parameters: dict | str | None = field(
        default=None,
        metadata={"help": 'of Transformers, such as \'{"rope_type": "yarn", "factor": 4.0}\', for longer texts'},
    )
    rms_norm: bool | None = field(default=None, metadata={"help": "RMSNorm instead of LayerNorm"})
    norm_eps: float | None = field(default=None, metadata={"help": "epsilon of the norms"})
    dropout: float | None = field(default=None, metadata={"help": "rate, in every block"})
    tie_word_embeddings: bool | None = field(
        default=None, metadata={"help": "let the decoder share the embeddings' weights; the published model does not"}
    )
    embedding_init_range: float | None = field(
        default=None, metadata={"help": "embeddings are initialised uniformly within +- this"}
    )
    decoder_init_range: float | None = field(
        default=None, metadata={"help": "linear layers are initialised uniformly within +- this"}
    )

    def __post_init__(self):
        if isinstance(self.rope_parameters, str):
            self.rope_parameters = json.loads(self.rope_parameters)

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class PretrainingArguments(TrainingArguments):
    """Transformers' arguments with the paper's defaults (sections 3.3 and A), and the recipe's own."""

    refused: ClassVar = refused_by(FIXED, UNUSED)

    optimizer: Literal["adamw", "muon"] = field(default="adamw", metadata={"help": "see optimizers.py"})
    schedule: Literal["cosine_to_floor", "linear", "constant", "wsd"] = field(
        default="cosine_to_floor", metadata={"help": "course of the learning rate after the warm-up; see optimizers.py"}
    )
    decay_steps: float = field(
        default=0.2, metadata={"help": "of the schedule wsd: its last steps, or a share of all if 1 or below"}
    )
    decay_shape: Literal["linear", "1-sqrt"] = field(
        default="1-sqrt", metadata={"help": "of the schedule wsd: how the learning rate falls to 0 at the end"}
    )
    decay_norms_and_biases: bool = field(
        default=True, metadata={"help": "weight decay on every parameter, as in the released code"}
    )
    learning_rate: float = field(default=6e-4, metadata={"help": "peak learning rate"})
    max_steps: int = field(default=-1, metadata={"help": "optimizer steps; unset: `num_train_epochs`"})
    num_train_epochs: float = field(
        default=1.0, metadata={"help": "without `max_steps`: passes over all documents, or those of the first subset"}
    )
    warmup_steps: float = field(default=2_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    weight_decay: float = field(default=0.1, metadata={"help": "decoupled"})
    adam_beta2: float = field(default=0.95, metadata={"help": "decay rate of the second moment"})
    bf16: bool | None = field(default=None, metadata=BF16)
    report_to: None | str | list[str] = field(
        default="tensorboard", metadata={"help": "tensorboard, wandb, trackio, ... or none"}
    )
    logging_steps: float = field(default=100, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_steps: float = field(default=1_000, metadata={"help": "optimizer steps, or a share of all if below 1"})
    save_total_limit: int | None = field(default=3, metadata={"help": "complete checkpoints that are kept"})

    def __post_init__(self):
        check_numbers(self, {"decay_steps": "above 0"})
        fix(self, FIXED, UNUSED)
        follow_hardware(self)
        super().__post_init__()
        for name in ("save_strategy", "eval_strategy"):
            if getattr(self, name) == "epoch":
                raise ValueError(f"`{name}` is 'epoch', but the sampler never ends: it must be 'steps' or 'no'.")
