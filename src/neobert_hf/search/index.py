"""What a vector index stores and answers, whichever database is behind it: LanceDB in a folder, or a Weaviate server.

An index remembers how its vectors were made (its identity), since vectors of two models cannot be compared. With each
document it stores the hash of the document's text, so that only documents that changed are embedded again. One process
may write at a time.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from neobert_hf.common.fingerprints import check_same_settings


# Passages that a hybrid search compares: this many nearest vectors, and as many that share words with the query.
CANDIDATES = 200


class VectorIndexError(ValueError):
    """An index is missing, cannot be reached, or was made in another way."""


@dataclass
class Passage:
    """A part of a document as it is stored.

    Args:
        source: the collection of documents that the document belongs to. Ids are unique within it.
        number: position of the passage in the document, from 0.
        count: how many passages the document has.
        hash: of the whole document's text.
    """

    source: str
    document: str
    number: int
    count: int
    hash: str
    text: str


@dataclass
class Hit:
    """A passage that a search found.

    Args:
        score: the cosine of the angle between its vector and the query's, plus, in a hybrid search, what its words add.
    """

    score: float
    source: str
    document: str
    number: int
    text: str


class VectorIndex(ABC):
    """What a database has to do. `identity` is None as long as the index does not exist."""

    identity: dict | None

    @abstractmethod
    def create(self, identity: dict) -> None: ...

    @abstractmethod
    def document_hashes(self, source: str) -> dict[str, str]:
        """Hash of each document of a source, by id; empty if writing or deleting the document was interrupted."""

    @abstractmethod
    def sources(self) -> list[str]:
        """The names of all sources that documents are from, sorted."""

    @abstractmethod
    def add(self, passages: list[Passage], vectors: np.ndarray) -> None:
        """Store new documents, each with all its passages; vectors (passages, dimension) have length 1."""

    @abstractmethod
    def delete(self, source: str, documents: list[str]) -> None: ...

    def replace(self, documents: list[str], passages: list[Passage], vectors: np.ndarray) -> None:
        """Store documents of one source as `add` does, in the place of those that are stored already."""
        self.delete(passages[0].source, documents)
        self.add(passages, vectors)

    @abstractmethod
    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        """Return the passages that are nearest to a vector (dimension,), best first."""

    def match(self, text: str, vector: np.ndarray, limit: int) -> list[tuple[Hit, float]]:
        """Return the passages that share words with a text, best first: each as `search` returns it, with its BM25."""
        raise VectorIndexError("This database is searched by vectors only: use LanceDB, or `keyword_weight` 0.")

    def search_hybrid(self, text: str, vector: np.ndarray, limit: int, keyword_weight: float) -> list[Hit]:
        """Return the passages whose vectors are near and that share words with the query, best first.

        The score is the cosine + `keyword_weight` x BM25 / the query's highest BM25. A sum of scores keeps how far one
        passage is ahead of the next, which a fusion of ranks discards (Bruch et al., 2023,
        https://arxiv.org/abs/2210.11934; benchmarks/NOTES.md compares).

        Args:
            text: the query as it was asked, without a prompt.
            vector: of the query (dimension,).
        """
        if keyword_weight == 0:
            return self.search(vector, limit)
        matching = self.match(text, vector, max(limit, CANDIDATES))
        found = {(hit.source, hit.document, hit.number): hit for hit in self.search(vector, max(limit, CANDIDATES))}
        for hit, keywords in matching:
            hit.score += keyword_weight * keywords / matching[0][1]
            found[hit.source, hit.document, hit.number] = hit
        return sorted(found.values(), key=lambda hit: -hit.score)[:limit]

    def write_context(self, context: torch.Tensor) -> None:
        """Store the context of a contextual model, (context_size, hidden_size). Called before `create`."""
        raise VectorIndexError("This database keeps no context of a contextual model: use LanceDB, or another model.")

    def read_context(self) -> torch.Tensor:
        """The stored context; VectorIndexError if it is not there."""
        raise VectorIndexError("This database keeps no context.")

    def optimize(self) -> None:  # noqa: B027  (not every database needs it)
        """Tidy up after many writes, and make what was written searchable by its words."""

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


def check_identity(index: str, stored: dict, current: dict) -> None:
    """Refuse vectors that cannot be compared with those of an index.

    The model's name may differ, since a folder can be moved: the fingerprint is what counts.
    """
    # In the form that is stored: a model with several pooling modes has a tuple of them, which JSON turns into a list.
    current = json.loads(json.dumps(current))
    advice = f"Use {stored['model']} and the settings of the index, or make another index."
    check_same_settings(f"The index {index}", stored | {"model": None}, current | {"model": None}, advice)


def portions(items: list, size: int) -> Iterator[list]:
    """Cut a list into pieces of `size` items; the last one may be shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
