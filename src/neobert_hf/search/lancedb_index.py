"""Passages and their vectors in LanceDB: one table in a folder, without a server."""

import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.index import FTS, BTree, IvfPq
from lancedb.query import MatchQuery
from pyarrow.feather import read_table, write_feather
from safetensors.torch import load_file, save_file

from neobert_hf.common.files import atomic_write, write_json
from neobert_hf.search.passages import Passage
from neobert_hf.search.precision import OVERSAMPLE, bits_of, bytes_of, vectors_of
from neobert_hf.search.vector_index import Hit, VectorIndex, VectorIndexError


TABLE = "passages"
IDENTITY_KEY = b"neobert_hf"  # A key of the table's metadata.
FOUND = ["source", "document", "number", "count", "text"]
# Files of replaced documents that are merged at once, in memory: 131,072 passages as `write_every` is.
MERGED_FILES = 32
# A search compares the query with every passage. From this many on, it looks at the most promising ones only.
EXACT_BELOW = 100_000
# It looks into 50 parts of the index and compares 100 times as many vectors as it returns. With LanceDB's own values,
# 20 and 1, it found 0.12 of the 10 nearest of a million vectors that are hard to tell apart, with these 0.993.
PARTS, REFINE = 50, 100
# LanceDB would read 2 GB of a table ahead, and so keep the vectors of a million passages in memory.
os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(16 * 2**20))
# An approximate search that finds less of the 10 nearest is not used.
LEAST_RECALL = 0.95


