"""Masked-language-model pretraining of NeoBERT (paper, sections 3.2, 3.3 and A).

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/pretrain.py \\
        --config configs/pretrain/neobert_1024.yaml

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (with tokenizer, for `from_pretrained`), `curves.png` and `log.json`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import AutoTokenizer, PreTrainedTokenizerFast, set_seed

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.common.atomic_writes import write_json, write_png
from neobert_hf.common.fingerprints import tokenizer_fingerprint
from neobert_hf.common.settings import differences, parse_config
from neobert_hf.pretraining.batches import Documents, HeldOutBatchSampler, MLMBatchSampler
from neobert_hf.pretraining.collator import Layout, MLMCollator
from neobert_hf.pretraining.shards import Manifest, load_shards, load_tokenizer, read_manifest
from neobert_hf.pretraining.trainer import Feed, MLMTrainer, PretrainingArguments
from neobert_hf.training.launching import check_launch, end_processes
from neobert_hf.training.run_checkpoints import complete_checkpoints, newest_checkpoint, read_progress, step_of


# Of TrainingArguments, those that change the trained weights; the others may differ when a run is resumed.
RESULT_SETTINGS = (
    "optimizer schedule learning_rate warmup_steps max_steps weight_decay decay_norms_and_biases adam_beta1 adam_beta2 "
    "adam_epsilon max_grad_norm bf16 fp16 seed"
).split()


@dataclass
class ModelArguments:
    """The architecture (Table 1); the defaults are the published one."""

    hidden_size: int = field(default=768, metadata={"help": "width"})
    num_hidden_layers: int = field(default=28, metadata={"help": "encoder blocks"})
    num_attention_heads: int = field(default=12, metadata={"help": "must divide the width"})
    intermediate_size: int = field(default=3072, metadata={"help": "of the MLP; SwiGLU uses two thirds"})
    hidden_act: str = field(default="swiglu", metadata={"help": "swiglu or gelu"})
    rope: bool = field(default=True, metadata={"help": "rotary positions instead of learned ones"})
    rms_norm: bool = field(default=True, metadata={"help": "RMSNorm instead of LayerNorm"})
    norm_eps: float = field(default=1e-5, metadata={"help": "of the norms"})
    dropout: float = field(default=0.0, metadata={"help": "in every block"})
    embedding_init_range: float = field(default=0.02, metadata={"help": "embeddings start uniform in +- this"})
    decoder_init_range: float = field(default=0.02, metadata={"help": "linear layers start uniform in +- this"})


@dataclass
class DataArguments:
    """What is read, and how it becomes micro-batches."""

    train_data: str = field(metadata={"help": "folder that prepare_data.py wrote"})
    max_length: int = field(metadata={"help": "tokens; longer documents are cut"})
    validation_data: str | None = field(default=None, metadata={"help": "held-out folder that prepare_data.py wrote"})
    init_from: str | None = field(
        default=None, metadata={"help": "start from this run, checkpoint or model instead of random weights"}
    )
    continue_optimizer: bool = field(default=False, metadata={"help": "with init_from: its optimizer state, too"})
    global_batch_tokens: int = field(default=2**21, metadata={"help": "of an optimizer step, over all devices"})
    micro_batch_tokens: int = field(default=2**15, metadata={"help": "of one forward pass on one device"})
    layout: Layout = field(default="packed", metadata={"help": "packed, padded, or naive (ablation M6)"})
    mlm_probability: float = field(default=0.2, metadata={"help": "share of the tokens to predict"})
    mask_replace_prob: float = field(default=1.0, metadata={"help": "of those, replaced by [MASK]"})
    random_replace_prob: float = field(default=0.0, metadata={"help": "of those, replaced by a random token"})
    min_lengths: list[int] = field(default_factory=lambda: [0], metadata={"help": "subsets: at least so many tokens"})
    probabilities: list[float] = field(default_factory=lambda: [1.0], metadata={"help": "of drawing each subset"})
    shuffle_shards: int = field(default=8, metadata={"help": "shards whose documents are shuffled together"})


def accumulation_steps(data: DataArguments, world_size: int) -> int:
    """Micro-batches of each process in an optimizer step, so that the global batch is the same on any number."""
    micro_batches = data.micro_batch_tokens * world_size
    steps, rest = divmod(data.global_batch_tokens, micro_batches) if micro_batches > 0 else (0, 0)
    if rest or not steps:
        raise ValueError(
            f"`global_batch_tokens` ({data.global_batch_tokens:,}) must be a multiple of `micro_batch_tokens` "
            f"({data.micro_batch_tokens:,}) times the processes ({world_size}). Change one of them."
        )
    return steps


def build_model(
    architecture: ModelArguments,
    data: DataArguments,
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerFast,
    source: str | Path | None,
) -> NeoBERTForMaskedLM:
    """A new model, or the one of an earlier stage, which must have this architecture and tokenizer."""
    config = {
        **asdict(architecture),
        "vocab_size": manifest.vocab_size,
        "pad_token_id": tokenizer.pad_token_id,
        "max_length": data.max_length,
        # The decoder runs on the masked fifth of the tokens only.
        "sparse_prediction": True,
    }
    if source is None:
        return NeoBERTForMaskedLM(NeoBERTConfig(**config))
    stored = NeoBERTConfig.from_pretrained(source)
    free = {"dropout", "sparse_prediction"} | ({"max_length"} if stored.rope else set())
    wanted = {name: value for name, value in config.items() if name not in free}
    if wrong := differences({name: getattr(stored, name) for name in wanted}, wanted):
        found = "; ".join(f"{name}: {there!r} there, {now!r} now" for name, there, now in wrong)
        raise ValueError(f"The model in {source} has another architecture. {found}.")
    if tokenizer_fingerprint(AutoTokenizer.from_pretrained(source)) != manifest.tokenizer_fingerprint:
        raise ValueError(
            f"The model in {source} has another tokenizer than {data.train_data}: prepare the data with it."
        )
    changes = {name: config[name] for name in free}
    return NeoBERTForMaskedLM.from_pretrained(source, dtype=torch.float32, **changes)


def find_source(data: DataArguments) -> str | Path | None:
    """Where the initial weights are: of a finished run its last checkpoint, since that holds the optimizer."""
    if data.init_from is None:
        if data.continue_optimizer:
            raise ValueError("`continue_optimizer` needs `init_from`, the checkpoint to continue from.")
        return None
    folder = Path(data.init_from)
    if checkpoints := complete_checkpoints(folder):
        source, steps = checkpoints[-1], read_progress(checkpoints[-1]).settings["max_steps"]
        if step_of(source) < steps:
            raise ValueError(
                f"The run {folder} has come to step {step_of(source)} of {steps} only. Finish it, or name {source} to "
                "start from there."
            )
        return source
    if data.continue_optimizer:
        read_progress(folder)
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"`init_from`: {folder} holds neither a checkpoint nor a model (config.json).")
    return folder if folder.is_dir() else data.init_from


def read_data(data: DataArguments, arguments: PretrainingArguments) -> tuple[Manifest, Feed, Feed | None]:
    """The manifest of the training data, what to train on, and what to evaluate on, if anything."""
    manifest = read_manifest(data.train_data)
    shards, tokenizer = load_shards(data.train_data, manifest), load_tokenizer(data.train_data, manifest)
    masks = {"tokenizer": tokenizer, "mlm_probability": data.mlm_probability}
    masks |= {"mask_replace_prob": data.mask_replace_prob, "random_replace_prob": data.random_replace_prob}
    place = {"rank": arguments.process_index, "world_size": arguments.world_size}
    sampler = MLMBatchSampler(
        shards,
        [shard["documents"] for shard in manifest.shards],
        data.max_length,
        data.micro_batch_tokens,
        packed=data.layout != "padded",
        seed=arguments.seed,
        min_lengths=tuple(data.min_lengths),
        probabilities=tuple(data.probabilities),
        shuffle_shards=data.shuffle_shards,
        **place,
    )
    collator = MLMCollator(**masks, layout=data.layout, max_length=data.max_length, seed=arguments.seed)
    train, held_out = Feed(Documents(shards, data.max_length), sampler, collator), None
    if data.validation_data is not None:
        validation = read_manifest(data.validation_data)
        if validation.tokenizer_fingerprint != manifest.tokenizer_fingerprint:
            raise ValueError(f"{data.validation_data} was prepared with another tokenizer than {data.train_data}.")
        shards = load_shards(data.validation_data, validation)
        sampler = HeldOutBatchSampler(shards, data.max_length, data.micro_batch_tokens, **place)
        # Packed and with the same masks whatever layout and seed of training are, so that runs can be compared.
        held_out = Feed(Documents(shards, data.max_length), sampler, MLMCollator(**masks, seed=0))
    elif arguments.eval_strategy != "no":
        raise ValueError("`eval_strategy` asks for a held-out loss: set `validation_data`, or `eval_strategy` to no.")
    return manifest, train, held_out


def result_settings(
    architecture: ModelArguments, data: DataArguments, arguments: PretrainingArguments, manifest: Manifest
) -> dict:
    """All settings that the trained weights depend on, as JSON gives them back."""
    settings = asdict(architecture) | asdict(data) | {name: getattr(arguments, name) for name in RESULT_SETTINGS}
    # The corpus counts, not where it lies.
    del settings["train_data"], settings["validation_data"]
    shards = hashlib.sha256(json.dumps(manifest.shards).encode()).hexdigest()
    settings |= {"tokenizer": manifest.tokenizer_fingerprint, "corpus": shards}
    return json.loads(json.dumps(settings))


def plot(log: list[dict], file: Path) -> None:
    """Loss, masked-token accuracy, learning rate and speed over the steps."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = (
        ("masked loss (nats)", ("loss", "eval_loss")),
        ("masked-token accuracy", ("accuracy", "eval_accuracy")),
        ("learning rate", ("learning_rate",)),
        ("real tokens per second", ("tokens_per_second",)),
    )
    for axes, (title, keys) in zip(figure.subplots(2, 2).flat, panels):
        for key in keys:
            points = [(entry["step"], entry[key]) for entry in log if key in entry]
            if points:
                axes.plot(*zip(*points), "o-" if key.startswith("eval") else "-", label=key, markersize=3)
        axes.set(xlabel="step", title=title)
        axes.legend()
    write_png(file, figure)


