"""The steps of examples/pretrain.py: data, model, the settings that a resume compares, and the curves."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets

from neobert_hf.common.fingerprints import depends_on, fingerprint, model_fingerprint, tokenizer_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.report import Line, Panel, plot_lines
from neobert_hf.common.tokenizers import load_tokenizer as load_tokenizer_of_model
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.data.batches import DataArguments, Documents, HeldOutBatchSampler, MLMBatchSampler
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.shards import Manifest, load_shards, load_tokenizer, read_manifest
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.pretraining_arguments import UNUSED, ModelArguments, PretrainingArguments
from neobert_hf.training.pretraining_trainer import MicroBatches, PretrainingData
from neobert_hf.training.run_checkpoints import (
    CheckpointError,
    complete_checkpoints,
    read_progress,
    step_of,
    stored_settings,
)


# In bfloat16 on a CPU, oneDNN compiles a matrix product for every number of rows that it has not seen yet, 17 ms each.
# Packs of whole documents have a different number of tokens at nearly every step, so without this rounding up,
# compiling takes a third of a small model's training time.
CPU_ROW_MULTIPLE = 128


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
    documents = _open_documents(list(shares), manifests, data.max_length)
    process = (arguments.process_index, arguments.world_size)
    mixture = [(len(manifests[folder].shards), share) for folder, share in shares.items()]
    sampler = MLMBatchSampler(documents, data, arguments.seed, *process, mixture)
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
        rows = _open_documents([folder], manifests, data.max_length)
        every = HeldOutBatchSampler(rows, data.micro_batch_tokens, *process)
        # Always packed and with the same masks, whatever the layout and seed of training: runs can be compared.
        held_out.append(MicroBatches(rows, every, replace(collator, layout="packed", seed=0)))
    train = MicroBatches(documents, sampler, collator)
    return PretrainingData([manifests[folder] for folder in shares], train, held_out)


def _open_documents(folders: list[str], manifests: dict[str, Manifest], max_length: int) -> Documents:
    """The documents of several folders, one after the other."""
    sizes = [shard["documents"] for folder in folders for shard in manifests[folder].shards]
    return Documents(concatenate_datasets([load_shards(folder) for folder in folders]), sizes, max_length)


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


def architecture_of(config: NeoBERTConfig, given: ModelArguments) -> dict[str, Any]:
    """The architecture of a config, or what the settings name instead: a resume has to notice the difference."""
    found, named = {name: getattr(config, name) for name in vars(given)}, given.given()
    # The config adds what the setting leaves out, such as the length that the model was trained with before.
    rope = found["rope_parameters"] or {}
    if all(rope.get(name) == value for name, value in named.get("rope_parameters", {}).items()):
        named.pop("rope_parameters", None)
    return found | named


def load_model(source: str | Path, config: NeoBERTConfig, data: PretrainingData) -> NeoBERTForMaskedLM:
    """The weights of `source`, whose tokenizer must be that of the data."""
    tokenizer = load_tokenizer_of_model(source, config.vocab_size)
    if tokenizer_fingerprint(tokenizer) != data.manifests[0].settings["tokenizer"]:
        raise ValueError(f"The model in {source} has another tokenizer than the data: prepare the text with it.")
    return NeoBERTForMaskedLM.from_pretrained(source, config=config, dtype=torch.float32)


def checkpoint_settings(
    architecture: dict[str, Any], data: DataArguments, arguments: PretrainingArguments, manifests: list[Manifest]
) -> dict:
    """All settings that the trained weights depend on, as a checkpoint stores them and a resume compares them."""
    return depends_on(
        architecture,
        data,
        result_settings(arguments, leave_out={*UNUSED, "num_train_epochs"}),
        init_from=data.init_from and _fingerprint_of_start(data, Path(arguments.output_dir)),
        tokenizer=manifests[0].settings["tokenizer"],
        corpus=fingerprint([manifest.shards for manifest in manifests]),
        shares=list(data.train_folders().values()),
    )


def _fingerprint_of_start(data: DataArguments, output: Path) -> str:
    """That of the model that `init_from` names; it may be gone once the run has checkpoints of its own."""
    try:
        return model_fingerprint(find_source(data))
    except (OSError, CheckpointError):
        if stored := stored_settings(output).get("init_from"):
            return stored
        raise


def plot_curves(log: list[dict], file: Path) -> None:
    """Write a PNG of loss, masked-token accuracy, learning rate and speed over the steps."""

    def line(name: str) -> Line:
        points = [(entry["step"], entry[name]) for entry in log if name in entry]
        return Line(points, name, {"marker": "o"} if name.startswith("eval") else {})

    def held_out(name: str) -> list[Line]:
        """A line for each held-out folder: `eval_loss`, `eval_loss_2`."""
        names = {key for entry in log for key in entry if re.fullmatch(rf"eval_{name}(_\d+)?", key)}
        return [line(key) for key in sorted(names)]

    panels = {
        "masked loss (nats)": [line("loss"), *held_out("loss")],
        "masked-token accuracy": [line("accuracy"), *held_out("accuracy")],
        "learning rate": [line("learning_rate")],
        "real tokens per second": [line("tokens_per_second")],
    }
    plot_lines(file, [Panel(lines, {"xlabel": "step", "title": title}) for title, lines in panels.items()])
