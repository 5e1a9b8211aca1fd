"""From raw text to tokenised shards. A part of the source, `documents_per_shard` rows of it, becomes one shard.

So the shards are the same for any number of workers, and an interrupted run goes on with the parts that have no record
in `parts/`; see `neobert_hf.data.parts`.
"""

import glob
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from neobert_hf.common.files import absolute, write_parquet
from neobert_hf.common.fingerprints import tokenizer_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import check_same_identity, identity_of, output_folder
from neobert_hf.common.settings import check_numbers
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.data.held_out import is_held_out
from neobert_hf.data.parts import Part, do_parts, plan_parts, read_texts
from neobert_hf.data.rows import is_number
from neobert_hf.data.shards import (
    MANIFEST,
    SHORTEST,
    TOKENIZER,
    Manifest,
    check_max_length,
    save_tokenizer,
    write_shard,
)
from neobert_hf.data.sources import Source, as_dataset, is_table, local_files
from neobert_hf.data.tokenizer import with_special_tokens


# Number of documents that are looked at before work starts.
SAMPLED_DOCUMENTS = 100
ENCODED_TOGETHER = 1_000
# What became of the rows of the source: `read` are all, `other_part` those that `held_out_share` gives to the other
# part, `too_short` those of fewer than 2 tokens. With `long_documents` split, one may become several `documents`.
# `full` have `max_length` tokens: most of them were longer.
COUNTS = ("read", "other_part", "too_short", "documents", "tokens", "tokens_1024", "tokens_2048", "full")
# Beside texts that `deduplicate` wrote: how many rows it kept, and how many it took and why.
REMOVED = "removed.json"
# Records of the shards that are done; when all are, the manifest has what they say.
RECORDS = "parts"


@dataclass
class PrepareArguments:
    """The text, the tokenizer, and which documents become shards."""

    source: str = field(
        metadata={
            "help": "a Hub dataset, a URL (hf://, s3://), or a local file, pattern or folder (Parquet, JSONL, text)",
            "path": "or Hub id",
        }
    )
    tokenizer: str = field(metadata={"help": "folder or Hub name of the tokenizer", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "the folder or URL (s3://) to prepare", "path": True})
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
    documents_per_shard: int = field(default=20_000, metadata={"help": "rows of a file that become a shard"})
    skip_documents: int = field(default=0, metadata={"help": "number of documents to leave out at the start"})
    max_documents: int | None = field(default=None, metadata={"help": "read no more than these; all if unset"})
    held_out_share: float = field(
        default=0.0, metadata={"help": "hold out about this share of those documents, chosen by their text"}
    )
    part: Literal["train", "held_out"] = field(
        default="train",
        metadata={"help": "with held_out_share: prepare the documents to train on, or the held-out ones"},
    )
    workers: int = field(default=1, metadata={"help": "processes on this machine; a single one uses every core, too"})
    ray: str | None = field(
        default=None, metadata={"help": "auto, or the address of a Ray cluster, all of which sees source and output"}
    )

    def __post_init__(self):
        check_max_length(self.max_length)
        ranges = {"documents_per_shard": "1 or more", "skip_documents": "0 or more", "max_documents": "1 or more"}
        check_numbers(self, ranges | {"workers": "1 or more"})
        if not 0 <= self.held_out_share < 1 or (self.part == "held_out" and not self.held_out_share):
            raise ValueError(
                f"`held_out_share` is {self.held_out_share}; it is a share below 1, and above 0 for `part` held_out."
            )


@recipe
def prepare_data(settings: PrepareArguments) -> Result:
    """Tokenise raw text into shards for pretraining: on every core or a Ray cluster, in constant memory.

    The text is a Hub dataset, a URL of fsspec (`hf://`, `s3://`), local files or a table in memory, and the output a
    folder or a URL; `neobert_hf.data.shards` describes its layout. The shards are the same for any number of workers.
    Called again after an interruption, it goes on with the shards that are not there yet.

    Returns:
        `output`: the folder or URL. `neobert_hf.data.shards.read_manifest` tells what it holds.

    Raises:
        SettingsMismatch: if it was begun with other settings, or the source has another size now.
        ValueError: if tokenizer and text do not fit each other, or the text is no corpus.
    """
    # 1. A folder that no other run writes
    writes, inputs = (MANIFEST, TOKENIZER, RECORDS, "shard-*"), {"tokenizer": settings.tokenizer}
    folder = output_folder(settings.output_dir, "prepare_data", writes, inputs, {"source": settings.source})
    with folder, as_file(settings.source) as source:
        # 2. The tokenizer, and what the shards depend on
        settings, output = replace(settings, source=source), absolute(settings.output_dir.rstrip("/"))
        tokenizer = load_fast_tokenizer(settings)
        manifest = begin(settings, tokenizer, output)

        # 3. The shards that are not there yet
        if not manifest.finished:
            rows = (settings.documents_per_shard, settings.skip_documents, settings.max_documents)
            plan = plan_parts([source], *rows, settings.subset, settings.split)
            if Manifest.read(output) is None:
                check_first_documents(plan, tokenizer, settings)
                manifest.save(output)
            save_tokenizer(tokenizer, output)
            write_shards(plan, settings, manifest, output)
            manifest.finished = True
            manifest.save(output)
            remove_leftovers(output)
    counts = manifest.counts
    print(
        f"{settings.output_dir}: {counts['documents']:,} documents, {counts['tokens']:,} tokens in "
        f"{len(manifest.shards)} shards; {counts['tokens_1024']:,} documents of 1,024 tokens or more, "
        f"{counts['tokens_2048']:,} of 2,048 or more; {counts['too_short']:,} left out as too short",
        flush=True,
    )
    if counts["full"] and settings.long_documents == "truncate":
        print(
            f"Documents that fill all {settings.max_length:,} tokens: {counts['full']:,}. What is behind them is "
            "left out; `long_documents` split makes further documents of it.",
            flush=True,
        )
    return Result(output=settings.output_dir)


