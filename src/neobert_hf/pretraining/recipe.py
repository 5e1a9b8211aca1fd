"""Masked-language-model pretraining of NeoBERT (paper, sections 3.2, 3.3 and A), from random weights or a model."""

import math
import re
from pathlib import Path

import torch
from transformers import set_seed

from neobert_hf.common.files import write_json, write_png
from neobert_hf.common.fingerprints import fingerprint, model_fingerprint, tokenizer_fingerprint
from neobert_hf.common.paths import check_complete
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.data.batches import DataArguments
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining.data import PretrainingData, read_data
from neobert_hf.pretraining.settings import UNUSED, ModelArguments, PretrainingArguments
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.run import Run, check_files, complete_checkpoints, read_progress, step_of


@recipe
def pretrain(architecture: ModelArguments, settings: DataArguments, arguments: PretrainingArguments) -> Result:
    """Pretrain NeoBERT by masked language modelling, from random weights or from a model that exists.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets checkpoints, `model/` (with tokenizer, for `from_pretrained`), `curves.png` and `log.json`.

    Returns:
        The model's folder; `scores` on the held-out data: `loss` in nats, `perplexity`, `accuracy`.
    """
    # 1. Settings; the global batch is the same on any number of devices
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    inputs = {"init_from": settings.init_from, "train_data": list(settings.train_folders())}
    inputs |= {"validation_data": settings.validation_data}
    leave_out = {*UNUSED, "num_train_epochs", "max_steps", "cache_gb", "validation_mlm_probability"}
    folder = {"inputs": inputs, "writes": ["curves.png"], "leave_out": leave_out}
    with Run.start("pretrain", arguments, architecture, settings, **folder) as run:
        # 2. Data, and the number of steps, if it was given as passes over them
        data = read_data(settings, arguments)
        if arguments.max_steps < 0:
            micro_batches = data.train.sampler.micro_batches_in(arguments.num_train_epochs)
            arguments.max_steps = math.ceil(
                micro_batches / arguments.gradient_accumulation_steps / arguments.world_size
            )
        data.train.sampler.max_steps = arguments.max_steps
        run.identify(
            max_steps=arguments.max_steps,
            init_from=settings.init_from and model_fingerprint(find_source(settings)),
            tokenizer=data.manifests[0].identity["tokenizer"],
            corpus=fingerprint([manifest.shards for manifest in data.manifests]),
            shares=list(settings.train_folders().values()),
        )

        # 3. The config: that of the checkpoint to resume from, or of a new run
        if run.checkpoint is not None:
            source, config = None, NeoBERTConfig.from_pretrained(run.checkpoint)
            data.train.sampler.cursor = read_progress(run.checkpoint).cursor
        else:
            source = find_source(settings)
            config = build_config(architecture, settings, data, source)

        # 4. The model; when a run is resumed, the Trainer loads the weights
        set_seed(arguments.seed)
        model = NeoBERTForMaskedLM(config) if source is None else load_model(source, config, data)

        # 5. Training
        trainer = MLMTrainer(model, arguments, data, run, source if settings.continue_optimizer else None)
        # Each process needs its own dropout, but the Trainer has just given all of them the same seed.
        set_seed(arguments.seed + arguments.process_index)
        if trainer.is_world_process_zero():
            start = (
                f"resuming from {run.checkpoint}" if run.checkpoint else f"starting from {source or 'random weights'}"
            )
            print(
                f"{model.num_parameters():,} parameters; {arguments.max_steps:,} steps; {arguments.world_size} x "
                f"{arguments.device.type}, engine {trainer.accelerator.distributed_type.value}; "
                f"{arguments.gradient_accumulation_steps} micro-batches of {settings.micro_batch_tokens:,} tokens per "
                f"step and process; attention: {model.config._attn_implementation}; {start}",
                flush=True,
            )
        trainer.train_to_the_end()

        # 6. The saved model gives logits of every position, not only of the labelled ones as in training
        trainer.architecture.sparse_prediction = False
        trainer.save_whole(run.folder / "model")
        trainer.architecture.sparse_prediction = True

        # 7. The held-out loss after the last step, the log and the curves
        evaluated = {entry["step"]: entry for entry in trainer.state.log_history if "eval_loss" in entry}
        if data.held_out and trainer.state.global_step not in evaluated:
            trainer.evaluate()
        return write_results(trainer, run)


def write_results(trainer: MLMTrainer, run: Run) -> Result:
    """Write the log and the curves, and say where the model is and how good it is."""
    # Without the entry of the total times: they are of this call, and a finished run has none. Sorted, as entries are
    # that were read from a checkpoint.
    log = [dict(sorted(entry.items())) for entry in trainer.state.log_history if {"loss", "eval_loss"} & entry.keys()]
    names = ("loss", "perplexity", "accuracy")
    evaluations = [{name: entry[f"eval_{name}"] for name in names} for entry in log if "eval_loss" in entry]
    scores = evaluations[-1] if evaluations else {}
    if trainer.is_world_process_zero():
        write_json(run.folder / "log.json", log)
        plot_curves(log, run.folder / "curves.png")
        found = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
        print(f"{run.folder / 'model'}{f': {found} on held-out text' if found else ''}; {run.folder / 'curves.png'}")
    return Result(run.folder / "model", scores)


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
        check_complete(str(source), "init_from")
        return source
    checkpoint = [folder, *complete_checkpoints(folder)][-1]
    # Without its optimizer, training would go on with a fresh one.
    check_files(checkpoint)
    steps = read_progress(checkpoint).identity["max_steps"]
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
    tokenizer = load_tokenizer(source, config.vocab_size)
    if tokenizer_fingerprint(tokenizer) != data.manifests[0].identity["tokenizer"]:
        raise ValueError(f"The model in {source} has another tokenizer than the data: prepare the text with it.")
    return NeoBERTForMaskedLM.from_pretrained(source, config=config, dtype=torch.float32)


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
