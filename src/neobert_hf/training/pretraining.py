"""Pretraining by examples/pretrain.py: its settings, data and model, what a resume compares, and the curves."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from neobert_hf.common.files import write_png
from neobert_hf.common.fingerprints import depends_on, fingerprint, model_fingerprint, tokenizer_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.tokenizers import load_tokenizer as load_tokenizer_of_model
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.data.batches import DataArguments, HeldOutBatchSampler, MLMBatchSampler
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import Documents
from neobert_hf.data.shards import Manifest, load_tokenizer, read_manifest
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.training.arguments import BF16, fix, follow_hardware, result_settings
from neobert_hf.training.run_checkpoints import complete_checkpoints, read_progress, step_of


# Settings of Transformers that must have these values: any other would break what this recipe promises.
FIXED = {
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

# In bfloat16 on a CPU, oneDNN compiles a matrix product for every number of rows that it has not seen yet, 17 ms each.
# Packs of whole documents have a different number of tokens at nearly every step, so without this rounding up,
# compiling takes a third of a small model's training time.
CPU_ROW_MULTIPLE = 128


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

    optimizer: Literal["adamw", "muon"] = field(default="adamw", metadata={"help": "see optimizers.py"})
    schedule: Literal["cosine_to_floor", "linear", "constant"] = field(
        default="cosine_to_floor", metadata={"help": "course of the learning rate after the warm-up; see optimizers.py"}
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
        fix(self, FIXED, UNUSED)
        follow_hardware(self)
        super().__post_init__()
        for name in ("save_strategy", "eval_strategy"):
            if getattr(self, name) == "epoch":
                raise ValueError(f"`{name}` is 'epoch', but the sampler never ends: it must be 'steps' or 'no'.")


@dataclass
class MicroBatches:
    """Documents, which of them make up each micro-batch, and how they are masked and laid out."""

    documents: Documents
    sampler: MLMBatchSampler | HeldOutBatchSampler
    collator: MLMCollator


@dataclass
class PretrainingData:
    """The data to train on, with the manifests of their folders, and the data of each folder to evaluate on."""

    manifests: list[Manifest]
    train: MicroBatches
    held_out: list[MicroBatches]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.train.collator.tokenizer


def read_data(data: DataArguments, arguments: PretrainingArguments) -> PretrainingData:
    """Open the prepared folders, and plan the micro-batches of this process.

    Raises:
        ValueError: if folders do not fit each other or the settings, or held-out text is trained on.
    """
    shares = data.train_folders()
    manifests = {folder: read_manifest(folder) for folder in [*shares, *(data.validation_data or [])]}
    first = next(iter(shares))
    for folder, manifest in manifests.items():
        if manifest.settings["tokenizer"] != manifests[first].settings["tokenizer"]:
            raise ValueError(f"{folder} was prepared with another tokenizer than {first}.")
        if folder in shares and data.layout != "naive" and data.max_length > manifest.settings["max_length"]:
            raise ValueError(
                f"`max_length` is {data.max_length}, and {folder} was prepared with {manifest.settings['max_length']}: "
                "the config would claim a length that the model has never seen. Lower it, or prepare the text again."
            )
    documents = Documents(list(shares), data.max_length, data.cache_gb)
    process = (arguments.process_index, arguments.world_size)
    sampler = MLMBatchSampler(documents, data, arguments.seed, *process, list(shares.values()))
    tokenizer = load_tokenizer(first)
    # The tokenizer is saved with the model, and has to cut texts at the model's length.
    tokenizer.model_max_length = data.max_length
    masks = (data.mlm_probability, data.mask_replace_prob, data.random_replace_prob)
    row_multiple = CPU_ROW_MULTIPLE if arguments.bf16 and arguments.device.type == "cpu" else 1
    collator = MLMCollator(tokenizer, *masks, data.layout, data.max_length, arguments.seed, row_multiple)
    held_out = []
    for folder in data.validation_data or []:
        for trained in shares:
            _check_held_out(folder, manifests[folder], trained, manifests[trained])
        rows = Documents([folder], data.max_length, data.cache_gb)
        every = HeldOutBatchSampler(rows, data.micro_batch_tokens, *process)
        # Always packed and with the same masks, whatever the layout and seed of training: runs can be compared.
        held_out.append(MicroBatches(rows, every, replace(collator, layout="packed", seed=0)))
    train = MicroBatches(documents, sampler, collator)
    return PretrainingData([manifests[folder] for folder in shares], train, held_out)


def _check_held_out(folder: str, held_out: Manifest, trained_on: str, trained: Manifest) -> None:
    """Refuse held-out text that may also be trained on, as far as the settings show: its loss would be too good."""
    one, other = held_out.settings, trained.settings
    if any(one.get(name) != other.get(name) for name in ("source", "files", "bytes", "subset", "split")):
        return
    if one["held_out_share"] == other["held_out_share"] and one["part"] != other["part"]:
        return
    first, second = sorted((one, other), key=lambda settings: settings["skip_documents"])
    most = first["max_documents"]
    if most is None or first["skip_documents"] + most > second["skip_documents"]:
        raise ValueError(
            f"{folder} may hold rows of {trained_on}, which is trained on: its loss would be too good. Prepare both "
            "with the same `held_out_share`, one of them with `part` held_out; or prepare different rows: "
            "`max_documents` for one and as many `skip_documents` for the other."
        )


def find_source(data: DataArguments) -> str | Path | None:
    """Find where the initial weights are, a folder or a Hub id; None for random ones.

    For a finished run this is its `model`, which may be the one of the best evaluation, or with `continue_optimizer`
    its last checkpoint, which also holds the optimizer.
    """
    if data.init_from is None:
        if data.continue_optimizer:
            raise ValueError("`continue_optimizer` needs `init_from`, the checkpoint to continue from.")
        return None
    folder = Path(data.init_from)
    if not data.continue_optimizer:
        source = folder / "model" if (folder / "model").is_dir() else data.init_from
        check_model_exists(str(source), "init_from")
        return source
    checkpoint = [folder, *complete_checkpoints(folder)][-1]
    steps = read_progress(checkpoint).settings["max_steps"]
    if checkpoint != folder and step_of(checkpoint) < steps:
        raise ValueError(
            f"The run {folder} has reached only step {step_of(checkpoint)} of {steps}. Finish it, or name {checkpoint} "
            "to start from there."
        )
    return checkpoint


def build_config(
    architecture: ModelArguments, settings: DataArguments, data: PretrainingData, source: str | Path | None
) -> NeoBERTConfig:
    """The config of a new run: that of `source`, a model, or else the published one; with what the settings name."""
    # The decoder runs on the masked fifth of the tokens only.
    options = architecture.given() | {"max_length": settings.max_length, "sparse_prediction": True}
    if source is not None:
        return NeoBERTConfig.from_pretrained(source, **options)
    vocabulary = {"vocab_size": data.manifests[0].vocab_size, "pad_token_id": data.tokenizer.pad_token_id}
    return NeoBERTConfig(**options, **vocabulary)


def load_model(source: str | Path, config: NeoBERTConfig, data: PretrainingData) -> NeoBERTForMaskedLM:
    """The weights of `source`, whose tokenizer must be that of the data."""
    tokenizer = load_tokenizer_of_model(source, config.vocab_size)
    if tokenizer_fingerprint(tokenizer) != data.manifests[0].settings["tokenizer"]:
        raise ValueError(f"The model in {source} has another tokenizer than the data: prepare the text with it.")
    return NeoBERTForMaskedLM.from_pretrained(source, config=config, dtype=torch.float32)


def checkpoint_settings(
    architecture: ModelArguments, data: DataArguments, arguments: PretrainingArguments, manifests: list[Manifest]
) -> dict:
    """All settings that the trained weights depend on, as a checkpoint stores them and a resume compares them."""
    return depends_on(
        architecture,
        data,
        result_settings(arguments, leave_out={*UNUSED, "num_train_epochs"}),
        leave_out=["cache_gb"],
        init_from=data.init_from and model_fingerprint(find_source(data)),
        tokenizer=manifests[0].settings["tokenizer"],
        corpus=fingerprint([manifest.shards for manifest in manifests]),
        shares=list(data.train_folders().values()),
    )


def plot_curves(log: list[dict], file: Path) -> None:
    """Write a PNG of loss, masked-token accuracy, learning rate and speed over the steps."""
    # Not at the top: a GPU's container image may lack matplotlib.
    from matplotlib.figure import Figure

    panels = {
        "masked loss (nats)": "loss|eval_loss(_[0-9]+)?",
        "masked-token accuracy": "accuracy|eval_accuracy(_[0-9]+)?",
        "learning rate": "learning_rate",
        "real tokens per second": "tokens_per_second",
    }
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels.items()):
        axes.set(title=title, xlabel="step")
        for name in sorted({name for entry in log for name in entry if re.fullmatch(names, name)}):
            points = [(entry["step"], entry[name]) for entry in log if name in entry]
            # An evaluation may be the only one.
            axes.plot(*zip(*points), label=name, marker="o" if name.startswith("eval") else None, markersize=3)
            axes.legend(fontsize="small")
    write_png(file, figure)