@contextmanager
def as_file(source: Source) -> Iterator[str]:
    """The source, or a file with the rows of a table in memory: the workers may be other processes."""
    with TemporaryDirectory() as folder:
        if is_table(source):
            file = Path(folder, "table.parquet")
            write_parquet(file, as_dataset(source))
        yield str(file) if is_table(source) else source


def begin(settings: PrepareArguments, tokenizer: PreTrainedTokenizerFast, output: str) -> Manifest:
    """The manifest that an earlier run left, or that of a new folder, which is not written yet.

    Raises:
        SettingsMismatch: if the earlier run had other settings.
    """
    files = [] if "://" in settings.source else local_files(settings.source)
    # Where local files lie changes nothing; of a Hub dataset or a URL, its name is what there is to compare.
    source = {"files": len(files), "bytes": sum(file.stat().st_size for file in files)} if files else {}
    source |= {"source": "local files" if files else settings.source, "tokenizer": tokenizer_fingerprint(tokenizer)}
    identity = identity_of(settings, source, leave_out=("workers", "ray"))
    # Not len(): ids may have holes.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    manifest = Manifest.read(output) or Manifest(settings.source, identity, vocab_size)
    advice = "Repeat those, choose another `output_dir`, or delete the folder."
    check_same_identity(output, manifest.identity, identity, advice)
    return manifest


def remove_leftovers(output: str) -> None:
    """Remove the records of the parts, and what killed workers left."""
    files, root = url_to_fs(output)
    files.invalidate_cache()
    for path in files.glob(f"{glob.escape(root)}/shard-*.partial"):
        files.rm_file(path)
    files.rm(f"{root}/{RECORDS}", recursive=True)


def load_fast_tokenizer(settings: PrepareArguments) -> PreTrainedTokenizerFast:
    """The tokenizer as it is saved with the shards, checked for what masked language modelling needs."""
    name = settings.tokenizer
    check_model_exists(name, "tokenizer")
    # NeoBERT's inputs: it has no token types. Its tokenizer should cut texts where the training text was cut.
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": settings.max_length}
    tokenizer = load_tokenizer(name, **inputs)
    if settings.add_special_tokens:
        tokenizer = with_special_tokens(tokenizer)
    names = ("cls_token", "sep_token", "pad_token", "mask_token")
    if missing := [name for name in names if getattr(tokenizer, name) is None]:
        raise ValueError(
            f"The tokenizer {name!r} has no {' and no '.join(missing)}, which masked language modelling needs: set "
            "`add_special_tokens` to true, or choose another tokenizer."
        )
    ids = tokenizer("a")["input_ids"]
    if ids[0] != tokenizer.cls_token_id or ids[-1] != tokenizer.sep_token_id:
        raise ValueError(
            f"The tokenizer {name!r} turns 'a' into {tokenizer.convert_ids_to_tokens(ids)}, not into "
            f"{tokenizer.cls_token} ... {tokenizer.sep_token}: give it a post-processor that adds both."
        )
    return tokenizer


