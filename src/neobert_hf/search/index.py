"""Passages with their vectors in a database: LanceDB in a folder, or a Weaviate server.

An index remembers how its vectors were made (`identity`), since those of two models cannot be compared. Of each
document it stores the hash of its text, so that only what changed is embedded again. One process may write at a time.
"""

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from neobert_hf.common.settings import differences, list_differences


class VectorIndexError(RuntimeError):
    """An index is missing, cannot be reached or was made in another way."""


@dataclass
class Passage:
    """A part of a document as it is stored.

    Args:
        source: the collection of documents that it belongs to. Ids are unique within it.
        document: id of the document.
        number: of the passage in the document, from 0.
        count: passages of the document.
        hash: of the whole document's text.
        text: of the passage.
    """

    source: str
    document: str
    number: int
    count: int
    hash: str
    text: str


@dataclass
class Hit:
    """A passage that a search found; `score` is the cosine of its angle with the query."""

    score: float
    source: str
    document: str
    number: int
    text: str


class VectorIndex(Protocol):
    """What a database has to do. `identity` is None as long as the index does not exist."""

    identity: dict | None

    def create(self, identity: dict) -> None: ...

    def hashes(self, source: str) -> dict[str, str]:
        """Hash of each document of a source, by id; empty if a write or deletion of it was interrupted."""

    def add(self, passages: list[Passage], vectors: np.ndarray) -> None:
        """Store documents that are not there, each with all its passages, and their vectors of unit length."""

    def delete(self, source: str, documents: list[str]) -> None: ...

    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        """The nearest passages, best first."""

    def optimize(self) -> None:
        """Tidy up after many writes."""

    def close(self) -> None: ...


def open_index(name: str, weaviate_url: str | None = None, weaviate_grpc_port: int = 50051) -> VectorIndex:
    """Open an index, whether it exists yet or not.

    Args:
        name: a folder for LanceDB, or the collection's name in Weaviate.
        weaviate_url: of the server, such as http://localhost:8080; LanceDB is used if None. An API key is taken from
            the environment variable `WEAVIATE_API_KEY`.
        weaviate_grpc_port: where the same host answers gRPC.

    Raises:
        ImportError: if the database's client is not installed.
        VectorIndexError: if the server does not answer, or `name` is something else.
    """
    if weaviate_url is None:
        return LanceIndex(Path(name))
    return WeaviateIndex(name, weaviate_url, weaviate_grpc_port)


def check_identity(index: str, stored: dict, current: dict) -> None:
    """Raises:
    VectorIndexError: naming each difference between how an index was made and how it is to be used. The model's name
        may differ: its fingerprint counts.
    """
    # As it would be stored: a model with several ways of pooling has a tuple of them.
    current = json.loads(json.dumps(current))
    differing = [one for one in differences(stored, current) if one[0] != "model"]
    if differing:
        raise VectorIndexError(
            f"The index {index} was made by {stored['model']} in another way than {current['model']} is to be used "
            f"now:\n{list_differences(differing)}\nUse that model and these settings, or make another index."
        )


