"""The documents of an index: where they are read, which of them changed, and their passages."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import xxhash
from tqdm import tqdm

from neobert_hf.data.tables import holds_documents, is_empty, local_files, read_rows
from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.passages import Passage


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
        default=4096, metadata={"help": "passages between two writes, which an interruption can lose"}
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
    """The documents of a source that an index lacks.

    Of each document only two numbers are kept, the hashes of its id and of its text: corpora are larger than memory.

    Attributes:
        total: how many documents the source has.
        count: how many of them count: they have text, and their id occurs here first.
        missing: those that have to be embedded, as far as `compare` knows: the hash of the text by that of the id.
        replaced: those of them that are stored with another text, by the hash of the id.

    Raises:
        ValueError: if an id belongs to two texts, or there is no text at all.
    """

    def __init__(self, source: SourceSettings):
        self.source, self.total = source, 0
        self.missing: dict[int, int] = {}
        self.replaced: set[int] = set()
        for document, text_hash, text in tqdm(source.read_documents(), desc="reading", unit=" documents"):
            self.total += 1
            if text is None:
                continue
            # The first text of this id, if there was one before.
            first = self.missing.setdefault(_number(document), _number(text_hash))
            if first != _number(text_hash):
                raise ValueError(f"The id {document!r} belongs to two texts: name an `id_column` without repeats.")
        self.count = len(self.missing)
        if not self.count:
            raise ValueError(f"The source has no text: all of its {self.total:,} documents are empty.")

    def compare(self, stored: Iterable[tuple[str, str]]) -> list[str]:
        """Tell what is stored already, from `VectorIndex.document_hashes`. Returns the ids that are gone, sorted."""
        gone = []
        for document, text_hash in stored:
            own = _number(document)
            if own not in self.missing:
                gone.append(document)
            elif self.missing[own] == _number(text_hash):
                del self.missing[own]
            else:
                self.replaced.add(own)
        return sorted(gone)

    def passages(self, encoder: PassageEncoder) -> Iterator[tuple[list[Passage], list[str]]]:
        """The passages of the missing documents, in portions, and the ids of those documents that are replaced.

        All passages of a document are in one portion.
        """
        missing, name = dict(self.missing), self.source.name_in_index
        portion, replaced = [], []
        with tqdm(total=len(missing), desc="embedding", unit=" documents") as progress:
            for document, text_hash, text in self.source.read_documents() if missing else ():
                # The first document of this id and text; the others repeat it.
                if text is None or missing.pop(_number(document), None) is None:
                    continue
                parts = encoder.split(text)
                portion += [
                    Passage(name, document, place, len(parts), text_hash, part) for place, part in enumerate(parts)
                ]
                replaced += [document] if _number(document) in self.replaced else []
                if len(portion) >= self.source.write_every:
                    yield portion, replaced
                    portion, replaced = [], []
                progress.update()
        if portion:
            yield portion, replaced


def _number(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
