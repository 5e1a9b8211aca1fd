"""What measures texts with a model, and what explains its answers."""

import pytest
import torch
from torch.nn import functional as F

from neobert_hf import NeoBERTForSequenceClassification, NeoBERTModel
from tests.clients.plain import TEXTS, same, tokens


CANDIDATES, REFERENCES = TEXTS[:2], TEXTS[2:]


@torch.no_grad()
def cosines(folder: str, layer: int) -> list[torch.Tensor]:
    """Of each token of a candidate with each of its reference, special tokens included, by the plain hidden states."""
    model = NeoBERTModel.from_pretrained(folder).eval()

    def normalized(text: str) -> torch.Tensor:
        return F.normalize(model(**tokens(folder, [text]), output_hidden_states=True).hidden_states[layer][0])

    return [normalized(left) @ normalized(right).T for left, right in zip(CANDIDATES, REFERENCES)]


def f1(matches: torch.Tensor) -> torch.Tensor:
    """Of greedy matches (Zhang et al., 2020), for every token but the first and the last, which are special."""
    precision, recall = (matches.max(dim).values[1:-1].mean() for dim in (1, 0))
    return 2 * precision * recall / (precision + recall)


@pytest.mark.clients("bert-score")
def test_bert_score(encoder):
    """F1 at every layer is that computed from the plain hidden states."""
    from bert_score import BERTScorer

    scorer = BERTScorer(model_type=encoder, num_layers=2, all_layers=True, device="cpu")
    _, _, found = scorer.score(CANDIDATES, REFERENCES)
    expected = torch.stack([torch.stack([f1(matches) for matches in cosines(encoder, layer)]) for layer in range(3)])
    assert same(found, expected)


@pytest.mark.clients("torchmetrics")
def test_torchmetrics(encoder):
    """F1 is that of the plain hidden states, with special tokens counted as 0; in a batch it is the same."""
    from torchmetrics.text import BERTScore

    options = {"num_layers": 1, "truncation": True, "max_length": 64}
    # Special tokens match as if their cosine was 0.
    inner = [F.pad(matches[1:-1, 1:-1], (1, 1, 1, 1)) for matches in cosines(encoder, 1)]
    expected = torch.stack([f1(matches) for matches in inner])
    for size in (1, 2):
        assert same(BERTScore(encoder, batch_size=size, **options)(CANDIDATES, REFERENCES)["f1"], expected)


@pytest.mark.clients("captum")
def test_captum(classifier):
    """Attributions to the token embeddings add up to the difference between the logits of the text and of padding."""
    from captum.attr import LayerIntegratedGradients

    model = NeoBERTForSequenceClassification.from_pretrained(classifier).eval()
    ids = tokens(classifier, TEXTS[:1])["input_ids"]
    baseline = torch.full_like(ids, 5)

    def score(ids):
        return model(ids).logits[:, 1]

    gradients = LayerIntegratedGradients(score, model.model.encoder)
    found = gradients.attribute(ids, baseline, n_steps=200)
    with torch.no_grad():
        difference = (score(ids) - score(baseline)).item()
    assert found.shape == (*ids.shape, 64) and abs(found.sum().item() - difference) < 0.02 * abs(difference)
