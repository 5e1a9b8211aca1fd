"""Small models and texts to index, and the recipes of the search."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from neobert_hf.search import recipe as recipes
from neobert_hf.search.vector_index import open_index
from tests.helpers.search_encoder import save_search_encoder


pytest.importorskip("lancedb")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Of one passage each, all different."""
    pages = [" ".join(text.split()) for _, text in sorted(topics.items())]
    starts = [" ".join(page[at : at + 600].split()[:8]) for page in pages for at in range(0, len(page), 600)]
    return list(dict.fromkeys(starts))[:60]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """With mean pooling, which Sentence Transformers adds to an encoder."""
    folder = tmp_path_factory.mktemp("model")
    SentenceTransformer(save_search_encoder(folder / "encoder"), device="cpu").save(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def encoder(model) -> SentenceTransformer:
    return SentenceTransformer(str(model), device="cpu")


def unit_vectors(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def write_rows(path: Path, rows: dict[str, str | None]) -> Path:
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in rows.items()))
    return path


@pytest.fixture
def corpus(texts, tmp_path) -> Path:
    """JSON lines with ids that are not their places."""
    return write_rows(tmp_path / "corpus.jsonl", {f"d{7 * i}": text for i, text in enumerate(texts)})


@pytest.fixture
def server(monkeypatch):
    """A stand-in for a Weaviate server."""
    pytest.importorskip("weaviate")
    from tests.search.weaviate_standin import FakeWeaviateServer

    # The client asks PyPI for its newest version.
    monkeypatch.setattr("weaviate.connect.v4.PYPI_PACKAGE_URL", "http://127.0.0.1:9/")
    with FakeWeaviateServer() as fake:
        yield fake


@pytest.fixture(params=["lancedb", "weaviate"])
def place(request, tmp_path) -> dict:
    """The settings that say where the index is, in either database."""
    if request.param == "lancedb":
        return {"index": tmp_path / "index"}
    server = request.getfixturevalue("server")
    return {"index": "Docs", "weaviate_url": server.url, "weaviate_grpc_port": server.grpc_port}


@pytest.fixture
def opened(place):
    """Open the index; every connection is closed in the end."""
    indexes, (name, *server) = [], place.values()

    def run():
        indexes.append(open_index(str(name), *server))
        return indexes[-1]

    yield run
    for index in indexes:
        index.close()


@pytest.fixture
def index(model, tmp_path, capsys):
    """Run `index`; return how many documents were embedded, passages, unchanged, removed, and left-out ones."""

    def run(source, *flags: str, **changes) -> list[int]:
        settings = {"index": tmp_path / "index", "model": model, "source": source, "device": "cpu"} | changes
        recipes.index.main([*(f"--{key}={value}" for key, value in settings.items()), *flags])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "documents embedded" in line)
        return [int(number) for number in re.findall(r"\b\d+\b", line.partition(": ")[2])]

    return run


@pytest.fixture
def query(tmp_path, capsys):
    """Run `query --json` and return the hits of each query."""

    def run(*texts: str, **changes) -> list[list[dict]]:
        settings = {"index": tmp_path / "index", "device": "cpu", "json": True} | changes
        found = recipes.query.main([*(f"--{key}={value}" for key, value in settings.items()), "--text", *texts])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["query"] for line in lines] == list(texts)
        assert [line["hits"] for line in lines] == [[asdict(hit) for hit in hits] for hits in found]
        return [line["hits"] for line in lines]

    return run


@pytest.fixture
def stored(query):
    """Text and score of every passage, by source, document and number."""

    def run(**place) -> dict[tuple[str, str, int], tuple[str, float]]:
        (hits,) = query("a list of numbers", top_k=1000, every_passage=True, **place)
        found = {(hit["source"], hit["document"], hit["number"]): (hit["text"], hit["score"]) for hit in hits}
        assert len(found) == len(hits)
        return found

    return run
