"""A vector index, whichever database is behind it: LanceDB in a folder, or a collection of a Weaviate server.

An index remembers how its vectors were made (its identity), since vectors of two models cannot be compared. With each
document it stores the hash of the document's text, so that only documents that changed are embedded again. One process
may write at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from neobert_hf.search.passages import Passage


# Passages that a hybrid search compares: this many nearest vectors, and as many that share words with the query.
CANDIDATES = 200


class VectorIndexError(ValueError):
    """An index is missing, cannot be reached, or was made in another way."""


@dataclass
class Hit:
    """A passage that a search found.

    Args:
        score: the cosine of the angle between its vector and the query's, plus, in a hybrid search, what its words add.
        number, count: see `Passage`.
    """

    score: float
    source: str
    document: str
    number: int
    count: int
    text: str


class VectorIndex(ABC):
    """What a database has to do. `identity` is None as long as the index does not exist."""

    identity: dict | None

    @abstractmethod
    def create(self, identity: dict) -> None: ...

    @abstractmethod
    def document_hashes(self, source: str) -> Iterable[tuple[str, str]]:
        """Id and hash of each document of a source; the hash is empty if writing or deleting it was interrupted."""

    @abstractmethod
    def sources(self) -> list[str]:
        """The names of all sources that documents are from, sorted."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether no passage can be found."""

    def is_unfinished(self) -> bool:
        """Whether something waits for `commit`: indexing was interrupted, or is going on."""
        return False

    @abstractmethod
    def write(self, passages: list[Passage], vectors: np.ndarray, replaced: list[str]) -> None:
        """Write documents of one source, each with all its passages; vectors (passages, dimension) have length 1.

        They are found after `commit`, and kept if the run is interrupted before.

        Args:
            replaced: those of the documents that are stored already, with other passages.
        """

    def commit(self) -> None:  # noqa: B027  (not every database needs it)
        """Make all that was written a part of the index, in few transactions."""

    @abstractmethod
    def delete(self, source: str, documents: list[str]) -> None: ...

    @abstractmethod
    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        """The passages that are nearest to a vector (dimension,), best first."""

    @abstractmethod
    def match(self, text: str, vector: np.ndarray, limit: int) -> list[tuple[Hit, float]]:
        """The passages that share words with a text, best first: each as `search` returns it, with its BM25."""

    def find(
        self, text: str, vector: np.ndarray, limit: int, keyword_weight: float = 0.0, every_passage: bool = False
    ) -> list[Hit]:
        """What `search_hybrid` finds; of each document the best passage only, unless `every_passage`."""
        wanted = limit
        while True:
            hits = self.search_hybrid(text, vector, wanted, keyword_weight)
            best: dict[tuple, Hit] = {}
            for hit in hits:
                best.setdefault((hit.source, hit.document, hit.number if every_passage else None), hit)
            if len(best) >= limit or len(hits) < wanted:
                return list(best.values())[:limit]
            wanted *= 4

    def search_hybrid(self, text: str, vector: np.ndarray, limit: int, keyword_weight: float) -> list[Hit]:
        """The passages whose vectors are near and that share words with the query, best first.

        The score is the cosine + `keyword_weight` x BM25 / the query's highest BM25. A sum of scores keeps how far one
        passage is ahead of the next, which a fusion of ranks discards (Bruch et al., 2023,
        https://arxiv.org/abs/2210.11934; benchmarks/NOTES.md compares).

        Args:
            text: the query as it was asked, without a prompt.
            vector: of the query (dimension,).
            keyword_weight: 0 for the cosine alone.
        """
        if keyword_weight == 0:
            return self.search(vector, limit)
        candidates = max(limit, CANDIDATES)
        found = {(hit.source, hit.document, hit.number): hit for hit in self.search(vector, candidates)}
        matching = self.match(text, vector, candidates)
        for hit, keywords in matching:
            hit.score += keyword_weight * keywords / matching[0][1]
            found[hit.source, hit.document, hit.number] = hit
        return sorted(found.values(), key=lambda hit: -hit.score)[:limit]

    def write_context(self, context: torch.Tensor) -> None:
        """Store the context of a contextual model, (context_size, hidden_size). Called before `create`."""
        raise VectorIndexError("This database keeps no context of a contextual model: use LanceDB, or another model.")

    def read_context(self) -> torch.Tensor:
        """The stored context."""
        raise VectorIndexError("This database keeps no context.")

    def optimize(self) -> None:  # noqa: B027
        """Let the search know the new passages."""

    def close(self) -> None:  # noqa: B027
        """Disconnect from the server."""


def open_index(name: str, weaviate_url: str | None = None, weaviate_grpc_port: int = 50051) -> VectorIndex:
    """Open an index, whether it exists yet or not.

    Args:
        name: a folder for LanceDB, or the collection's name in Weaviate.
        weaviate_url: of the server, such as http://localhost:8080; LanceDB is used if None. An API key is taken from
            the environment variable `WEAVIATE_API_KEY`.
        weaviate_grpc_port: where the same host answers gRPC.

    Raises:
        ImportError: if the database's client is not installed.
        VectorIndexError: if the server does not answer, or `name` belongs to something that is not an index.
    """
    database, extra = ("lancedb", "search") if weaviate_url is None else ("weaviate", "weaviate")
    try:
        # Each of the two modules imports its client, and few users have both.
        module = import_module(f"neobert_hf.search.{database}_index")
    except ImportError as error:
        raise ImportError(f"{database} is not installed: pip install 'neobert_hf[{extra}]'.") from error
    if weaviate_url is None:
        return module.LanceDBIndex(Path(name))
    return module.WeaviateIndex(name, weaviate_url, weaviate_grpc_port)
