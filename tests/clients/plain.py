"""What the model gives without a client, to compare with, and what several tests read."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer


TEXTS = ["the cat sat on the mat", "a dog", "what is 17 times 3? nobody knows", "ran to the mat, then sat"]


def tokens(folder: str, texts: Sequence[str] = TEXTS, **options):
    return AutoTokenizer.from_pretrained(folder)(list(texts), padding=True, return_tensors="pt", **options)


@torch.no_grad()
def vectors(folder: str, texts: Sequence[str] = TEXTS, normalize: bool = False) -> np.ndarray:
    """Means over the real tokens, (texts, hidden_size)."""
    inputs = tokens(folder, texts)
    states = AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    return (F.normalize(means) if normalize else means).numpy()


@torch.no_grad()
def logits(folder: str, texts: Sequence[str] = TEXTS) -> torch.Tensor:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()(**tokens(folder, texts)).logits


def same(got, expected, tolerance: float = 1e-5) -> bool:
    got, expected = np.asarray(got), np.asarray(expected)
    return got.shape == expected.shape and bool(np.abs(got - expected).max() <= tolerance)
