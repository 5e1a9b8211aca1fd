"""From raw text to tokenised shards: checks, the workers that tokenise, and the records from which a run resumes.

While a folder is being prepared, it holds finished shards and `progress/`. There lie the manifest so far and, for each
shard, `<number>.json` with what the shard adds to the manifest and the `state` of the stream after it.
"""

import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, dataclass, field, fields
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from datasets import IterableDataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from neobert_hf.common import tokenizers
from neobert_hf.common.files import remove, replace_folder, write_json
from neobert_hf.common.fingerprints import check_same_settings, texts_checksum, tokenizer_fingerprint
from neobert_hf.data.encoding import encode
from neobert_hf.data.held_out import is_held_out
from neobert_hf.data.shards import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    check_shard,
    read_manifest,
    write_shard,
)
from neobert_hf.data.tables import describe_files, files_state, is_empty, stream_text


PROGRESS = "progress"
# Number of documents that are checked before work starts.
SAMPLED_DOCUMENTS = 100


@dataclass
class PrepareArguments:
    source: str = field(
        metadata={
            "help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)",
            "path": "or Hub id",
        }
    )
    tokenizer: str = field(metadata={"help": "folder or Hub name of the tokenizer", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "the folder to prepare", "path": True})
    column: str = field(default="text", metadata={"help": "column that holds the text"})
    split: str = field(default="train", metadata={"help": "split of the dataset; local files are all `train`"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    add_special_tokens: bool = field(
        default=False,
        metadata={"help": "add [CLS], [SEP], [PAD] and [MASK] if the tokenizer lacks them, as LLaMA's does"},
    )
    max_length: int = field(default=4096, metadata={"help": "most tokens of a document, special tokens included"})
    long_documents: Literal["truncate", "split"] = field(
        default="truncate", metadata={"help": "leave the rest out (as in the paper), or turn it into further documents"}
    )
    documents_per_shard: int = field(default=20_000, metadata={"help": "documents of the source behind each shard"})
    num_proc: int = field(default=os.cpu_count() or 1, metadata={"help": "processes that tokenise"})
    skip_documents: int = field(default=0, metadata={"help": "number of documents to leave out at the start"})
    max_documents: int | None = field(default=None, metadata={"help": "stop after this many documents; all if unset"})

    held_out_share: float = field(
        default=0.0, metadata={"help": "hold out about this share of the documents, chosen by their text"}
    )
    part: Literal["train", "held_out"] = field(
        default="train",
        metadata={"help": "with held_out_share: prepare the documents to train on, or the held-out ones"},
    )

    def __post_init__(self):
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"`held_out_share` is {self.held_out_share}; it is a share from 0 to below 1.")
        if self.part == "held_out" and not self.held_out_share:
            raise ValueError("`part` is held_out, but nothing is held out: set `held_out_share` above 0.")


def prepare(settings: PrepareArguments) -> Manifest:
    """Prepare a folder, from the start or from where an interrupted run stopped, and print what it holds."""
    # 1. Tokenizer, and everything that the shards depend on
    output = Path(settings.output_dir)
    tokenizer = load_fast_tokenizer(settings)
    manifest = plan_manifest(settings, tokenizer)

    # 2. A folder that is finished is left alone
    if (finished := find_finished(manifest, output)) is not None:
        print(f"{output} is finished already; nothing to do.")
        print(summary(finished, output))
        return finished

    # 3. Text, and a folder that records the settings with which it was begun
    stream = begin_folder(settings, manifest, tokenizer)

    # 4. Shards, each as soon as its documents are read
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    records = prepare_shards(stream, manifest, tokenizer_json, output, settings.num_proc)

    # 5. Tokenizer and manifest, which completes the folder
    finish(manifest, records, tokenizer, output)
    print(summary(manifest, output))
    return manifest


def load_fast_tokenizer(settings: PrepareArguments) -> PreTrainedTokenizerFast:
    """The tokenizer as it is saved with the shards, checked for what masked language modelling needs."""
    name = settings.tokenizer
    # NeoBERT's inputs: it has no token types. Its tokenizer should cut texts where the training text was cut.
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": settings.max_length}
    tokenizer = tokenizers.load_tokenizer(name, **inputs)
    if not tokenizer.is_fast:
        raise ValueError(f"The tokenizer {name!r} has no fast backend (tokenizer.json): convert it or choose another.")
    if settings.add_special_tokens:
        tokenizer = tokenizers.with_special_tokens(tokenizer)
    special = {key: getattr(tokenizer, f"{key}_id") for key in ("cls_token", "sep_token", "pad_token", "mask_token")}
    missing = [key for key, token in special.items() if token is None]
    if missing:
        raise ValueError(
            f"The tokenizer {name!r} has no {' and no '.join(missing)}, which masked language modelling needs: set "
            "`add_special_tokens` to true, or choose another tokenizer."
        )
    ids = tokenizer("a")["input_ids"]
    if len(ids) < 3 or ids[0] != special["cls_token"] or ids[-1] != special["sep_token"]:
        raise ValueError(
            f"The tokenizer {name!r} turns 'a' into {tokenizer.convert_ids_to_tokens(ids)}, not into "
            f"{tokenizer.cls_token} ... {tokenizer.sep_token}: give it a post-processor that adds both."
        )
    return tokenizer


def plan_manifest(settings: PrepareArguments, tokenizer: PreTrainedTokenizerFast) -> Manifest:
    """The manifest without its results: everything that the content of the shards depends on."""
    chosen = {key: getattr(settings, key) for key in ("source", "subset", "split", "skip_documents", "max_documents")}
    if settings.held_out_share:
        chosen |= {"held_out_share": settings.held_out_share, "part": settings.part}
    # Not len(): ids may have holes.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    return Manifest(
        source=chosen | describe_files(settings.source),
        column=settings.column,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocab_size=vocab_size,
        max_length=settings.max_length,
        long_documents=settings.long_documents,
        dtype="uint16" if vocab_size <= 2**16 else "int32",
        documents_per_shard=settings.documents_per_shard,
        files_state=files_state(settings.source),
    )