def main(args: list[str] | None = None) -> None:
    # 1. Settings; the global batch is the same on any number of devices
    architecture, data, arguments = parse_config(ModelArguments, DataArguments, PretrainingArguments, args=args)
    arguments.gradient_accumulation_steps = accumulation_steps(data, arguments.world_size)
    set_seed(arguments.seed)
    output = Path(arguments.output_dir)

    # 2. Data
    manifest, train, held_out = read_data(data, arguments)

    # 3. Model, and the checkpoint to resume from
    settings = result_settings(architecture, data, arguments, manifest)
    resume, progress = newest_checkpoint(output, settings)
    if resume is not None:
        train.sampler.cursor = progress.cursor
    source = find_source(data) if resume is None else None
    finished = resume is not None and step_of(resume) == arguments.max_steps
    # On resume the Trainer loads the weights, in the form of its engine, unless there is nothing left to train.
    model = build_model(architecture, data, manifest, train.collator.tokenizer, resume if finished else source)
    # Dropout is each process's own.
    set_seed(arguments.seed + arguments.process_index)

    # 4. Training
    trainer = MLMTrainer(
        model,
        arguments,
        train,
        held_out,
        settings,
        optimizer_from=source if data.continue_optimizer else None,
        processing_class=train.collator.tokenizer,
    )
    check_launch(trainer.accelerator)
    if trainer.is_world_process_zero():
        print(
            f"{model.num_parameters():,} parameters; {arguments.world_size} x {arguments.device.type}, engine "
            f"{trainer.accelerator.distributed_type.value}; {arguments.gradient_accumulation_steps} micro-batches of "
            f"{data.micro_batch_tokens:,} tokens a step and process; attention: {trainer.attention}; peak "
            f"{trainer.peak / 1e12:.2f} TFLOP/s a device ({trainer.peak_source}); "
            + (f"resuming from {resume}" if resume else f"starting from {source or 'random weights'}"),
            flush=True,
        )
    trainer.train_to_the_end(resume)

    # 5. Model, held-out loss, numbers and curves
    # Whoever loads the model gets logits of every position.
    trainer.architecture.sparse_prediction = False
    trainer.save_whole(output / "model")
    trainer.architecture.sparse_prediction = True
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1:]
    if held_out is not None and not (last and last[0]["step"] == trainer.state.global_step):
        trainer.evaluate()
    if trainer.is_world_process_zero():
        write_json(output / "log.json", trainer.state.log_history)
        plot(trainer.state.log_history, output / "curves.png")
        print(f"{output / 'model'}, {output / 'curves.png'}, {output / 'log.json'}", flush=True)
    end_processes(trainer.accelerator)


if __name__ == "__main__":
    main()
