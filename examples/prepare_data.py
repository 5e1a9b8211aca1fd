"""Raw text to tokenised shards for pretraining, on every core, in constant memory, resumable.

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    python examples/prepare_data.py --config configs/data/refinedweb_validation.yaml

Two commands make two folders: the second holds the first 10,000 documents, which the first leaves out. The text is a
Hub dataset or local files (see `neobert_hf.common.text_sources`), the folder's layout is in
`neobert_hf.pretraining.shards`. After an interruption the same command continues. The shards depend on the settings
only, not on `num_proc` or interruptions.
"""

import json
import multiprocessing
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from datasets import IterableDataset
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from neobert_hf.common.atomic_writes import write_json
from neobert_hf.common.fingerprints import tokenizer_fingerprint
from neobert_hf.common.settings import differences, parse_config
from neobert_hf.common.text_sources import describe_files, stream_text
from neobert_hf.pretraining.shards import MANIFEST, TOKENIZER, Manifest, check_shard, read_manifest, write_shard


PROGRESS = "progress"
ENCODED_TOGETHER = 256
# A space or line break after a visible character; see `cut_text`.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")


@dataclass
class PrepareArguments:
    source: str = field(metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"})
    tokenizer: str = field(metadata={"help": "folder or Hub name of the tokenizer"})
    output_dir: str = field(metadata={"help": "the folder to prepare"})
    column: str = field(default="text", metadata={"help": "column that holds the text"})
    split: str = field(default="train", metadata={"help": "split of the dataset; local files are all `train`"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    max_length: int = field(default=4096, metadata={"help": "most tokens of a document, special tokens included"})
    long_documents: Literal["truncate", "split"] = field(
        default="truncate", metadata={"help": "leave the rest out (as in the paper), or make it further documents"}
    )
    documents_per_shard: int = field(default=20_000, metadata={"help": "documents of the source behind each shard"})
    num_proc: int = field(default=os.cpu_count() or 1, metadata={"help": "processes that tokenise"})
    skip_documents: int = field(default=0, metadata={"help": "leave out so many documents at the start"})
    max_documents: int | None = field(default=None, metadata={"help": "stop after so many documents; all if unset"})

    def __post_init__(self):
        least = {"max_length": 8, "documents_per_shard": 1, "num_proc": 1, "skip_documents": 0, "max_documents": 2}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} is {value}; it must be {minimum} or more.")


def load_fast_tokenizer(settings: PrepareArguments) -> PreTrainedTokenizerFast:
    """The tokenizer as it is saved with the shards, checked for what masked language modelling needs."""
    name = settings.tokenizer
    # What NeoBERT takes: it has no token types, and its tokenizer should cut where the training text was cut.
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": settings.max_length}
    tokenizer = AutoTokenizer.from_pretrained(name, **inputs)
    if not tokenizer.is_fast:
        raise ValueError(f"The tokenizer {name!r} has no fast backend (tokenizer.json): convert it or choose another.")
    special = {key: getattr(tokenizer, f"{key}_id") for key in ("cls_token", "sep_token", "pad_token", "mask_token")}
    missing = [key for key, token in special.items() if token is None]
    if missing:
        raise ValueError(
            f"The tokenizer {name!r} has no {' and no '.join(missing)}, which masked language modelling needs: choose "
            "another, or train one with examples/train_tokenizer.py."
        )
    ids = tokenizer("a")["input_ids"]
    if len(ids) < 3 or ids[0] != special["cls_token"] or ids[-1] != special["sep_token"]:
        raise ValueError(
            f"The tokenizer {name!r} turns 'a' into {tokenizer.convert_ids_to_tokens(ids)}, not into "
            f"{tokenizer.cls_token} ... {tokenizer.sep_token}: give it a post-processor that adds both."
        )
    return tokenizer


def plan(settings: PrepareArguments, tokenizer: PreTrainedTokenizerFast) -> Manifest:
    """The manifest without its results: all that the content of the shards depends on."""
    chosen = {key: getattr(settings, key) for key in ("source", "subset", "split", "skip_documents", "max_documents")}
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
    )


def check_same_plan(planned: Manifest, found: Manifest, folder: Path) -> None:
    """
    Raises:
        ValueError: naming the settings that differ from those that `folder` was begun with.
    """
    old, new = ({**asdict(manifest), **manifest.source} for manifest in (found, planned))
    results = {"source_documents", "documents", "tokens", "dropped_short", "length_histogram", "shards"}
    # `source` is looked at key by key: the dictionary as a whole has been replaced by its entry "source".
    old, new = ({key: plan[key] for key in plan if key not in results} for plan in (old, new))
    if differing := differences(old, new):
        changes = "; ".join(f"{key} was {before!r} and is now {now!r}" for key, before, now in differing)
        raise ValueError(
            f"{folder} was begun with other settings ({changes}): repeat those, choose another output_dir, or delete "
            "the folder."
        )


def open_stream(settings: PrepareArguments) -> IterableDataset:
    stream = stream_text(settings.source, settings.column, settings.split, settings.subset)
    return stream.skip(settings.skip_documents) if settings.skip_documents else stream


def check_several_documents(stream: IterableDataset, settings: PrepareArguments) -> None:
    count = len(list(islice(stream, 2)))
    if count < 2:
        skipped = f" after the first {settings.skip_documents:,}" if settings.skip_documents else ""
        raise ValueError(
            f"{settings.source!r} holds {count} document{'s' * (count != 1)}{skipped}; a corpus has several. If all "
            'text is in one .txt file, write JSON lines, {"text": "..."} for each document.'
        )


def can_cut(tokenizer: dict[str, Any]) -> bool:
    """Whether `cut_text` is safe for a tokenizer, given as parsed `tokenizer.json`."""
    normalizer, pre_tokenizer = ((tokenizer[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer"))
    if any(not token["special"] for token in tokenizer["added_tokens"]):
        return False
    if pre_tokenizer == "ByteLevel":
        return normalizer is None and tokenizer["pre_tokenizer"]["use_regex"]
    return pre_tokenizer == "BertPreTokenizer" and normalizer in (None, "BertNormalizer")


def cut_text(text: str, characters: int) -> str:
    """A beginning of about so many characters whose tokens begin the tokens of the whole text, if `can_cut`.

    The cut is before a space or line break that follows a visible character. Nothing that these tokenizers do there
    looks across it, so that the words before it, and with them their tokens, are the same with and without the rest:

    - BertNormalizer drops, replaces, pads and lower-cases single characters. Its decomposition (NFD) reorders combining
      marks, but none across a space or line break, which has combining class 0 and takes part in no composition.
      Other white space (form feed, U+0085) would not do: it counts as control character there and is dropped.
    - BertPreTokenizer separates words at white space, and a space or line break is still there after normalisation.
    - ByteLevel matches its expression from left to right. White space occurs in a match only as its first character
      before a word (` ?`), or in a match of white space only. So the match that holds the visible character ends at
      the cut in both cases. Matches before it end earlier still, and their one lookahead, `\\s+(?!\\S)`, sees at most
      that visible character.
    - The models (WordPiece, BPE) see one such word at a time. Added tokens, which are searched for in the whole text,
      are none but the special ones, and those are not searched for at all (see `encode`).
    """
    cut = SAFE_CUT.search(text, characters)
    return text[: cut.start()] if cut else text


def encode(texts: list[str], tokenizer_json: str, max_length: int, split: bool) -> Iterator[list[list[int]]]:
    """The documents that each text gives: none, one, or with `split` one or several windows; special tokens included.

    Documents of fewer than 2 ordinary tokens are left out: nothing could be predicted from the rest of them. Text that
    spells a special token, such as `[MASK]`, stays text.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    cut = not split and can_cut(json.loads(tokenizer_json))
    texts = iter(texts)
    while together := list(islice(texts, ENCODED_TOGETHER)):
        # Truncation works on the tokens of the whole text: of a book, nearly all of them would be made in vain.
        beginnings = [cut_text(text, 8 * max_length) for text in together] if cut else together
        for text, beginning, encoding in zip(together, beginnings, tokenizer.encode_batch_fast(beginnings)):
            if len(beginning) < len(text) and len(encoding.ids) < max_length:
                encoding = tokenizer.encode(text)
            windows = [encoding, *encoding.overflowing] if split else [encoding]
            yield [window.ids for window in windows if len(window.ids) >= 4]


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


def start_worker() -> None:
    # The processes are the parallelism. And when the parent is killed, its workers would wait for work forever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def read_chunks(stream: IterableDataset, column: str, size: int, limit: int | None) -> Iterator[tuple[list[str], dict]]:
    """Texts of `size` documents at a time, and the state of the stream after them."""
    documents = islice(stream, limit)
    while texts := [document[column] or "" for document in islice(documents, size)]:
        yield texts, stream.state_dict()


def read_records(output: Path) -> dict[int, dict]:
    """What is known of finished shards, by number."""
    records = {int(file.stem): json.loads(file.read_text()) for file in (output / PROGRESS).glob("[0-9]*.json")}
    for record in records.values():
        if record["shard"]:
            check_shard(output, record["shard"])
    return records


class ProgressBar(tqdm):
    """Documents of the source and the tokens that they gave."""

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
        context.set_forkserver_preload(["neobert_hf.pretraining.shards"])
    return ProcessPoolExecutor(num_proc, mp_context=context, initializer=start_worker)


def prepare_shards(
    stream: IterableDataset, manifest: Manifest, tokenizer_json: str, output: Path, num_proc: int
) -> list[dict]:
    """Write the shards that are not there yet.

    Returns:
        The record of each shard, in order.

    Raises:
        RuntimeError: if the system killed a worker.
    """
    records = read_records(output)
    begin = next(index for index in range(len(records) + 1) if index not in records)
    if begin:
        stream.load_state_dict(records[begin - 1]["state"])
    limit = manifest.source["max_documents"]
    bar = ProgressBar(limit, [records[index] for index in range(begin)])
    if records:
        print(f"{output}: going on; {len(records)} shards are there already")
    chunks = read_chunks(
        stream, manifest.column, manifest.documents_per_shard, None if limit is None else limit - bar.n
    )
    pending: dict[Future, tuple[int, dict]] = {}

    def collect(finished: set[Future]) -> None:
        for future in finished:
            index, state = pending.pop(future)
            records[index] = future.result() | {"state": state}
            write_json(output / PROGRESS / f"{index:05}.json", records[index])
            bar.add(records[index])

    with bar, start_workers(num_proc) as executor:
        try:
            for index, (texts, state) in enumerate(chunks, begin):
                if index in records:
                    bar.add(records[index])
                    continue
                path = output / f"shard-{index:05}.arrow"
                pending[executor.submit(prepare_shard, texts, tokenizer_json, manifest, path)] = index, state
                # One chunk waits while all processes work, so that none is idle and memory is bounded.
                if len(pending) > num_proc:
                    collect(wait(pending, return_when=FIRST_COMPLETED).done)
            collect(wait(pending).done)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "A worker was killed, probably for lack of memory: run the same command again with a lower num_proc; "
                "finished shards are kept."
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)
    return [records[index] for index in sorted(records)]


def finish(manifest: Manifest, records: list[dict], tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write tokenizer and, last, the manifest."""
    manifest.shards = [record["shard"] for record in records if record["shard"]]
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
    tokenizer.save_pretrained(partial)
    shutil.rmtree(output / TOKENIZER, ignore_errors=True)
    partial.rename(output / TOKENIZER)
    manifest.save(output / MANIFEST)
    shutil.rmtree(output / PROGRESS)


def report(manifest: Manifest, output: Path) -> None:
    print(
        f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in {len(manifest.shards)} shards; "
        f"{manifest.at_least(1024):,} documents of 1,024 tokens or more, {manifest.at_least(2048):,} of 2,048 or more; "
        f"{manifest.dropped_short:,} left out as too short"
    )


def main() -> None:
    (settings,) = parse_config(PrepareArguments)
    output = Path(settings.output_dir)
    progress = output / PROGRESS
    tokenizer = load_fast_tokenizer(settings)
    manifest = plan(settings, tokenizer)
    if (output / MANIFEST).exists():
        finished = read_manifest(output)
        check_same_plan(manifest, finished, output)
        print(f"{output} is finished already; nothing to do.")
        # Left over if the run was killed between its last two steps.
        shutil.rmtree(progress, ignore_errors=True)
        return report(finished, output)
    begun = (progress / MANIFEST).exists()
    if begun:
        check_same_plan(manifest, Manifest.read(progress / MANIFEST), output)
    elif output.exists() and any(path != progress for path in output.iterdir()):
        raise ValueError(f"{output} holds something else; choose an output_dir that is empty or does not exist.")
    stream = open_stream(settings)
    if not begun:
        check_several_documents(stream, settings)
        progress.mkdir(parents=True, exist_ok=True)
        manifest.save(progress / MANIFEST)
    for partial in [*output.glob("*.partial"), *progress.glob("*.partial")]:
        partial.unlink(missing_ok=True)
    records = prepare_shards(stream, manifest, tokenizer.backend_tokenizer.to_str(), output, settings.num_proc)
    finish(manifest, records, tokenizer, output)
    report(manifest, output)


if __name__ == "__main__":
    main()
