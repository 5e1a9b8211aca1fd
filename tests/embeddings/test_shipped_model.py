"""`models/`, the embedding models that come with the package: they load as they lie, and search by meaning."""

import pytest
import torch
from sentence_transformers import SentenceTransformer

from tests.helpers.models import ROOT


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


@pytest.mark.parametrize("name", ["distilled", "minilm_3_layers"])
def test_it_searches_by_meaning(name):
    model = SentenceTransformer(str(ROOT / "models" / name), device="cpu")
    # It is stored as float16.
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    scores = model.similarity(model.encode_query(list(QUERIES)), model.encode_document(TEXTS))
    assert scores.argmax(dim=1).tolist() == list(QUERIES.values())