def _client(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install 'neobert_hf[{extra}]'.") from error


class LanceIndex:
    """One table in a folder, without a server. A search compares with every passage and is exact."""

    TABLE = "passages"
    KEY = b"neobert_hf"

    def __init__(self, folder: Path):
        self.folder = folder
        self.lancedb = _client("lancedb", "search")
        self.table = self._open()
        self.identity = self._read_identity() if self.table else None

    def _open(self) -> Any:
        # Connecting would make the folder.
        if not self.folder.exists():
            return None
        if not self.folder.is_dir():
            raise VectorIndexError(f"{self.folder} is a file; an index is a folder.")
        try:
            return self.lancedb.connect(self.folder).open_table(self.TABLE)
        except ValueError as error:
            # Also what a creation that was interrupted leaves behind.
            if "was not found" in str(error):
                return None
            raise

    def _read_identity(self) -> dict:
        metadata = self.table.schema.metadata or {}
        if self.KEY not in metadata:
            raise VectorIndexError(f"{self.folder} holds a table of another program: choose another folder.")
        return json.loads(metadata[self.KEY])

    def create(self, identity: dict) -> None:
        import pyarrow as pa

        strings = [pa.field(name, pa.string()) for name in ("source", "document", "hash", "text")]
        vector = pa.field("vector", pa.list_(pa.float32(), identity["dimension"]))
        numbers = [pa.field(name, pa.int32()) for name in ("number", "count")]
        schema = pa.schema([*strings, *numbers, vector], {self.KEY: json.dumps(identity)})
        self.table = self.lancedb.connect(self.folder).create_table(self.TABLE, schema=schema)
        self.identity = identity

    def hashes(self, source: str) -> dict[str, str]:
        first = self.table.search().where(f"source = {_quote(source)} AND number = 0")
        batches = first.select(["document", "hash"]).to_batches()
        return {row["document"]: row["hash"] for batch in batches for row in batch.to_pylist()}

    def add(self, passages: list[Passage], vectors: np.ndarray) -> None:
        # One transaction, so that documents are never there in part.
        self.table.add([asdict(passage) | {"vector": vector} for passage, vector in zip(passages, vectors)])

    def delete(self, source: str, documents: list[str]) -> None:
        for part in _parts(documents, 1000):
            names = ", ".join(map(_quote, part))
            self.table.delete(f"source = {_quote(source)} AND document IN ({names})")

    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        columns = ["source", "document", "number", "text", "_distance"]
        rows = self.table.search(vector).distance_type("cosine").select(columns).limit(limit).to_list()
        return [Hit(score=1 - row.pop("_distance"), **row) for row in rows]

    def optimize(self) -> None:
        # Each write leaves small files and a version; versions younger than a week stay, for whoever reads them now.
        self.table.optimize()

    def close(self) -> None:
        pass


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _parts(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class WeaviateIndex:
    """A collection of a Weaviate server (client 4.16 or newer). Its search is approximate (HNSW)."""

    def __init__(self, name: str, url: str, grpc_port: int):
        self.weaviate = _client("weaviate", "weaviate")
        self.classes = importlib.import_module("weaviate.classes")
        # The server would write the first letter large, and everything after would look for the other name.
        if not (name.isidentifier() and name.isascii() and name[0].isupper()):
            raise VectorIndexError(
                f"{name!r} is no name for a Weaviate collection: begin with a capital, then letters, digits and _."
            )
        self.client = self._connect(url, grpc_port)
        try:
            exists = self.client.collections.exists(name)
            self.collection = self.client.collections.get(name)
            self.identity = self._read_identity() if exists else None
        except BaseException:
            self.client.close()
            raise

    def _connect(self, url: str, grpc_port: int) -> Any:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise VectorIndexError(f"`weaviate_url` is {url!r}; give one such as http://localhost:8080.")
        secure = address.scheme == "https"
        key = os.environ.get("WEAVIATE_API_KEY")
        try:
            return self.weaviate.connect_to_custom(
                http_host=address.hostname,
                http_port=address.port or (443 if secure else 80),
                http_secure=secure,
                grpc_host=address.hostname,
                grpc_port=grpc_port,
                grpc_secure=secure,
                auth_credentials=self.classes.init.Auth.api_key(key) if key else None,
            )
        except self.weaviate.exceptions.WeaviateBaseError as error:
            raise VectorIndexError(f"No Weaviate answers at {url} with gRPC port {grpc_port}: {error}") from error

    def _read_identity(self) -> dict:
        # The client has no other place for it that is made together with the collection.
        description = self.collection.config.get(simple=True).description
        try:
            return json.loads(description or "")["neobert_hf"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise VectorIndexError(
                f"The collection {self.collection.name} was made by another program: choose another name."
            ) from None

    def create(self, identity: dict) -> None:
        config = self.classes.config

        def exact(name: str) -> Any:
            """Compared as a whole, not by its words."""
            tokenization = config.Tokenization.FIELD
            return config.Property(name=name, data_type=config.DataType.TEXT, tokenization=tokenization)

        stored = {"index_filterable": False, "index_searchable": False}
        hnsw = config.Configure.VectorIndex.hnsw(distance_metric=config.VectorDistances.COSINE)
        self.collection = self.client.collections.create(
            self.collection.name,
            description=json.dumps({"neobert_hf": identity}),
            properties=[
                exact("source"),
                exact("document"),
                config.Property(name="number", data_type=config.DataType.INT),
                config.Property(name="count", data_type=config.DataType.INT),
                config.Property(name="hash", data_type=config.DataType.TEXT, **stored),
                config.Property(name="text", data_type=config.DataType.TEXT, **stored),
            ],
            vector_config=config.Configure.Vectors.self_provided(vector_index_config=hnsw),
        )
        self.identity = identity

    def hashes(self, source: str) -> dict[str, str]:
        # All objects, since a filter would end at the server's limit of results.
        names = ["source", "document", "count", "hash"]
        found: dict[str, list] = {}
        for row in self.collection.iterator(return_properties=names, cache_size=1000):
            if row.properties["source"] == source:
                text, total = row.properties["hash"], row.properties["count"]
                one = found.setdefault(row.properties["document"], [text, total, 0])
                # Neither old passages beside new ones nor too few are the document.
                one[0] = text if one[0] == text else ""
                one[2] += 1
        return {document: text if seen == total else "" for document, (text, total, seen) in found.items()}

    def add(self, passages: list[Passage], vectors: np.ndarray) -> None:
        for part in _parts(list(zip(passages, vectors)), 100):
            failed = self.collection.data.insert_many([self._object(*pair) for pair in part]).errors
            if failed:
                error = next(iter(failed.values()))
                raise VectorIndexError(f"Weaviate refused {len(failed)} of {len(part)} passages: {error.message}")

    def _object(self, passage: Passage, vector: np.ndarray) -> Any:
        # The same passage gets the same id: writing it once more is no second object.
        key = json.dumps([passage.source, passage.document, passage.number])
        uuid = importlib.import_module("weaviate.util").generate_uuid5(key)
        return self.classes.data.DataObject(properties=asdict(passage), uuid=uuid, vector=vector.tolist())

    def delete(self, source: str, documents: list[str]) -> None:
        filters = self.classes.query.Filter
        for part in _parts(documents, 100):
            where = filters.by_property("source").equal(source) & filters.by_property("document").contains_any(part)
            # The server deletes a limited number in one go.
            while (result := self.collection.data.delete_many(where)).matches:
                if result.failed:
                    raise VectorIndexError(f"Weaviate could not delete {result.failed} of {result.matches} passages.")

    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        result = self.collection.query.near_vector(
            vector.tolist(),
            limit=limit,
            return_properties=["source", "document", "number", "text"],
            return_metadata=self.classes.query.MetadataQuery(distance=True),
        )
        return [Hit(score=1 - one.metadata.distance, **one.properties) for one in result.objects]

    def optimize(self) -> None:
        pass

    def close(self) -> None:
        self.client.close()
