"""Passages and their vectors in LanceDB: one table in a folder, without a server."""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.index import FTS
from lancedb.query import MatchQuery
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from neobert_hf.common.files import atomic_write, remove
from neobert_hf.search.index import Hit, Passage, VectorIndex, VectorIndexError, portions


logger = logging.get_logger(__name__)

TABLE = "passages"
IDENTITY_KEY = b"neobert_hf"  # A key of the table's metadata.


class LanceDBIndex(VectorIndex):
    """A folder with one table. A search compares the query with every passage, so it is exact."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Where LanceDB keeps the table. If no table can be opened there, it is a leftover.
        self.leftover = folder / f"{TABLE}.lance"
        self.context_file = folder / "context.safetensors"
        self.table = self._open_table()
        self.identity = self._read_identity() if self.table is not None else None

    def _open_table(self) -> lancedb.table.Table | None:
        # Connecting would create the folder.
        if not self.folder.exists():
            return None
        if not self.folder.is_dir():
            raise VectorIndexError(f"{self.folder} is a file; an index is a folder.")
        try:
            # Every search checks whether another process has written in the meantime.
            return lancedb.connect(self.folder, read_consistency_interval=timedelta(0)).open_table(TABLE)
        except (ValueError, RuntimeError, OSError) as error:
            # The folder is empty, or was left behind by a process that was killed before its first write.
            if not any((self.leftover / "data").glob("*")):
                return None
            raise VectorIndexError(
                f"The index in {self.folder} is damaged and cannot be read ({error}). Restore it, or delete the folder "
                "and index the documents again."
            ) from error

    def _read_identity(self) -> dict:
        metadata = self.table.schema.metadata or {}
        if IDENTITY_KEY not in metadata:
            raise VectorIndexError(f"{self.folder} holds a table of another program: choose another folder.")
        return json.loads(metadata[IDENTITY_KEY])

    def create(self, identity: dict) -> None:
        strings = [pa.field(name, pa.string()) for name in ("source", "document", "hash", "text")]
        numbers = [pa.field(name, pa.int32()) for name in ("number", "count")]
        vector = pa.field("vector", pa.list_(pa.float32(), identity["dimension"]))
        schema = pa.schema([*strings, *numbers, vector], {IDENTITY_KEY: json.dumps(identity)})
        remove(self.leftover)
        if others := [file.name for file in self.folder.glob("[!.]*") if file != self.context_file]:
            raise VectorIndexError(
                f"{self.folder} holds {others[0]}, and no index: choose a folder only for the index."
            )
        self.table = lancedb.connect(self.folder).create_table(TABLE, schema=schema)
        self.identity = identity

    def document_hashes(self, source: str) -> dict[str, str]:
        # A document is written in one transaction, so its first passage stands for all of them.
        first = self.table.search().where(f"source = {_quote(source)} AND number = 0")
        batches = first.select(["document", "hash"]).to_batches()
        return {row["document"]: row["hash"] for batch in batches for row in batch.to_pylist()}

    def sources(self) -> list[str]:
        batches = self.table.search().where("number = 0").select(["source"]).to_batches()
        return sorted({row["source"] for batch in batches for row in batch.to_pylist()})

    def add(self, passages: list[Passage], vectors: np.ndarray) -> None:
        # One transaction, so that no document is ever stored in part.
        self.table.add(_rows(passages, vectors))

    def replace(self, documents: list[str], passages: list[Passage], vectors: np.ndarray) -> None:
        if not documents:
            return self.add(passages, vectors)
        # One transaction, so that nobody finds the index without these documents.
        merge = self.table.merge_insert(["source", "document", "number"])
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge = merge.when_not_matched_by_source_delete(_condition(passages[0].source, documents))
        merge.execute(pa.Table.from_pylist(_rows(passages, vectors), schema=self.table.schema.remove_metadata()))

    def delete(self, source: str, documents: list[str]) -> None:
        for some in portions(documents, 1000):
            self.table.delete(_condition(source, some))

    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        columns = ["source", "document", "number", "text", "_distance"]
        rows = self.table.search(vector).distance_type("cosine").select(columns).limit(limit).to_list()
        return [Hit(score=1 - row.pop("_distance"), **row) for row in rows]

    def match(self, text: str, vector: np.ndarray, limit: int) -> list[tuple[Hit, float]]:
        if not (names := self._keyword_indexes()):
            raise VectorIndexError(
                f"The index {self.folder} cannot be searched by words yet: run `semantic_search.py index` again, which "
                "does not embed anything again."
            )
        self._report_unindexed(names)
        columns = ["source", "document", "number", "text", "vector", "_score"]
        search = self.table.search(MatchQuery(text, "text"), query_type="fts").select(columns).limit(limit)
        matching = []
        for row in search.to_list():
            keywords, found = row.pop("_score"), np.array(row.pop("vector"))
            cosine = float(found @ vector / (np.linalg.norm(found) * np.linalg.norm(vector)))
            matching.append((Hit(score=cosine, **row), keywords))
        return matching

    def _keyword_indexes(self) -> list[str]:
        return [index.name for index in self.table.list_indices() if index.columns == ["text"]]

    def _report_unindexed(self, names: list[str]) -> None:
        """LanceDB also scores passages written since `optimize`, but as if there were no other passages."""
        new = sum(self.table.index_stats(name).num_unindexed_rows for name in names)
        if new:
            logger.warning(
                f"{new:,} passages were written to {self.folder} by a run that has not finished: what their words "
                "add to a score is not exact. Let `semantic_search.py index` finish."
            )

    def write_context(self, context: torch.Tensor) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.context_file) as partial:
            save_file({"context": context.contiguous()}, partial)

    def read_context(self) -> torch.Tensor:
        try:
            return load_file(self.context_file)["context"]
        except (OSError, SafetensorError, KeyError) as error:
            raise VectorIndexError(
                f"The index in {self.folder} was made by a contextual model, and its context cannot be read ({error}). "
                f"Restore {self.context_file}, or delete the folder and index the documents again."
            ) from error

    def optimize(self) -> None:
        if not self._keyword_indexes():
            # For English: words are compared by their stems, and stop words are left out.
            self.table.create_index("text", config=FTS())
        # Each write leaves small files and a version behind. Versions younger than a week stay, for other readers.
        self.table.optimize()


def _rows(passages: list[Passage], vectors: np.ndarray) -> list[dict]:
    return [asdict(passage) | {"vector": vector} for passage, vector in zip(passages, vectors)]


def _condition(source: str, documents: list[str]) -> str:
    """The condition, in SQL, that a passage belongs to one of these documents."""
    return f"source = {_quote(source)} AND document IN ({', '.join(map(_quote, documents))})"


def _quote(text: str) -> str:
    """A text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"