def find_finished(planned: Manifest, output: Path) -> Manifest | None:
    """The manifest of a finished folder; None for a folder that these settings may begin or continue.

    Raises:
        ValueError: if it was begun with other settings or holds something else.
    """
    progress = output / PROGRESS
    if (output / MANIFEST).exists():
        finished = read_manifest(output)
        _check_same_plan(planned, finished, output)
        if _may_have_changed(planned, finished):
            _check_same_texts(planned, dict(enumerate(finished.texts)), output)
        # Left over if the run was killed between its last two steps.
        shutil.rmtree(progress, ignore_errors=True)
        return finished
    if (progress / MANIFEST).exists():
        _check_same_plan(planned, Manifest.read(progress / MANIFEST), output)
    elif output.exists() and any(path != progress for path in output.iterdir()):
        raise ValueError(f"{output} holds something else; choose an `output_dir` that is empty or does not exist.")
    return None


def _check_same_plan(planned: Manifest, found: Manifest, folder: Path) -> None:
    # Fields with a default are results, or `files_state`, which is no setting: copied files have another state, and for
    # those the texts are compared.
    names = [entry.name for entry in fields(Manifest) if entry.default is entry.default_factory is MISSING]

    def settings(manifest: Manifest) -> dict[str, Any]:
        # `source` holds settings, one of them with the name "source", so that they are compared one by one. Of local
        # files the texts are compared, wherever they lie.
        source = {} if manifest.files_state is None else {"source": "local files"}
        return {name: getattr(manifest, name) for name in names} | manifest.source | source

    advice = "Repeat those, choose another `output_dir`, or delete the folder."
    check_same_settings(folder, settings(found), settings(planned), advice)


def begin_folder(settings: PrepareArguments, manifest: Manifest, tokenizer: PreTrainedTokenizerFast) -> IterableDataset:
    """Open the text, record the settings before the first shard, and remove half-written leftovers."""
    stream = _open_stream(manifest)
    output = Path(settings.output_dir)
    progress = output / PROGRESS
    if (progress / MANIFEST).exists():
        if _may_have_changed(manifest, Manifest.read(progress / MANIFEST)):
            texts = {number: record["texts"] for number, record in _read_records(output).items() if "texts" in record}
            _check_same_texts(manifest, texts, output)
    else:
        first = [row[settings.column] for row in islice(stream, SAMPLED_DOCUMENTS)]
        if len(first) < 2:
            found = "1 document" if first else "0 documents"
            skip = settings.skip_documents
            skipped = f" after the first {skip:,} (`skip_documents`)" if skip else ""
            if settings.held_out_share:
                part = "to hold out" if settings.part == "held_out" else "to train on"
                raise ValueError(
                    f"{settings.source!r} holds {found} {part}{skipped}, but it must hold 2 or more: give more text, "
                    f"or change `held_out_share`, which is {settings.held_out_share}."
                )
            raise ValueError(
                f"{settings.source!r} holds {found}{skipped}; a corpus needs 2 or more. If all text is in one .txt "
                'file, write JSON lines, {"text": "..."} for each document.'
            )
        if all(map(is_empty, first)):
            raise ValueError(
                f"The first {len(first):,} documents of {settings.source!r} have no text in {settings.column!r}: is it "
                "the column with the text?"
            )
        _check_share_of_unknown(first, manifest, tokenizer)
        progress.mkdir(parents=True, exist_ok=True)
        manifest.save(progress / MANIFEST)
    for partial in [*output.glob("shard-*.partial"), *progress.glob("*.partial")]:
        remove(partial)
    return stream


