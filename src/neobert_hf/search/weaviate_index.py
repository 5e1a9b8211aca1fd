"""Passages and their vectors in a collection of a Weaviate server (client 4.16 or newer).

Its search is approximate (HNSW). The code has only been run against a stand-in for a server, never against a real one.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from urllib.parse import urlsplit

import numpy as np
import weaviate
from weaviate.classes.config import Configure, DataType, Property, Tokenization, VectorDistances
from weaviate.classes.init import Auth
from weaviate.classes.query import Filter, MetadataQuery
from weaviate.exceptions import WeaviateBaseError
from weaviate.util import generate_uuid5

from neobert_hf.search.passages import Passage
from neobert_hf.search.vector_index import Hit, VectorIndex, VectorIndexError


IDENTITY_KEY = "neobert_hf"  # A key of the collection's description, which is JSON.
FOUND = ["source", "document", "number", "count", "text"]


class WeaviateIndex(VectorIndex):
    """A collection whose objects are passages; see `open_index`."""

    def __init__(self, name: str, url: str, grpc_port: int):
        self.client = _connect(url, grpc_port)
        self.collection = self.client.collections.get(name)
        self.identity = None
        if self.client.collections.exists(name):
            # Of the request that makes the collection, only the description can hold text of our own.
            description = self.collection.config.get(simple=True).description or ""
            if IDENTITY_KEY not in description:
                self.client.close()
                raise VectorIndexError(f"The collection {name} was made by another program: choose another name.")
            self.identity = json.loads(description)[IDENTITY_KEY]

    def create(self, identity: dict) -> None:
        if identity["precision"] is not None:
            raise VectorIndexError("`precision` is for LanceDB: leave it out, and set a quantizer on the server.")
        hnsw = Configure.VectorIndex.hnsw(distance_metric=VectorDistances.COSINE)
        # Ids are compared as a whole and not by their words.
        ids = {"data_type": DataType.TEXT, "tokenization": Tokenization.FIELD}
        self.collection = self.client.collections.create(
            self.collection.name,
            description=json.dumps({IDENTITY_KEY: identity}),
            properties=[
                *(Property(name=name, **ids) for name in ("source", "document", "hash")),
                *(Property(name=name, data_type=DataType.INT) for name in ("number", "count")),
                Property(name="text", data_type=DataType.TEXT),
            ],
            vector_config=Configure.Vectors.self_provided(vector_index_config=hnsw),
        )
        self.identity = identity

    def document_hashes(self, source: str) -> Iterator[tuple[str, str]]:
        # All objects are read, since a filtered query would stop at the server's limit of results.
        names = ["source", "document", "count", "hash"]
        versions = defaultdict(Counter)
        for row in self.collection.iterator(return_properties=names, cache_size=1000):
            if row.properties["source"] == source:
                versions[row.properties["document"]][row.properties["hash"], row.properties["count"]] += 1
        for document, passages in versions.items():
            # A document with missing passages, or with old ones beside new ones, counts as interrupted.
            (text_hash, count), stored = passages.most_common(1)[0]
            yield document, text_hash if len(passages) == 1 and stored == count else ""

    def sources(self) -> list[str]:
        rows = self.collection.iterator(return_properties=["source"], cache_size=1000)
        return sorted({row.properties["source"] for row in rows})

    def is_empty(self) -> bool:
        return next(iter(self.collection.iterator(return_properties=["source"], cache_size=1)), None) is None

    def write(self, passages: list[Passage], vectors: np.ndarray, replaced: list[str]) -> None:
        self.delete(passages[0].source, replaced)
        with self.collection.batch.fixed_size(100) as batch:
            for passage, vector in zip(passages, vectors):
                # The same passage always gets the same id, so writing it again makes no second object.
                key = generate_uuid5(json.dumps([passage.source, passage.document, passage.number]))
                batch.add_object(asdict(passage), uuid=key, vector=vector.tolist())
        if failed := self.collection.batch.failed_objects:
            raise VectorIndexError(f"Weaviate refused {len(failed)} of {len(passages)} passages: {failed[0].message}")

    def delete(self, source: str, documents: list[str]) -> None:
        for start in range(0, len(documents), 100):
            some = Filter.by_property("document").contains_any(documents[start : start + 100])
            # The server deletes only a limited number at once.
            where = Filter.by_property("source").equal(source) & some
            while (result := self.collection.data.delete_many(where)).matches:
                if result.failed:
                    raise VectorIndexError(f"Weaviate could not delete {result.failed} of {result.matches} passages.")

    def search(self, vector: np.ndarray, limit: int) -> list[Hit]:
        asked = {"return_properties": FOUND, "return_metadata": MetadataQuery(distance=True)}
        result = self.collection.query.near_vector(vector.tolist(), limit=limit, **asked)
        return [Hit(score=1 - found.metadata.distance, **found.properties) for found in result.objects]

    def match(self, text: str, vector: np.ndarray, limit: int) -> list[tuple[Hit, float]]:
        asked = {"return_properties": FOUND, "return_metadata": MetadataQuery(score=True), "include_vector": True}
        result = self.collection.query.bm25(text, query_properties=["text"], limit=limit, **asked)
        return [
            (Hit(score=float(np.dot(found.vector["default"], vector)), **found.properties), found.metadata.score)
            for found in result.objects
        ]

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