class LanceDBIndex(VectorIndex):
    """A folder with one table.

    Beside it `waiting/` holds what was written since the last commit, and `recall.json` says how much of the nearest an
    approximate search finds, if the table has one.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.context_file, self.recall_file = folder / "context.safetensors", folder / "recall.json"
        self.waiting, self.new = folder / "waiting", []
        if folder.is_file():
            raise VectorIndexError(f"{folder} is a file; an index is a folder.")
        self.table = self.identity = None
        # Without a version, the table was left behind by a process that was killed while it made it.
        if any((folder / f"{TABLE}.lance" / "_versions").glob("*")):
            self.table = lancedb.connect(folder).open_table(TABLE)
            metadata = self.table.schema.metadata or {}
            if IDENTITY_KEY not in metadata:
                raise VectorIndexError(f"{folder} holds a table of another program: choose another folder.")
            self.identity = json.loads(metadata[IDENTITY_KEY])

    def create(self, identity: dict) -> None:
        texts = [pa.field(name, pa.string()) for name in ("source", "document", "hash", "text")]
        numbers = [pa.field(name, pa.int32()) for name in ("number", "count")]
        dimension = identity["dimension"]
        types = {
            None: {"vector": pa.list_(pa.float32(), dimension)},
            "int8": {"bits": pa.list_(pa.uint8(), -(-dimension // 8)), "vector": pa.list_(pa.int8(), dimension)},
            "binary": {"bits": pa.list_(pa.uint8(), -(-dimension // 8))},
        }
        vectors = [pa.field(name, kind) for name, kind in types[identity["precision"]].items()]
        schema = pa.schema([*texts, *numbers, *vectors], {IDENTITY_KEY: json.dumps(identity)})
        mode = "overwrite" if (self.folder / f"{TABLE}.lance").exists() else "create"
        self.table = lancedb.connect(self.folder).create_table(TABLE, schema=schema, mode=mode)
        # For English: words are compared by their stems, and stop words are left out.
        self.table.create_index("text", config=FTS())
        # Documents are replaced and removed by their ids.
        self.table.create_index("document", config=BTree())
        self.identity = identity

    @property
    def has_bits(self) -> bool:
        """Whether the vectors are stored in fewer bytes; see `precision.py`."""
        return "bits" in self.table.schema.names

    @property
    def stored(self) -> str:
        """The column by which passages are ordered."""
        return "vector" if "vector" in self.table.schema.names else "bits"

    def document_hashes(self, source: str) -> Iterator[tuple[str, str]]:
        # A document is written in one transaction, so its first passage stands for all of them.
        first = self.table.search().where(f"source = {_quote(source)} AND number = 0")
        for batch in first.select(["document", "hash"]).to_batches():
            yield from zip(batch["document"].to_pylist(), batch["hash"].to_pylist())

    def sources(self) -> list[str]:
        batches = self.table.search().where("number = 0").select(["source"]).to_batches()
        return sorted({source for batch in batches for source in batch["source"].unique().to_pylist()})

    def is_empty(self) -> bool:
        return self.table.count_rows() == 0

    def is_unfinished(self) -> bool:
        return any(self.waiting.glob("*.feather"))

    def write(self, passages: list[Passage], vectors: np.ndarray, replaced: list[str]) -> None:
        # Each transaction leaves a version with a list of all files. So passages wait in files, and memory holds one
        # portion of them.
        columns = {field.name: [getattr(passage, field.name) for passage in passages] for field in fields(Passage)}
        if self.has_bits:
            columns["bits"] = list(bits_of(vectors))
        if self.stored == "vector":
            columns["vector"] = list(bytes_of(vectors) if self.has_bits else vectors)
        rows = pa.table(columns, schema=self.table.schema.remove_metadata())
        self.waiting.mkdir(exist_ok=True)
        file = self.waiting / f"{len(list(self.waiting.glob('*.feather'))):06}.feather"
        with atomic_write(file) as partial:
            write_feather(rows, str(partial))
        if not replaced:
            self.new.append(file)

    def commit(self) -> None:
        if self.new:
            batches = (batch for file in self.new for batch in read_table(file, memory_map=False).to_batches())
            self.table.add(batches)
        # Files of an interrupted run may have been added before it could delete them; to merge them again does nothing.
        others = sorted(set(self.waiting.glob("*.feather")) - set(self.new))
        for start in range(0, len(others), MERGED_FILES):
            self._merge(pa.concat_tables(map(read_table, others[start : start + MERGED_FILES])))
        self.new = []
        # Only what was written here goes: a folder of this name may have got files of the user.
        for file in self.waiting.glob("*.feather*"):
            file.unlink()
        if self.waiting.is_dir() and not any(self.waiting.iterdir()):
            self.waiting.rmdir()

    def _merge(self, rows: pa.Table) -> None:
        """Put documents in the place of what is stored of them, in one transaction: nobody finds the index without."""
        documents = rows["document"].unique().to_pylist()
        merge = self.table.merge_insert(["source", "document", "number"])
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge.when_not_matched_by_source_delete(_condition(rows["source"][0].as_py(), documents)).execute(rows)

    def delete(self, source: str, documents: list[str]) -> None:
        for start in range(0, len(documents), 100_000):
            self.table.delete(_condition(source, documents[start : start + 100_000]))

    def search(self, vector: np.ndarray, limit: int, exact: bool = False) -> list[Hit]:
        if self.has_bits:
            nearest = self.table.search(bits_of(vector), vector_column_name="bits").distance_type("hamming")
            rows = nearest.select([*FOUND, self.stored, "_distance"]).limit(OVERSAMPLE * limit).to_arrow()
            cosines = self._vectors(rows) @ vector
            best = np.argsort(-cosines)[:limit]
            found = rows.select(FOUND).take(best).to_pylist()
            return [Hit(score=float(score), **row) for score, row in zip(cosines[best], found)]
        query = self.table.search(vector).distance_type("cosine").nprobes(PARTS).refine_factor(REFINE)
        query = query.bypass_vector_index() if exact else query
        rows = query.select([*FOUND, "_distance"]).limit(limit).to_list()
        return [Hit(score=1 - row.pop("_distance"), **row) for row in rows]

    def match(self, text: str, vector: np.ndarray, limit: int) -> list[tuple[Hit, float]]:
        search = self.table.search(MatchQuery(text, "text"), query_type="fts")
        rows = search.select([*FOUND, self.stored, "_score"]).limit(limit).to_arrow()
        cosines, keywords = self._vectors(rows) @ vector, rows["_score"].to_pylist()
        found = zip(cosines, rows.select(FOUND).to_pylist(), keywords)
        return [(Hit(score=float(score), **row), words) for score, row, words in found]

    def _vectors(self, rows: pa.Table) -> np.ndarray:
        """The stored vectors of rows, of length 1."""
        stored = rows[self.stored].combine_chunks()
        numbers = stored.flatten().to_numpy().reshape(-1, stored.type.list_size)
        return vectors_of(numbers, self.identity["dimension"])

    def write_context(self, context: torch.Tensor) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.context_file) as partial:
            save_file({"context": context.contiguous()}, partial)

    def read_context(self) -> torch.Tensor:
        return load_file(self.context_file)["context"]

    def optimize(self) -> None:
        # It also joins small files.
        self.table.optimize()
        if self.has_bits:
            # A few bytes of each passage are compared fast enough.
            return
        passages = self.table.count_rows()
        measured = json.loads(self.recall_file.read_text(encoding="utf-8")) if self.recall_file.exists() else None
        # An index keeps its number of parts, so it is made again for twice as many passages.
        if passages < EXACT_BELOW or (measured and passages < 2 * measured["passages"]):
            return
        self.table.create_index("vector", config=IvfPq(distance_type="cosine"))
        recall = self._recall()
        write_json(self.recall_file, {"passages": passages, "recall_at_10": recall})
        print(f"approximate search finds {recall:.3f} of the 10 nearest of {passages:,} passages")
        if recall < LEAST_RECALL:
            self.table.drop_index("vector_idx")
            print(f"that is less than {LEAST_RECALL}: each search compares all passages instead")

    def _recall(self) -> float:
        """The share of the 10 nearest passages that the approximate search finds, for 100 stored vectors."""
        drawn = np.random.default_rng(0).choice(self.table.count_rows(), 100, replace=False)
        queries = np.stack(self.table.take_offsets(drawn.tolist()).select(["vector"]).to_arrow()["vector"].to_numpy())
        # The highest cosines of each query, (11, 100), the lowest first: the nearest one is the passage itself.
        highest = np.full((11, len(queries)), -1, np.float32)
        for batch in self.table.search().select(["vector"]).to_batches():
            cosines = batch["vector"].flatten().to_numpy().reshape(len(batch), -1) @ queries.T
            highest = np.partition(np.concatenate([highest, cosines]), -11, axis=0)[-11:]
        # The two ways of computing a cosine differ by rounding.
        found = [
            hit.score > tenth - 1e-5
            for vector, tenth in zip(queries, highest.min(axis=0))
            for hit in self.search(vector, 11)[1:]
        ]
        return sum(found) / (10 * len(queries))


def _condition(source: str, documents: list[str]) -> str:
    """The condition, in SQL, that a passage belongs to one of these documents."""
    return f"source = {_quote(source)} AND document IN ({', '.join(map(_quote, documents))})"


def _quote(text: str) -> str:
    """A text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"