def _check_share_of_unknown(texts: list[str], manifest: Manifest, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a tokenizer of another language, even if it is valid otherwise."""
    windows = chain.from_iterable(encode(texts, tokenizer.backend_tokenizer.to_str(), manifest.max_length, False))
    # Without [CLS] and [SEP].
    ids = [number for window in windows for number in window[1:-1]]
    unknown = ids.count(tokenizer.unk_token_id)
    if 2 * unknown > len(ids):
        raise ValueError(
            f"{unknown / len(ids):.0%} of the tokens of the first {len(texts)} documents of "
            f"{manifest.source['source']!r} are {tokenizer.unk_token}: the tokenizer is of another language. Choose "
            "another, or train one with examples/train_tokenizer.py."
        )


def _open_stream(manifest: Manifest) -> IterableDataset:
    source = manifest.source
    stream = stream_text(source["source"], manifest.column, source["split"], source["subset"])
    stream = stream.skip(source["skip_documents"]) if source["skip_documents"] else stream
    if "part" not in source:
        return stream
    share, held_out = source["held_out_share"], source["part"] == "held_out"
    return stream.filter(lambda row: is_held_out(row[manifest.column], share) == held_out)


def _may_have_changed(planned: Manifest, found: Manifest) -> bool:
    return found.files_state is not None and found.files_state != planned.files_state


def _check_same_texts(planned: Manifest, known: dict[int, str], folder: Path) -> None:
    """Read a source whose files were touched again, up to the last shard whose texts have a checksum.

    Raises:
        ValueError: naming the first documents that have changed.
    """
    print(
        f"{folder}: files of {planned.source['source']} have been touched since then; comparing their texts", flush=True
    )
    chunks = _read_chunks(_open_stream(planned), planned, planned.source["max_documents"])
    for number in range(max(known, default=-1) + 1):
        texts, _ = next(chunks, ([], None))
        if number in known and texts_checksum(texts) != known[number]:
            first = planned.source["skip_documents"] + number * planned.documents_per_shard
            raise ValueError(
                f"The text of {planned.source['source']!r} has changed since {folder} was begun: among the documents "
                f"from row {first:,} to {first + planned.documents_per_shard - 1:,} some are different, or they are "
                "in another order. Restore the text, choose another `output_dir`, or delete the folder."
            )


def prepare_shards(
    stream: IterableDataset, manifest: Manifest, tokenizer_json: str, output: Path, num_proc: int
) -> list[dict]:
    """Write the shards that are not there yet.

    Args:
        tokenizer_json: the content of `tokenizer.json`, for the `num_proc` processes that tokenise.

    Returns:
        The record of each shard, in order.

    Raises:
        RuntimeError: if the system killed a worker.
    """
    records = _read_records(output)
    first = next(number for number in range(len(records) + 1) if number not in records)
    if first:
        stream.load_state_dict(records[first - 1]["state"])
    if records:
        print(f"{output}: resuming; {len(records)} shards are there already")
    bar = ProgressBar(manifest.source["max_documents"], [records[number] for number in range(first)])
    limit = None if bar.total is None else bar.total - bar.n
    pending: dict[Future, tuple[int, dict]] = {}
    checksums: dict[int, str] = {}

    def store(finished: set[Future]) -> None:
        for future in finished:
            number, state = pending.pop(future)
            records[number] = future.result() | {"state": state, "texts": checksums.pop(number)}
            write_json(output / PROGRESS / f"{number:05}.json", records[number])
            bar.add(records[number])

    with bar, start_workers(num_proc) as executor:
        try:
            for number, (texts, state) in enumerate(_read_chunks(stream, manifest, limit), first):
                if number in records:
                    bar.add(records[number])
                    continue
                path = output / f"shard-{number:05}.arrow"
                checksums[number] = texts_checksum(texts)
                pending[executor.submit(prepare_shard, texts, tokenizer_json, manifest, path)] = number, state
                # While all processes work, one chunk waits, so that no process is idle and memory stays bounded.
                if len(pending) > num_proc:
                    store(wait(pending, return_when=FIRST_COMPLETED).done)
            store(wait(pending).done)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "A worker was killed, probably for lack of memory: run the same command again with a lower `num_proc`; "
                "finished shards are kept."
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)
    return [records[number] for number in sorted(records)]


def _read_records(output: Path) -> dict[int, dict]:
    """The records of the finished shards, by number; FileNotFoundError if a shard is missing."""
    files = sorted((output / PROGRESS).glob("[0-9]*.json"))
    records = {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in files}
    for record in records.values():
        if record["shard"]:
            check_shard(output, record["shard"])
    return records


def _read_chunks(stream: IterableDataset, manifest: Manifest, limit: int | None) -> Iterator[tuple[list[str], dict]]:
    """The texts behind each shard, and the state of the stream after them."""
    documents = islice(stream, limit)
    while texts := [row[manifest.column] for row in islice(documents, manifest.documents_per_shard)]:
        yield texts, stream.state_dict()


class ProgressBar(tqdm):
    """Shows the documents read from the source and the tokens that they gave."""

    def __init__(self, total: int | None, finished: list[dict]):
        read = sum(record["source_documents"] for record in finished)
        super().__init__(unit=" documents", total=total, initial=read, smoothing=0, dynamic_ncols=True)
        self.tokens = sum(record["shard"]["tokens"] for record in finished if record["shard"])

    def add(self, record: dict) -> None:
        self.tokens += record["shard"]["tokens"] if record["shard"] else 0
        self.set_postfix(tokens=f"{self.tokens:,}", refresh=False)
        self.update(record["source_documents"])


def start_workers(num_proc: int) -> ProcessPoolExecutor:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        # Imported once, not by each worker.
        context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(num_proc, mp_context=context, initializer=_begin_worker)


def _begin_worker() -> None:
    # The processes are parallel already. The thread is for a killed parent: its workers would wait for work forever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def prepare_shard(texts: list[str], tokenizer_json: str, manifest: Manifest, path: Path) -> dict[str, Any]:
    """Tokenise texts into one shard.

    Returns:
        What the shard adds to the manifest, as JSON can hold it; `shard` is None if all texts were too short.
    """
    lengths, dropped = Counter(), 0

    def documents() -> Iterator[list[int]]:
        nonlocal dropped
        for windows in encode(texts, tokenizer_json, manifest.max_length, manifest.long_documents == "split"):
            dropped += not windows
            lengths.update(1 << len(ids).bit_length() - 1 for ids in windows)
            yield from windows

    shard = write_shard(path, documents(), manifest.dtype)
    return {"shard": shard, "source_documents": len(texts), "dropped_short": dropped, "length_histogram": lengths}


def finish(manifest: Manifest, records: list[dict], tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write tokenizer and, last, the manifest, whose results are the sums of the records."""
    manifest.shards = [record["shard"] for record in records if record["shard"]]
    manifest.texts = [record["texts"] for record in records]
    for name in ("source_documents", "dropped_short"):
        setattr(manifest, name, sum(record[name] for record in records))
    for name in ("documents", "tokens"):
        setattr(manifest, name, sum(shard[name] for shard in manifest.shards))
    lengths = Counter()
    for record in records:
        lengths.update({int(edge): count for edge, count in record["length_histogram"].items()})
    manifest.length_histogram = dict(sorted(lengths.items()))
    if not manifest.documents:
        raise ValueError(
            f"None of the {manifest.source_documents:,} documents has 2 tokens or more: is {manifest.column!r} the "
            "column with the text?"
        )
    partial = output / PROGRESS / TOKENIZER
    remove(partial)
    tokenizer.save_pretrained(partial)
    replace_folder(partial, output / TOKENIZER)
    manifest.save(output / MANIFEST)
    shutil.rmtree(output / PROGRESS)


def summary(manifest: Manifest, output: Path) -> str:
    """One line about a prepared folder."""
    long, longer = (
        sum(count for edge, count in manifest.length_histogram.items() if edge >= length) for length in (1024, 2048)
    )
    return (
        f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in {len(manifest.shards)} shards; "
        f"{long:,} documents of 1,024 tokens or more, {longer:,} of 2,048 or more; "
        f"{manifest.dropped_short:,} left out as too short"
    )
