"""Passages and their vectors in a collection of a Weaviate server (client 4.16 or newer).

Its search is approximate (HNSW). The code has only been run against a stand-in for a server, never against a real one.
"""

import json
import os
from collections import Counter, defaultdict
from dataclasses import asdict
from urllib.parse import urlsplit

import numpy as np
import weaviate
from weaviate.classes.config import Configure, DataType, Property, Tokenization, VectorDistances
from weaviate.classes.data import DataObject
from weaviate.classes.init import Auth
from weaviate.classes.query import Filter, MetadataQuery
from weaviate.exceptions import WeaviateBaseError
from weaviate.util import generate_uuid5

from neobert_hf.search.index import Hit, Passage, VectorIndex, VectorIndexError, portions


IDENTITY_KEY = "neobert_hf"  # A key of the collection's description, which is JSON.


class WeaviateIndex(VectorIndex):
    """A collection whose objects are passages; see `open_index`."""

    def __init__(self, name: str, url: str, grpc_port: int):
        # The server would capitalise the first letter, and later calls would look for the name as it is given.
        if not (name.isidentifier() and name.isascii() and name[0].isupper()):
            raise VectorIndexError(
                f"{name!r} is not a name for a Weaviate collection: use a capital letter, then letters, digits and _."
            )
        self.client = _connect(url, grpc_port)
        try:
            exists = self.client.collections.exists(name)
            self.collection = self.client.collections.get(name)
            self.identity = self._read_identity() if exists else None
        except BaseException:
            self.client.close()
            raise

    def _read_identity(self) -> dict:
        # Of the request that makes the collection, only the description can hold text of our own.
        description = self.collection.config.get(simple=True).description
        try:
            return json.loads(description or "")[IDENTITY_KEY]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise VectorIndexError(
                f"The collection {self.collection.name} was made by another program: choose another name."
            ) from None

    def create(self, identity: dict) -> None:
        # A "field" is compared as a whole and not by its words.
        compared = {"data_type": DataType.TEXT, "tokenization": Tokenization.FIELD}
        stored = {"data_type": DataType.TEXT, "index_filterable": False, "index_searchable": False}
        hnsw = Configure.VectorIndex.hnsw(distance_metric=VectorDistances.COSINE)
        self.collection = self.client.collections.create(
            self.collection.name,
            description=json.dumps({IDENTITY_KEY: identity}),
            properties=[
                Property(name="source", **compared),
                Property(name="document", **compared),
                Property(name="number", data_type=DataType.INT),
                Property(name="count", data_type=DataType.INT),
                Property(name="hash", **stored),
                Property(name="text", **stored),
            ],
            vector_config=Configure.Vectors.self_provided(vector_index_config=hnsw),
        )
        self.identity = identity

    def document_hashes(self, source: str) -> dict[str, str]:
        # All objects are read, since a filtered query would stop at the server's limit of results.
        names = ["source", "document", "count", "hash"]
        versions = defaultdict(Counter)
        for row in self.collection.iterator(return_properties=names, cache_size=1000):
            if row.properties["source"] == source:
                versions[row.properties["document"]][row.properties["hash"], row.properties["count"]] += 1
        hashes = {}
        for document, passages in versions.items():
            # A document with missing passages, or with old ones beside new ones, counts as interrupted.
            (text_hash, count), stored = passages.most_common(1)[0]
            hashes[document] = text_hash if len(passages) == 1 and stored == count else ""
        return hashes

    def sources(self) -> list[str]:
        rows = self.collection.iterator(return_properties=["source"], cache_size=1000)
        return sorted({row.properties["source"] for row in rows})

    def add(self, passages: list[Passage], vectors: np.ndarray) -> None:
        for some in portions(list(zip(passages, vectors)), 100):
            failed = self.collection.data.insert_many([_data_object(*pair) for pair in some]).errors
            if failed:
                error = next(iter(failed.values()))
                raise VectorIndexError(f"Weaviate refused {len(failed)} of {len(some)} passages: {error.message}")

    def delete(self, source: str, documents: list[str]) -> None:
        for some in portions(documents, 100):
            where = Filter.by_property("source").equal(source) & Filter.by_property("document").contains_any(some)
            # The server deletes only a limited number at once.
            while (result := self.collection.data.delete_many(where)).matches:
                if result.failed:
                    raise VectorIndexError(f"Weaviate could not delete {result.failed} of {result.matches} passages.")

    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        result = self.collection.query.near_vector(
            vector.tolist(),
            limit=limit,
            return_properties=["source", "document", "number", "text"],
            return_metadata=MetadataQuery(distance=True),
        )
        return [Hit(score=1 - found.metadata.distance, **found.properties) for found in result.objects]

    def close(self) -> None:
        self.client.close()


def _connect(url: str, grpc_port: int) -> weaviate.WeaviateClient:
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise VectorIndexError(f"`weaviate_url` is {url!r}; give one such as http://localhost:8080.")
    secure = address.scheme == "https"
    key = os.environ.get("WEAVIATE_API_KEY")
    try:
        return weaviate.connect_to_custom(
            http_host=address.hostname,
            http_port=address.port or (443 if secure else 80),
            http_secure=secure,
            grpc_host=address.hostname,
            grpc_port=grpc_port,
            grpc_secure=secure,
            auth_credentials=Auth.api_key(key) if key else None,
        )
    except WeaviateBaseError as error:
        raise VectorIndexError(f"No Weaviate server answers at {url} with gRPC port {grpc_port}: {error}") from error


def _data_object(passage: Passage, vector: np.ndarray) -> DataObject:
    # The same passage always gets the same id, so writing it again makes no second object.
    key = json.dumps([passage.source, passage.document, passage.number])
    return DataObject(properties=asdict(passage), uuid=generate_uuid5(key), vector=vector.tolist())
