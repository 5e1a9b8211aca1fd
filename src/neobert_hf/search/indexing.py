"""Keeping an index up to date: new and changed documents of its source are embedded, deleted ones are removed."""

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from neobert_hf.data.tables import holds_documents, is_empty, local_files, read_rows
from neobert_hf.embeddings.contextual import embed_context
from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.index import Passage, VectorIndex


@dataclass
class SourceSettings:
    """What is indexed, and how much of it at a time."""

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
        default=1024, metadata={"help": "passages between two writes, which an interruption can lose"}
    )

    @property
    def name_in_index(self) -> str:
        if self.name:
            return self.name
        if local_files(self.source):
            return os.path.abspath(os.path.expanduser(self.source))
        # Each subset or split of a Hub dataset is a source of its own. Otherwise indexing one would remove the others.
        parts = [self.source, *([self.subset] if self.subset else []), *([self.split] if self.split != "train" else [])]
        return ":".join(parts)

    def read_documents(self) -> Iterator[tuple[str | None, str | None]]:
        """Id and text of each document. The id is the path of a text file, or in `id_column`, or None."""
        of_files = holds_documents(self.source)
        id_column = None if of_files else self.id_column
        columns = [self.column] if id_column is None else [self.column, id_column]
        for row in read_rows(self.source, columns, self.subset, self.split):
            # Not `resolve`, which would give two links to one file the same id.
            identity = os.path.abspath(row.source) if of_files else row.text(id_column) if id_column else None
            yield identity, row.text_or_none(self.column)


def update_index(index: VectorIndex, encoder: PassageEncoder, settings: SourceSettings) -> str:
    """Make an index hold what its source holds now, and create it if it does not exist.

    The source is read twice: before anything is written, for the hashes of all documents, and then for the texts of
    those that changed. If the run ends early, what was written stays, and is not embedded again.

    Returns:
        One line that says how many documents were embedded, removed and left as they are.
    """
    encoder.split("")  # Raises what it would raise on the first document.
    hashes, left_out = _read_hashes(settings)
    if index.identity is None:
        if encoder.needs_context:
            encoder.use_context(_make_context(settings, encoder, hashes))
            index.write_context(encoder.context)
        index.create(encoder.identity)
    source = settings.name_in_index
    stored = index.document_hashes(source)
    changed = {document for document, text_hash in hashes.items() if stored.get(document) != text_hash}
    gone = stored.keys() - hashes.keys()
    index.delete(source, sorted(gone))

    written = 0
    for passages in _passage_batches(settings, encoder, changed):
        vectors = encoder.embed("document", [passage.text for passage in passages], settings.batch_size)
        index.replace(sorted({passage.document for passage in passages} & stored.keys()), passages, vectors)
        written += len(passages)
    index.optimize()
    return (
        f"{len(changed):,} documents embedded ({written:,} passages), {len(hashes) - len(changed):,} unchanged, "
        f"{len(gone):,} removed; {left_out}"
    )


def _make_context(settings: SourceSettings, encoder: PassageEncoder, hashes: dict[str, str]) -> torch.Tensor:
    """The context of the source: a passage of each document that is drawn with seed 0, or more if there are few.

    Documents that are added later are embedded with the same context, and so are queries: embeddings made with two
    contexts cannot be compared.
    """
    size = encoder.model[0].model.config.context_size
    drawn = set(random.Random(0).sample(sorted(hashes), min(size, len(hashes))))
    passages = []
    for document, _, text in _read_documents(settings):
        if text is not None and document in drawn:
            drawn.remove(document)
            passages.append(encoder.split(text))
    chosen = [part for parts in passages for part in parts]
    if len(passages) >= size:
        generator = random.Random(0)
        chosen = [generator.choice(parts) for parts in passages]
    prompt = encoder.identity["document_prompt"]
    return embed_context(encoder.model, chosen, seed=0, prompt=prompt, batch_size=settings.batch_size)


def _read_documents(settings: SourceSettings) -> Iterator[tuple[str, str, str | None]]:
    """Id, hash and text of each document; the text is None if it is empty. The hash is also the id if there is none."""
    for document, text in settings.read_documents():
        text_hash = hashlib.sha256((text or "").encode()).hexdigest()[:32]
        yield text_hash if document is None else document, text_hash, None if is_empty(text) else text


def _read_hashes(settings: SourceSettings) -> tuple[dict[str, str], str]:
    """The hash of each document by its id, and a line on what was left out. Texts are not kept."""
    hashes, total, empty = {}, 0, 0
    for document, text_hash, text in tqdm(_read_documents(settings), desc="reading", unit=" documents"):
        total += 1
        if text is None:
            empty += 1
        elif hashes.setdefault(document, text_hash) != text_hash:
            raise ValueError(f"The id {document!r} belongs to two texts: name an `id_column` without repeats.")
    if not hashes:
        raise ValueError(f"The source has no text: all of its {total:,} documents are empty.")
    return hashes, f"{total - empty - len(hashes):,} repeated and {empty:,} empty ones left out"


def _passage_batches(settings: SourceSettings, encoder: PassageEncoder, changed: set[str]) -> Iterator[list[Passage]]:
    """The passages of the changed documents, `write_every` at a time or a few more, since no document is split."""
    source, remaining, batch = settings.name_in_index, set(changed), []
    if not changed:
        return
    with tqdm(total=len(changed), desc="embedding", unit=" documents") as progress:
        for document, text_hash, text in _read_documents(settings):
            if text is None or document not in remaining:
                continue
            remaining.remove(document)
            parts = encoder.split(text)
            batch += [Passage(source, document, i, len(parts), text_hash, part) for i, part in enumerate(parts)]
            if len(batch) >= settings.write_every:
                yield batch
                batch = []
            progress.update()
            if not remaining:
                break
        if batch:
            yield batch
