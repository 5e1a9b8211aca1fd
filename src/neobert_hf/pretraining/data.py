"""The data of pretraining: prepared folders as micro-batches to train on, and others to evaluate on."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from neobert_hf.common.paths import check_exists
from neobert_hf.data.batches import DataArguments, HeldOutBatchSampler, MLMBatchSampler
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import PreparedDocuments
from neobert_hf.data.shards import Manifest, prepared_tokenizer, read_manifest
from neobert_hf.pretraining.settings import PretrainingArguments


# In bfloat16 on a CPU, oneDNN compiles a matrix product for every number of rows that it has not seen yet, 17 ms each.
# Packs of whole documents have a different number of tokens at nearly every step, so without this rounding up,
# compiling takes a third of a small model's training time.
CPU_ROW_MULTIPLE = 128
# The loss of a token had a standard deviation of 3.1 nats with benchmarks/models/small on Python's reference: the 95%
# interval of the mean of so many is +- 0.1.
FEW_MASKED = 3_500


@dataclass
class MicroBatches:
    """Documents, which of them make up each micro-batch, and how they are masked and laid out."""

    documents: PreparedDocuments
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
        FileNotFoundError: naming the setting, if there is no such folder.
        ValueError: if folders do not fit each other or the settings, or held-out text is trained on.
    """
    if arguments.eval_strategy != "no" and not data.validation_data:
        raise ValueError(
            "`validation_data` names no folder to evaluate on: give one, or set `eval_strategy` to no to train without."
        )
    shares = data.train_folders()
    # A configuration may name folders that the user does not know of.
    for setting, folders in {"train_data": shares, "validation_data": data.validation_data or []}.items():
        for folder in [each for each in folders if "://" not in each]:
            check_exists(folder, setting)
    manifests = {folder: read_manifest(folder) for folder in [*shares, *(data.validation_data or [])]}
    first = next(iter(shares))
    for folder, manifest in manifests.items():
        if manifest.identity["tokenizer"] != manifests[first].identity["tokenizer"]:
            raise ValueError(f"{folder} was prepared with another tokenizer than {first}.")
        if folder in shares and data.layout != "naive" and data.max_length > manifest.identity["max_length"]:
            raise ValueError(
                f"`max_length` is {data.max_length}, and {folder} was prepared with {manifest.identity['max_length']}: "
                "the config would claim a length that the model has never seen. Lower it, or prepare the text again."
            )
    documents = PreparedDocuments(list(shares), data.max_length, data.cache_gb)
    process = (arguments.process_index, arguments.world_size)
    sampler = MLMBatchSampler(documents, data, arguments.seed, *process, list(shares.values()))
    tokenizer = prepared_tokenizer(first)
    # The tokenizer is saved with the model, and has to cut texts at the model's length.
    tokenizer.model_max_length = data.max_length
    masks = (data.mlm_probability, data.mask_replace_prob, data.random_replace_prob)
    row_multiple = CPU_ROW_MULTIPLE if arguments.bf16 and arguments.device.type == "cpu" else 1
    collator = MLMCollator(tokenizer, *masks, data.layout, data.max_length, arguments.seed, row_multiple)
    held_out = []
    for folder in data.validation_data or []:
        for trained in shares:
            _check_held_out(folder, manifests[folder], trained, manifests[trained])
        rows = PreparedDocuments([folder], data.max_length, data.cache_gb)
        every = HeldOutBatchSampler(rows, data.micro_batch_tokens, *process)
        # Always packed and with the same masks, whatever the layout and seed of training: runs can be compared.
        share = data.validation_mlm_probability or data.mlm_probability
        same = replace(collator, layout="packed", seed=0, mlm_probability=share)
        held_out.append(MicroBatches(rows, every, same))
        masked = int(share * every.tokens)
        if masked < FEW_MASKED and arguments.process_index == 0:
            print(
                f"{folder} has about {masked:,} masked tokens to measure on: its loss may be off by 0.1 nats or "
                "more. Hold out more text (`held_out_share` of `prepare_data`).",
                flush=True,
            )
    train = MicroBatches(documents, sampler, collator)
    return PretrainingData([manifests[folder] for folder in shares], train, held_out)


def _check_held_out(folder: str, held_out: Manifest, trained_on: str, trained: Manifest) -> None:
    """Refuse held-out text that may also be trained on, as far as the settings show: its loss would be too good."""
    one, other = held_out.identity, trained.identity
    if any(one.get(name) != other.get(name) for name in ("source", "files", "bytes", "subset", "split")):
        return
    if one["held_out_share"] == other["held_out_share"] and one["part"] != other["part"]:
        return
    first, second = sorted((one, other), key=lambda identity: identity["skip_documents"])
    most = first["max_documents"]
    if most is None or first["skip_documents"] + most > second["skip_documents"]:
        raise ValueError(
            f"{folder} may hold rows of {trained_on}, which is trained on: its loss would be too good. Prepare both "
            "with the same `held_out_share`, one of them with `part` held_out; or prepare different rows: "
            "`max_documents` for one and as many `skip_documents` for the other."
        )
