"""The steps of examples/pretrain.py: data, model, the settings that a resume compares, and the curves."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from datasets import concatenate_datasets

from neobert_hf.common.fingerprints import (
    depends_on,
    differences,
    fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)
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
    COMPLETE,
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
    """Open the prepared folders, and plan the micro-batches of this process."""
    shares = data.train_folders()
    first = next(iter(shares))
    manifest = read_manifest(first)
    manifests = {folder: _read_same_tokenizer(folder, first, manifest) for folder in shares}
    for folder, each in manifests.items():
        if data.layout != "naive" and data.max_length > each.max_length:
            raise ValueError(
                f"`max_length` is {data.max_length}, and {folder} was prepared with {each.max_length}: the model's "
                "config would claim a length that it has never seen. Lower it, or prepare the text again."
            )
    documents = _open_documents(manifests, data.max_length)
    process = (arguments.process_index, arguments.world_size)
    mixture = [(len(each.shards), shares[folder]) for folder, each in manifests.items()]
    sampler = MLMBatchSampler(documents, data, arguments.seed, *process, mixture)
    tokenizer = load_tokenizer(first, manifest)
    # The tokenizer is saved with the model, and has to cut texts at the model's length.
    tokenizer.model_max_length = data.max_length
    masks = (data.mlm_probability, data.mask_replace_prob, data.random_replace_prob)
    row_multiple = CPU_ROW_MULTIPLE if arguments.bf16 and arguments.device.type == "cpu" else 1
    collator = MLMCollator(tokenizer, *masks, data.layout, data.max_length, arguments.seed, row_multiple)
    train = MicroBatches(documents, sampler, collator)
    if not data.validation_data and arguments.eval_strategy != "no":
        raise ValueError("`eval_strategy` needs held-out text: set `validation_data`, or set `eval_strategy` to no.")

    def open_held_out(folder: str) -> MicroBatches:
        held_out = _read_same_tokenizer(folder, first, manifest)
        for trained_on, trained in manifests.items():
            _check_held_out(folder, held_out, trained_on, trained)
        documents = _open_documents({folder: held_out}, data.max_length)
        sampler = HeldOutBatchSampler(documents, data.micro_batch_tokens, *process)
        # Always packed and with the same masks, whatever the layout and seed of training: runs can be compared.
        return MicroBatches(documents, sampler, replace(collator, layout="packed", seed=0))

    held_out = [open_held_out(folder) for folder in data.validation_data or []]
    return PretrainingData(list(manifests.values()), train, held_out)


def _read_same_tokenizer(folder: str, first: str, manifest: Manifest) -> Manifest:
    """The manifest of a folder; ValueError if it has another tokenizer than the first folder to train on."""
    other = read_manifest(folder)
    if other.tokenizer_fingerprint != manifest.tokenizer_fingerprint:
        raise ValueError(f"{folder} was prepared with another tokenizer than {first}.")
    return other


def _check_held_out(folder: str, held_out: Manifest, trained_on: str, trained: Manifest) -> None:
    """Refuse held-out text that is also trained on, as far as the two manifests show: its loss would be too good."""
    shares = [each.source.get("held_out_share") for each in (held_out, trained)]
    places = [[each.source.get(name) for name in ("source", "subset", "split")] for each in (held_out, trained)]
    checksums = [{shard.get("checksum") for shard in each.shards} - {None} for each in (held_out, trained)]
    if checksums[0] & checksums[1]:
        found = "holds the same text as"
    elif places[0] == places[1] and all(shares) and shares[0] != shares[1]:
        found = f"was prepared with `held_out_share` {shares[0]}, not with the {shares[1]} of"
    elif places[0] == places[1] and not _are_apart(held_out.source, trained.source):
        found = "may hold rows of"
    else:
        return
    raise ValueError(
        f"{folder} {found} {trained_on}, which is trained on: its loss would be too good. Prepare both with the same "
        "`held_out_share`, one of them with `part` held_out; or prepare different rows: `max_documents` for one and as "
        "many `skip_documents` for the other."
    )


def _are_apart(held_out: dict, trained: dict) -> bool:
    """Whether two folders of one source hold different rows: its two parts, or separate ranges of rows."""
    if held_out.get("held_out_share") and held_out.get("held_out_share") == trained.get("held_out_share"):
        if held_out["part"] != trained["part"]:
            return True
    first, second = sorted((held_out, trained), key=lambda source: source["skip_documents"])
    # For a part, `max_documents` counts the documents in it, which may come from any number of rows.
    most = None if first.get("held_out_share") else first["max_documents"]
    return most is not None and first["skip_documents"] + most <= second["skip_documents"]


def _open_documents(manifests: dict[str, Manifest], max_length: int) -> Documents:
    """The documents of several folders, one after the other."""
    rows = [load_shards(folder, manifest) for folder, manifest in manifests.items()]
    sizes = [shard["documents"] for manifest in manifests.values() for shard in manifest.shards]
    return Documents(concatenate_datasets(rows), sizes, max_length)


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
    if not data.continue_optimizer and (folder / "model" / "config.json").is_file():
        return folder / "model"
    if checkpoints := complete_checkpoints(folder):
        newest = checkpoints[-1]
        steps = read_progress(newest).settings["max_steps"]
        if step_of(newest) < steps:
            raise ValueError(
                f"The run {folder} has reached only step {step_of(newest)} of {steps}. Finish it, or name {newest} to "
                "start from there."
            )
        return newest
    if data.continue_optimizer or (folder / COMPLETE).is_file():
        read_progress(folder)
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise FileNotFoundError(f"`init_from`: {folder} holds neither a checkpoint nor a model (config.json).")
    check_model_exists(data.init_from, "init_from")
    return data.init_from


def check_is_neobert(source: str | Path, setting: str) -> None:
    """Refuse a model of another architecture in one message: the config would complain about single keys."""
    kind = NeoBERTConfig.get_config_dict(source)[0].get("model_type")
    if kind != NeoBERTConfig.model_type:
        raise ValueError(
            f"`{setting}` is {str(source)!r}, of the type {kind!r}; it must be a masked language model of NeoBERT."
        )


def complete_architecture(architecture: ModelArguments, data: DataArguments, output: Path) -> ModelArguments:
    """Fill in the values that are not given: from the model that `init_from` names, or else the published ones."""
    given = architecture.given()
    rope = {"rope_parameters": given["rope_parameters"]} if "rope_parameters" in given else {}
    if data.init_from is None:
        found = vars(NeoBERTConfig(**rope))
    # When a run resumes from its own checkpoints, the model of `init_from` may be gone.
    elif not (found := stored_settings(output)):
        source = find_source(data)
        check_is_neobert(source, "init_from")
        found = vars(NeoBERTConfig.from_pretrained(source, **rope))
    complete = {name: found.get(name) for name in vars(architecture)} | given
    if not complete["rope"]:
        complete["rope_parameters"] = None
    # The config adds what the setting leaves out, such as the length that the model was trained with.
    elif rope and found["rope_parameters"].items() >= given["rope_parameters"].items():
        complete["rope_parameters"] = found["rope_parameters"]
    return ModelArguments(**complete)


def build_model(
    architecture: ModelArguments,
    settings: DataArguments,
    data: PretrainingData,
    source: str | Path | None,
    weights: bool = True,
) -> NeoBERTForMaskedLM:
    """Make a new model, or load one from `source`, which must have this architecture and tokenizer.

    Args:
        weights: load those of `source`. If false, `source` is a checkpoint whose weights the Trainer loads later.
            Values that no setting names, such as rotary frequencies or spare rows of the vocabulary, come from it.
    """
    pad_token_id = data.tokenizer.pad_token_id
    # The decoder runs on the masked fifth of the tokens only.
    options = {"max_length": settings.max_length, "sparse_prediction": True}
    if source is None:
        vocabulary = {"vocab_size": data.manifest.vocab_size, "pad_token_id": pad_token_id}
        return NeoBERTForMaskedLM(NeoBERTConfig(**architecture.given(), **vocabulary, **options))
    stored = NeoBERTConfig.from_pretrained(source)
    wanted = architecture.given() | {"pad_token_id": pad_token_id}
    options |= {"dropout": wanted.pop("dropout", stored.dropout)}
    if "rope_parameters" in wanted:
        options["rope_parameters"] = wanted.pop("rope_parameters")
    if not stored.rope:
        # Rotary positions have no weights, so a later stage may use longer texts. Learned positions have weights.
        wanted["max_length"] = settings.max_length
    if differing := differences({name: getattr(stored, name) for name in wanted}, wanted):
        found = "; ".join(f"{name}: {old!r} there, {new!r} now" for name, old, new in differing)
        raise ValueError(f"The model in {source} has another architecture. {found}.")
    if not weights:
        return NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(source, **options))
    if tokenizer_fingerprint(load_tokenizer_of_model(source, stored.vocab_size)) != data.manifest.tokenizer_fingerprint:
        raise ValueError(
            f"The model in {source} has another tokenizer than {', '.join(settings.train_folders())}: prepare the "
            "data with it."
        )
    return NeoBERTForMaskedLM.from_pretrained(source, dtype=torch.float32, **options)


def checkpoint_settings(
    architecture: ModelArguments, data: DataArguments, arguments: PretrainingArguments, manifests: list[Manifest]
) -> dict:
    """All settings that the trained weights depend on, as a checkpoint stores them and a resume compares them."""
    return depends_on(
        architecture.given(),
        data,
        result_settings(arguments, leave_out=set(UNUSED)),
        init_from=data.init_from and _fingerprint_of_start(data, Path(arguments.output_dir)),
        tokenizer=manifests[0].tokenizer_fingerprint,
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
