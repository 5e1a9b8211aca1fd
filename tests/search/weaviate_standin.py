"""A stand-in for a Weaviate server, on loopback: what the Python client sends, over its real REST and gRPC protocols.

It keeps objects in memory, searches exactly, and does to filters what Weaviate's documentation says. It shows that this
package uses the client rightly; it is no proof for a real server.
"""

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import numpy as np
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from weaviate.proto.v1 import (
    base_pb2,
    batch_delete_pb2,
    batch_pb2,
    properties_pb2,
    search_get_pb2,
    weaviate_pb2_grpc,
)

from tests.helpers.bm25 import bm25


OPERATORS = base_pb2.Filters
HNSW = (
    "cleanupIntervalSeconds dynamicEfMin dynamicEfMax dynamicEfFactor ef efConstruction flatSearchCutoff "
    "maxConnections skip vectorCacheMaxObjects"
).split()


class FakeWeaviateServer(weaviate_pb2_grpc.WeaviateServicer):
    """Start with `with`; `url` and `grpc_port` say where it listens.

    Attributes:
        schema: collections as they were created.
        objects: by collection and id, properties and vector.
        refuse: texts of objects that are refused.
    """

    def __init__(self):
        self.schema, self.objects, self.refuse = {}, {}, set()

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.removeprefix("/v1/")
                if path == ".well-known/ready":
                    return self.answer({})
                if path == "meta":
                    return self.answer({"version": "1.30.5", "hostname": server.url, "modules": {}})
                found = server.schema.get(path.removeprefix("schema/"))
                self.answer(found or {}, 200 if found else 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                # What a server fills in.
                defaults = {"indexFilterable": True, "indexSearchable": True}
                body["properties"] = [defaults | one for one in body["properties"]]
                for vector in body["vectorConfig"].values():
                    vector["vectorIndexConfig"] = dict.fromkeys(HNSW, 1) | vector["vectorIndexConfig"]
                server.schema[body["class"]] = body
                server.objects[body["class"]] = {}
                self.answer(body)

            def answer(self, body: dict, status: int = 200):
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.grpc = grpc.server(ThreadPoolExecutor(2))
        weaviate_pb2_grpc.add_WeaviateServicer_to_server(self, self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), self.grpc)
        self.grpc_port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.grpc.start()
        return self

    def __exit__(self, *exception):
        self.grpc.stop(None).wait()
        self.http.shutdown()
        self.http.server_close()

    def BatchObjects(self, request, context):
        errors = []
        for index, one in enumerate(request.objects):
            properties = dict(one.properties.non_ref_properties)
            if properties["text"] in self.refuse:
                errors.append(batch_pb2.BatchObjectsReply.BatchError(index=index, error="no room"))
                continue
            self.objects[one.collection][uuid.UUID(one.uuid)] = (properties, as_vector(one.vector_bytes))
        return batch_pb2.BatchObjectsReply(errors=errors)

    def BatchDelete(self, request, context):
        stored = self.objects[request.collection]
        matching = [key for key, (properties, _) in stored.items() if matches(request.filters, properties)]
        # A server deletes a limited number at once.
        matching = matching[:3]
        for key in matching:
            del stored[key]
        return batch_delete_pb2.BatchDeleteReply(matches=len(matching), successful=len(matching))

    def Search(self, request, context):
        stored = self.objects[request.collection]
        # The cursor of the client's iterator goes through the ids in order.
        scores = {}
        found = [(None, key) for key in sorted(stored) if not request.after or key > uuid.UUID(request.after)]
        if near := [*request.near_vector.vectors, request.near_vector][0].vector_bytes:
            query = as_vector(near)
            found = sorted((1 - query @ vector, key) for key, (_, vector) in stored.items())
        if request.bm25_search.query:
            texts = [properties["text"] for properties, _ in stored.values()]
            scores = {key: bm25(request.bm25_search.query, number, texts) for number, key in enumerate(stored)}
            found = [(None, key) for key in sorted(scores, key=lambda key: -scores[key]) if scores[key] > 0]
        results = [
            search_get_pb2.SearchResult(
                properties=search_get_pb2.PropertiesResult(
                    non_ref_props=properties_pb2.Properties(
                        fields={name: as_value(stored[key][0][name]) for name in request.properties.non_ref_properties}
                    )
                ),
                metadata=search_get_pb2.MetadataResult(
                    id=str(key),
                    id_as_bytes=key.bytes,
                    distance=distance,
                    distance_present=distance is not None,
                    score=scores.get(key),
                    score_present=key in scores,
                    vector_bytes=stored[key][1].astype("<f4").tobytes() if request.metadata.vector else b"",
                ),
            )
            for distance, key in found[: request.limit]
        ]
        return search_get_pb2.SearchReply(results=results)


def as_vector(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4").astype(np.float64)


def as_value(value: str | float) -> properties_pb2.Value:
    return properties_pb2.Value(**{"text_value": value} if isinstance(value, str) else {"int_value": int(value)})


def matches(filters, properties: dict) -> bool:
    if filters.operator == OPERATORS.OPERATOR_AND:
        return all(matches(part, properties) for part in filters.filters)
    value = properties[filters.target.property]
    if filters.operator == OPERATORS.OPERATOR_EQUAL:
        return value == filters.value_text
    if filters.operator == OPERATORS.OPERATOR_CONTAINS_ANY:
        return value in filters.value_text_array.values
    raise NotImplementedError(f"the stand-in lacks the operator {filters.operator}")
