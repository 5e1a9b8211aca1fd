"""The documents of an index: where they are read, which of them changed, and their passages."""

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
import torch
import xxhash
from tqdm import tqdm

from neobert_hf.contextual.model import embed_context
from neobert_hf.data.rows import is_empty
from neobert_hf.data.sources import holds_documents, is_table, local_files, read_rows
from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.passages import Passage


@dataclass
class SourceSettings:
    """What is indexed."""

    source: str = field(
        metadata={"help": "text or Markdown files, Parquet, JSON lines, CSV, or a Hub dataset", "path": "or Hub id"}
    )
    name: str | None = field(
        default=None,
        metadata={
            "help": "name of the source in the index; documents that were indexed under it, but are no longer in the "
            "source, are removed; `source` itself if unset; a table in memory needs one"
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
        default=4096, metadata={"help": "passages between two writes, which an interruption can lose"}
    )

    def __post_init__(self):
        if is_table(self.source) and not self.name:
            raise ValueError("`source` is a table, which has no name: give `name`, under which the index will know it.")

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


class Documents:
    """Which documents of a source the index lacks, in some 30 bytes a document: corpora are larger than memory.

    Documents are numbered as `read_documents` gives them, and compared by 64-bit hashes of their ids and texts.

    Attributes:
        total: how many the source has.
        rows: the numbers of those that count (documents,): they have text, and their id occurs here first.
        missing: whether each of the `total` documents has to be embedded, as far as `compare` knows.
        replaced: whether it is stored with another text.

    Raises:
        ValueError: if an id belongs to two texts, or there is no text at all.
    """

    def __init__(self, source: SourceSettings):
        self.source = source
        ids, texts = array("Q"), array("Q")
        for document, text_hash, text in tqdm(source.read_documents(), desc="reading", unit=" documents"):
            ids.append(_hash_of_id(document))
            texts.append(_NO_TEXT if text is None else _number(text_hash))
        # Views of the arrays, not copies of them.
        ids, self.texts = np.frombuffer(ids, np.uint64), np.frombuffer(texts, np.uint64)
        self.total = len(ids)
        # The rows with text by their ids. The order is stable, so of equal ids the first row comes first.
        rows = np.argsort(ids, kind="stable")
        rows = rows[self.texts[rows] != _NO_TEXT]
        if not len(rows):
            raise ValueError(f"The source has no text: all of its {self.total:,} documents are empty.")
        ids = ids[rows]
        repeats = np.append(False, ids[1:] == ids[:-1])
        same_id = np.flatnonzero(repeats)
        if len(other := same_id[self.texts[rows[same_id]] != self.texts[rows[same_id - 1]]]):
            document, *_ = next(islice(source.read_documents(), int(rows[other[0]]), None))
            raise ValueError(f"The id {document!r} belongs to two texts: name an `id_column` without repeats.")
        self.rows, self.ids = rows[~repeats], ids[~repeats]
        self.missing, self.replaced = np.zeros(self.total, bool), np.zeros(self.total, bool)
        self.missing[self.rows] = True

    def compare(self, stored: Iterable[tuple[str, str]]) -> list[str]:
        """Tell what is stored already, from `VectorIndex.document_hashes`. Returns the ids that are gone, sorted."""
        gone = []
        for document, text_hash in stored:
            own = _hash_of_id(document)
            place = np.searchsorted(self.ids, own)
            if place == len(self.ids) or self.ids[place] != own:
                gone.append(document)
            elif self.texts[self.rows[place]] == _number(text_hash):
                self.missing[self.rows[place]] = False
            else:
                self.replaced[self.rows[place]] = True
        return sorted(gone)

    def passages(self, encoder: PassageEncoder) -> Iterator[tuple[list[Passage], list[str]]]:
        """The passages of the documents that are missing, in portions, and which of these documents are replaced.

        All passages of a document are in one portion.
        """
        portion, replaced, source = [], [], self.source
        for number, (document, text_hash, text) in enumerate(source.read_documents() if self.missing.any() else ()):
            if not self.missing[number]:
                continue
            parts = encoder.split(text)
            portion += [
                Passage(source.name_in_index, document, place, len(parts), text_hash, part)
                for place, part in enumerate(parts)
            ]
            replaced += [document] if self.replaced[number] else []
            if len(portion) >= source.write_every:
                yield portion, replaced
                portion, replaced = [], []
        if portion:
            yield portion, replaced

    def context(self, encoder: PassageEncoder) -> torch.Tensor:
        """The context of a contextual model: a passage of each document that is drawn, or more if there are few.

        Documents that are added later are embedded with the same context, and so are queries: embeddings made with two
        contexts cannot be compared.
        """
        size, generator = encoder.model[0].model.config.context_size, np.random.default_rng(0)
        drawn = set(generator.choice(self.rows, min(size, len(self.rows)), replace=False).tolist())
        documents = enumerate(self.source.read_documents())
        passages = [encoder.split(text) for number, (*_, text) in documents if number in drawn]
        chosen = [part for parts in passages for part in parts]
        if len(passages) == size:
            chosen = [parts[generator.integers(len(parts))] for parts in passages]
        prompt = encoder.identity["document_prompt"]
        return embed_context(encoder.model, chosen, seed=0, prompt=prompt, batch_size=self.source.batch_size)


_NO_TEXT = 0


def _hash_of_id(document: str) -> int:
    return xxhash.xxh3_64_intdigest(document.encode("utf-8", "surrogatepass"))


def _number(text_hash: str) -> int:
    """The first 64 bits of a hash; of a document that is stored in part, which has an empty one, as of no text."""
    return int(text_hash[:16] or "0", 16)
