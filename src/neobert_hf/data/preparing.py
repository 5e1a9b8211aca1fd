"""From raw text to tokenised shards, one after the other; an interrupted run goes on after the last whole shard."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.compute as pc
from datasets import IterableDataset
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from neobert_hf.common import tokenizers
from neobert_hf.common.fingerprints import check_same_settings, depends_on, tokenizer_fingerprint
from neobert_hf.data.held_out import is_held_out
from neobert_hf.data.shards import MANIFEST, TOKENIZER, Manifest, load_shards, write_shard
from neobert_hf.data.tables import local_files, stream_text
from neobert_hf.data.tokenizer import with_special_tokens


# Number of documents that are looked at before work starts.
SAMPLED_DOCUMENTS = 100
ENCODED_TOGETHER = 1_000


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
        if not 0 <= self.held_out_share < 1 or (self.part == "held_out" and not self.held_out_share):
            raise ValueError(
                f"`held_out_share` is {self.held_out_share}; it is a share below 1, and above 0 for `part` held_out."
            )


def prepare(settings: PrepareArguments) -> Manifest:
    """Prepare a folder, from the start or from where an interrupted run stopped, and print what it holds.

    Raises:
        SettingsMismatch: if it was begun with other settings, or the source has another size now.
        ValueError: if tokenizer and text do not fit each other, or the text is no corpus.
    """
    output, tokenizer, stream = Path(settings.output_dir), load_fast_tokenizer(settings), open_stream(settings)
    files = local_files(settings.source)
    # Where local files lie changes nothing; of a Hub dataset, its name is what there is to compare.
    source = {"files": len(files), "bytes": sum(file.stat().st_size for file in files)} if files else {}
    source |= {"source": "local files" if files else settings.source, "tokenizer": tokenizer_fingerprint(tokenizer)}
    # Not len(): ids may have holes.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    manifest = Manifest(settings.source, depends_on(settings, source), vocab_size, state={})
    if (output / MANIFEST).exists():
        begun = Manifest.read(output)
        advice = "Repeat those, choose another `output_dir`, or delete the folder."
        check_same_settings(output, begun.settings, manifest.settings, advice)
        manifest = begun
        print(f"{output}: {len(manifest.shards)} shards are there already", flush=True)
    else:
        check_first_documents(stream, tokenizer, settings)
        tokenizer.save_pretrained(output / TOKENIZER)
    if manifest.state is not None:
        if manifest.state:
            stream.load_state_dict(manifest.state)
        write_shards(stream, tokenizer.backend_tokenizer, settings, manifest)
    if not manifest.total("documents"):
        raise ValueError(
            f"None of the {manifest.total('read'):,} documents of {settings.source!r} has 2 tokens or more."
        )
    print(summary(output), flush=True)
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


def open_stream(settings: PrepareArguments) -> IterableDataset:
    """The documents that the settings choose, but for `max_documents`."""
    stream = stream_text(settings.source, settings.column, settings.split, settings.subset)
    if settings.skip_documents:
        stream = stream.skip(settings.skip_documents)
    if settings.held_out_share:
        wanted = settings.part == "held_out"
        stream = stream.filter(lambda row: is_held_out(row[settings.column], settings.held_out_share) == wanted)
    return stream


def check_first_documents(stream: IterableDataset, tokenizer: PreTrainedTokenizerFast, settings: PrepareArguments):
    """Refuse text that is one document, has nothing in its column, or is in another language than the tokenizer's."""
    texts = [row[settings.column] for row in islice(stream, SAMPLED_DOCUMENTS)]
    if len(texts) < 2:
        raise ValueError(
            f"{settings.source!r} holds {len(texts)} of the documents that are asked for; a corpus needs 2 or more. If "
            'all text is in one .txt file, write JSON lines, {"text": "..."} for each document.'
        )
    # Of a book, the beginning says enough.
    encoded = tokenizer([text[:10_000] for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    ids = [number for of_text in encoded for number in of_text]
    if not ids:
        raise ValueError(
            f"The first {len(texts)} documents of {settings.source!r} have no text in {settings.column!r}: is it the "
            "column with the text?"
        )
    if 2 * (unknown := ids.count(tokenizer.unk_token_id)) > len(ids):
        raise ValueError(
            f"{unknown / len(ids):.0%} of the tokens of the first {len(texts)} documents of {settings.source!r} are "
            f"{tokenizer.unk_token}: the tokenizer is of another language. Choose another, or train one with "
            "examples/train_tokenizer.py."
        )


def write_shards(stream: IterableDataset, tokenizer: Tokenizer, settings: PrepareArguments, manifest: Manifest) -> None:
    """Write the shards that are not there yet. After each one, the manifest says so."""
    output, split = Path(settings.output_dir), settings.long_documents == "split"
    dtype = np.uint16 if manifest.vocab_size <= 2**16 else np.int32
    done = manifest.total("read")
    rows = islice(stream, None if settings.max_documents is None else settings.max_documents - done)
    with tqdm(total=settings.max_documents, initial=done, unit=" documents", smoothing=0, dynamic_ncols=True) as bar:
        while texts := [row[settings.column] for row in islice(rows, settings.documents_per_shard)]:
            windows = list(encode(texts, tokenizer, settings.max_length, split))
            documents = (ids for of_text in windows for ids in of_text)
            shard = write_shard(output / f"shard-{len(manifest.shards):05}.arrow", documents, dtype)
            manifest.shards.append(shard | {"read": len(texts), "dropped": windows.count([])})
            manifest.state = stream.state_dict()
            manifest.save(output)
            bar.update(len(texts))
    manifest.state = None
    manifest.save(output)


def encode(texts: list[str], tokenizer: Tokenizer, max_length: int, split: bool) -> Iterator[list[np.ndarray]]:
    """The documents made from each text: none, one, or with `split` one or several windows; special tokens included.

    Documents of fewer than 2 ordinary tokens are left out: with one masked, nothing would remain to predict it from.
    Text that spells a special token, such as `[MASK]`, becomes that token, as wherever this tokenizer is used.

    The tokenizer works on every core. It tokenises all of a text before it truncates it, 2.5 million characters a
    second and core. Cutting texts first would save 19% of that at 4,096 tokens on documentation of 8,300 characters a
    document, and 92% on books; but who keeps one window of a book should rather `split` it.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    for start in range(0, len(texts), ENCODED_TOGETHER):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + ENCODED_TOGETHER]):
            windows = [encoding, *encoding.overflowing] if split else [encoding]
            # An array takes a tenth of the memory of a list of numbers.
            yield [np.array(window.ids, np.int32) for window in windows if len(window.ids) >= 4]


def summary(folder: Path) -> str:
    """One line about a prepared folder."""
    manifest = Manifest.read(folder)
    lengths = [pc.list_value_length(chunk) for chunk in load_shards(folder).data.column("input_ids").chunks]
    long, longer = (sum(int(np.sum(of_chunk.to_numpy() >= n)) for of_chunk in lengths) for n in (1024, 2048))
    return (
        f"{folder}: {manifest.total('documents'):,} documents, {manifest.total('tokens'):,} tokens in "
        f"{len(manifest.shards)} shards; {long:,} documents of 1,024 tokens or more, {longer:,} of 2,048 or more; "
        f"{manifest.total('dropped'):,} left out as too short"
    )
