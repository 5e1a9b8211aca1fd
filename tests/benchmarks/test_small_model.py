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


@torch.no_grad()
def test_it_needs_its_positions(model):
    """Wrong rotary angles, which random weights hardly show, cost it nats: here the order of the words is turned."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    text = (
        "This function returns a list of the names of all files in the directory, or raises an error if there is none."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    losses = []
    for order in (torch.arange(ids.shape[1]), torch.arange(ids.shape[1]).flip(0)):
        row, found = ids[:, order], []
        for position in range(1, ids.shape[1] - 1):
            hidden = row.clone()
            hidden[0, position] = tokenizer.mask_token_id
            found.append(-model(hidden).logits[0, position].log_softmax(-1)[row[0, position]])
        losses.append(torch.stack(found).mean().item())
    forward, backward = losses
    assert forward < 3 < 4 < backward
