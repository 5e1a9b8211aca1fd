"""The model of the results pages, the one in the repository that has learned something."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from tests.helpers.models import ROOT


SMALL = ROOT / "benchmarks" / "models" / "small"


@pytest.fixture(scope="module")
def model():
    return AutoModelForMaskedLM.from_pretrained(SMALL, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The president of the united [MASK] spoke to congress.", "states"),
        ("The table has two [MASK] and a primary key.", "columns"),
    ],
)
def test_it_fills_masks(model, text, word):
    fill = pipeline("fill-mask", model, tokenizer=AutoTokenizer.from_pretrained(SMALL), device="cpu")
    assert fill(text)[0]["token_str"] == word
