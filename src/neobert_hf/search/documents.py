"""The documents of an index: where they are read, which of them changed, and their passages."""

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from tqdm import tqdm

from neobert_hf.data.tables import holds_documents, is_empty, local_files, read_rows
from neobert_hf.embeddings.contextual import embed_context
from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.passages import Passage


# Passages that are written at once at most; their vectors must fit in memory. Ten million are about 80 writes: LanceDB
# keeps a version and a file of each.
MOST_AT_ONCE = 262_144


@dataclass
class SourceSettings:
    """What is indexed."""

    source: str = field(
        metadata={"help": "text or Markdown files, Parquet, JSON lines, or a Hub dataset", "path": "or Hub id"}
    )
    name: str | None = field(
        default=None,
        metadata={
            "help": "name of the source in the index; documents that were indexed under it, but are no longer in the "
            "source, are removed; `source` itself if unset"
        },
    )
    column: str = field(
        default="text", metadata={"help": "name of the column that holds the text, unless the source is text files"}
    )
    id_column: str | None = field(
        default=None, metadata={"help": "name of the column that identifies a row; a hash of the text if unset"}
    )
    split: str = field(default="train", metadata={"help": "split of a Hub dataset"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    batch_size: int = field(default=32, metadata={"help": "passages embedded at once"})
    write_every: int = field(
        default=4096,
        metadata={"help": "passages between two writes, which an interruption can lose; later a tenth of the written"},
    )

    @cached_property
    def name_in_index(self) -> str:
        if self.name:
            return self.name
        if local_files(self.source):
            return os.path.abspath(os.path.expanduser(self.source))
        # Each subset or split of a Hub dataset is a source of its own. Otherwise indexing one would remove the others.
        parts = [self.source, *([self.subset] if self.subset else []), *([self.split] if self.split != "train" else [])]
        return ":".join(parts)

    def read_documents(self) -> Iterator[tuple[str, str, str | None]]:
        """Id, hash and text of each document; the text is None if it is empty.

        The id is the path of a text file, the `id_column` of a row, or otherwise the hash.
        """
        of_files = holds_documents(self.source)
        id_column = None if of_files else self.id_column
        columns = [self.column] if id_column is None else [self.column, id_column]
        for row in read_rows(self.source, columns, self.subset, self.split):
            text = row.text_or_none(self.column) or ""
            text_hash = hashlib.sha256(text.encode()).hexdigest()[:32]
            # Not `resolve`, which would give two links to one file the same id.
            document = os.path.abspath(row.source) if of_files else row.text(id_column) if id_column else text_hash
            yield document, text_hash, None if is_empty(text) else text


def read_hashes(source: SourceSettings) -> tuple[dict[str, str], int]:
    """The hash of each document by its id, and how many were left out: those without text, and repetitions.

    Raises:
        ValueError: if an id belongs to two texts, or there is no text at all.
    """
    hashes, total = {}, 0
    for document, text_hash, text in tqdm(source.read_documents(), desc="reading", unit=" documents"):
        total += 1
        if text is not None and hashes.setdefault(document, text_hash) != text_hash:
            raise ValueError(f"The id {document!r} belongs to two texts: name an `id_column` without repeats.")
    if not hashes:
        raise ValueError(f"The source has no text: all of its {total:,} documents are empty.")
    return hashes, total - len(hashes)


def read_passages(source: SourceSettings, encoder: PassageEncoder, documents: set[str]) -> Iterator[list[Passage]]:
    """The passages of these documents, in the portions that are written at once; each document is in one of them."""
    remaining, portion, written = set(documents), [], 0
    with tqdm(total=len(documents), desc="embedding", unit=" documents") as progress:
        for document, text_hash, text in source.read_documents() if documents else ():
            if text is None or document not in remaining:
                continue
            remaining.remove(document)
            parts = encoder.split(text)
            portion += [
                Passage(source.name_in_index, document, number, len(parts), text_hash, part)
                for number, part in enumerate(parts)
            ]
            if len(portion) >= min(max(source.write_every, written // 10), MOST_AT_ONCE):
                yield portion
                written, portion = written + len(portion), []
            progress.update()
    if portion:
        yield portion


def make_context(source: SourceSettings, encoder: PassageEncoder, documents: list[str]) -> torch.Tensor:
    """The context of a contextual model: a passage of each document that is drawn, or more if there are few.

    Documents that are added later are embedded with the same context, and so are queries: embeddings made with two
    contexts cannot be compared.
    """
    size, generator = encoder.model[0].model.config.context_size, random.Random(0)
    drawn = set(generator.sample(sorted(documents), min(size, len(documents))))
    passages = {document: encoder.split(text) for document, _, text in source.read_documents() if document in drawn}
    chosen = [part for parts in passages.values() for part in parts]
    if len(passages) == size:
        chosen = [generator.choice(parts) for parts in passages.values()]
    prompt = encoder.identity["document_prompt"]
    return embed_context(encoder.model, chosen, seed=0, prompt=prompt, batch_size=source.batch_size)
