"""Passages and their vectors in LanceDB: one table in a folder, without a server."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import FTS, BTree, IvfPq
from lancedb.query import MatchQuery

from neobert_hf.common.files import write_json
from neobert_hf.search.index import Hit, VectorIndex, VectorIndexError
from neobert_hf.search.passages import Passage


TABLE = "passages"
IDENTITY_KEY = b"neobert_hf"  # A key of the table's metadata.
FOUND = ["source", "document", "number", "text"]
# A search compares the query with every passage. From this many on, it looks at the most promising ones only.
EXACT_BELOW = 100_000
# It looks into 50 parts of the index and compares 100 times as many vectors as it returns. With LanceDB's own values,
# 20 and 1, it found 0.12 of the 10 nearest of a million vectors that are hard to tell apart, with these 0.993.
PARTS, REFINE = 50, 100
# An approximate search that finds less of the 10 nearest is not used.
LEAST_RECALL = 0.95
# LanceDB would read 2 GB of a table ahead, and so keep the vectors of a million passages in memory.
os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(16 * 2**20))


class LanceDBIndex(VectorIndex):
    """A folder with one table.

    Beside it `recall.json` says how much of the nearest an approximate search finds, once there are enough passages.
    """

    def __init__(self, folder: Path):
        self.folder, self.recall_file = folder, folder / "recall.json"
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
        vector = pa.field("vector", pa.list_(pa.float32(), identity["dimension"]))
        schema = pa.schema([*texts, *numbers, vector], {IDENTITY_KEY: json.dumps(identity)})
        mode = "overwrite" if (self.folder / f"{TABLE}.lance").exists() else "create"
        self.table = lancedb.connect(self.folder).create_table(TABLE, schema=schema, mode=mode)
        # For English: words are compared by their stems, and stop words are left out.
        self.table.create_index("text", config=FTS())
        # Documents are removed by their ids.
        self.table.create_index("document", config=BTree())
        self.identity = identity

    def document_hashes(self, source: str) -> Iterator[tuple[str, str]]:
        # A document is written in one transaction, so its first passage stands for all of them.
        first = self.table.search().where(f"source = {_quote(source)} AND number = 0")
        for batch in first.select(["document", "hash"]).to_batches():
            yield from zip(batch["document"].to_pylist(), batch["hash"].to_pylist())

    def sources(self) -> list[str]:
        batches = self.table.search().where("number = 0").select(["source"]).to_batches()
        return sorted({source for batch in batches for source in batch["source"].unique().to_pylist()})

    def write(self, passages: list[Passage], vectors: np.ndarray, replaced: list[str]) -> None:
        self.delete(passages[0].source, replaced)
        self.table.add([asdict(passage) | {"vector": vector} for passage, vector in zip(passages, vectors)])

    def delete(self, source: str, documents: list[str]) -> None:
        for start in range(0, len(documents), 100_000):
            some = ", ".join(map(_quote, documents[start : start + 100_000]))
            self.table.delete(f"source = {_quote(source)} AND document IN ({some})")

    def search(self, vector: np.ndarray, limit: int, exact: bool = False) -> list[Hit]:
        query = self.table.search(vector).distance_type("cosine").nprobes(PARTS).refine_factor(REFINE)
        query = query.bypass_vector_index() if exact else query
        rows = query.select([*FOUND, "_distance"]).limit(limit).to_list()
        return [Hit(score=1 - row.pop("_distance"), **row) for row in rows]

    def match(self, text: str, vector: np.ndarray, limit: int) -> list[tuple[Hit, float]]:
        search = self.table.search(MatchQuery(text, "text"), query_type="fts")
        matching = []
        for row in search.select([*FOUND, "vector", "_score"]).limit(limit).to_list():
            keywords, found = row.pop("_score"), np.array(row.pop("vector"))
            matching.append((Hit(score=float(found @ vector), **row), keywords))
        return matching

    def optimize(self) -> None:
        # It also joins small files.
        self.table.optimize()
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
        found = 0
        for vector in self.table.take_offsets(drawn.tolist()).select(["vector"]).to_arrow()["vector"].to_numpy():
            # The nearest is the passage itself. The two ways of computing a cosine differ by rounding.
            tenth = self.search(vector, 11, exact=True)[-1].score - 1e-5
            found += sum(hit.score > tenth for hit in self.search(vector, 11)[1:])
        return found / 1000


def _quote(text: str) -> str:
    """A text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"