def check_first_documents(plan: list[Part], tokenizer: PreTrainedTokenizerFast, settings: PrepareArguments) -> None:
    """Refuse text that is one document, has nothing in its column, or is in another language than the tokenizer's."""
    texts = []
    for part in plan:
        if rows := min(part.rows, SAMPLED_DOCUMENTS - len(texts)):
            texts += read_texts(replace(part, rows=rows), settings.column)
    if len(texts) < 2:
        skipped = f" after the first {settings.skip_documents:,}, which are skipped" if settings.skip_documents else ""
        raise ValueError(
            f"{settings.source!r} holds {len(texts)} of the documents that are asked for{skipped}; a corpus needs 2 or "
            'more. If all text is in one .txt file, write JSON lines, {"text": "..."} for each document.'
        )
    # Of a book, the beginning says enough.
    encoded = tokenizer([text[:10_000] for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    ids = [number for of_text in encoded for number in of_text]
    if not ids or all(is_number(text) for text in texts if text):
        found = "numbers" if ids else "no text"
        raise ValueError(
            f"The first {len(texts)} documents of {settings.source!r} have {found} in {settings.column!r}: is it the "
            "column with the text?"
        )
    if 2 * (unknown := ids.count(tokenizer.unk_token_id)) > len(ids):
        raise ValueError(
            f"{unknown / len(ids):.0%} of the tokens of the first {len(texts)} documents of {settings.source!r} are "
            f"{tokenizer.unk_token}: the tokenizer is of another language. Choose another, or train one with "
            "`train_tokenizer`."
        )


def write_shards(plan: list[Part], settings: PrepareArguments, manifest: Manifest, output: str) -> None:
    """Write the shards that are not there yet, and tell the manifest what is in each of them, and the `COUNTS`."""
    work = partial(prepare_part, settings=settings, output=output, vocab_size=manifest.vocab_size)
    records = do_parts(plan, work, f"{output}/{RECORDS}", manifest.identity, workers=settings.workers, ray=settings.ray)
    counts = {name: sum(record["counts"][name] for record in records) for name in COUNTS}
    if counts["other_part"] == counts["read"]:
        raise ValueError(
            f"`held_out_share` {settings.held_out_share} leaves none of the {counts['read']:,} documents of "
            f"{settings.source!r} for `part` {settings.part}: choose another share, or give more documents."
        )
    if not counts["documents"]:
        raise ValueError(f"None of the {counts['read']:,} documents of {settings.source!r} has 2 tokens or more.")
    manifest.shards, manifest.counts = [record["shard"] for record in records], removed_before(plan) | counts


def removed_before(plan: list[Part]) -> dict[str, int]:
    """What `deduplicate` took from the text, if it wrote the source."""
    try:
        with fsspec.open(f"{os.path.dirname(plan[0].file)}/{REMOVED}") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def prepare_part(part: Part, settings: PrepareArguments, output: str, vocab_size: int) -> tuple[None, dict[str, Any]]:
    """Write the shard of a part. Returns what the manifest says of it, and its `COUNTS`."""
    if settings.workers > 1 or settings.ray is not None:
        # One of several workers, each of which uses one core.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts, share = read_texts(part, settings.column), settings.held_out_share
    if share:
        texts = [text for text in texts if is_held_out(text, share) == (settings.part == "held_out")]
    with fsspec.open(f"{output}/{TOKENIZER}/tokenizer.json") as file:
        tokenizer = Tokenizer.from_buffer(file.read())
    windows = list(encode(texts, tokenizer, settings.max_length, settings.long_documents == "split"))
    documents = [ids for of_text in windows for ids in of_text]
    shard = write_shard(f"{output}/shard-{part.number:05}.arrow", documents, vocab_size)
    counts = {
        "read": part.rows,
        "other_part": part.rows - len(texts),
        "too_short": windows.count([]),
        "documents": len(documents),
        "tokens": shard["tokens"],
        "tokens_1024": sum(len(ids) >= 1024 for ids in documents),
        "tokens_2048": sum(len(ids) >= 2048 for ids in documents),
        "full": sum(len(ids) == settings.max_length for ids in documents),
    }
    return None, {"shard": shard, "counts": counts}


def encode(texts: list[str], tokenizer: Tokenizer, max_length: int, split: bool) -> Iterator[list[np.ndarray]]:
    """The documents made from each text: none, one, or with `split` one or several windows; special tokens included.

    Documents of fewer than 2 ordinary tokens are left out: with one masked, nothing would remain to predict it from.
    Text that spells a special token, such as `[MASK]`, becomes that token, as wherever this tokenizer is used. The
    tokenizer works on every core, and tokenises all of a text before it truncates it.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    batches = (texts[start : start + ENCODED_TOGETHER] for start in range(0, len(texts), ENCODED_TOGETHER))
    # While a batch is turned into arrays, the next one is tokenised.
    with ThreadPoolExecutor(1) as ahead:
        for encoding in chain.from_iterable(ahead.map(tokenizer.encode_batch_fast, batches)):
            windows = [encoding, *encoding.overflowing] if split else [encoding]
            # An array takes a tenth of the memory of a list of numbers.
            yield [np.array(window.ids, np.int32) for window in windows if len(window) >= SHORTEST]
