"""`models/distilled`, the embedding model that comes with the package: it loads as it lies, and searches by meaning."""

import pytest
import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer

from tests.helpers.models import ROOT


FOLDER = ROOT / "models" / "distilled"
TEXTS = [
    "Open a file and read its bytes.",
    "The central bank raised interest rates.",
    "How to bake bread at home.",
    "Python raises FileNotFoundError if the path does not exist.",
]
QUERIES = {
    "how do I load a document from disk?": 0,
    "money gets more expensive": 1,
    "making a loaf": 2,
    "my program crashes because a file is missing": 3,
}


@pytest.fixture(scope="module")
def model() -> SentenceTransformer:
    return SentenceTransformer(str(FOLDER), device="cpu")


def test_it_searches_by_meaning(model):
    scores = model.similarity(model.encode_query(list(QUERIES)), model.encode_document(TEXTS))
    assert scores.argmax(dim=1).tolist() == list(QUERIES.values())


def test_it_is_small_and_computes_in_float32(model):
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) < 30e6
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.get_embedding_dimension() == 384
