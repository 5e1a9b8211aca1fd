"""Pseudo-perplexity of a masked language model: each token of a sequence is predicted from all the others.

Section 5.3: mask each position i in turn and take the cross-entropy l_i of its token; exp of their mean is the
sequence's pseudo-perplexity (Salazar et al., 2020, arXiv 1910.14659). This takes n forward passes over n tokens each.
A random subset of the positions gives an estimate with a confidence interval.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from neobert_hf.common.files import write_text
from neobert_hf.common.fingerprints import check_same_settings, fingerprint
from neobert_hf.evaluation.results import ADVICE


@dataclass
class MaskableText:
    """A document as model input, and the positions to score.

    Args:
        document: its row in the source.
        ids: int64 (tokens,), with special tokens.
        positions: ascending; never those of special tokens.
        maskable: how many positions there are to choose from.
    """

    document: int
    ids: np.ndarray
    positions: np.ndarray
    maskable: int


def choose_positions(
    document: int, ids: Sequence[int], special_ids: list[int], sample: int | None = None, seed: int = 0
) -> MaskableText:
    """Choose all positions, or `sample` random ones that depend only on seed and document."""
    ids = np.asarray(ids)
    positions = maskable = np.flatnonzero(~np.isin(ids, special_ids))
    if sample is not None and sample < len(maskable):
        positions = np.sort(np.random.default_rng([seed, document]).choice(maskable, sample, replace=False))
    return MaskableText(document, ids, positions, len(maskable))


def masked_batches(
    texts: Sequence[MaskableText], batch_tokens: int, done: int = 0
) -> Iterator[list[tuple[MaskableText, int]]]:
    """Batches of rows (text and position), without the first `done` rows: as many as the budget holds, at least one.

    All rows of a batch have the same length. So nothing is padded, and dynamic NTK, which scales by the longest row,
    scales every text by its own length.
    """
    rows = islice(((text, position) for text in texts for position in text.positions), done, None)
    for length, group in groupby(rows, key=lambda row: len(row[0].ids)):
        while batch := list(islice(group, max(1, batch_tokens // length))):
            yield batch


@torch.inference_mode()
def masked_losses(model: PreTrainedModel, batch: list[tuple[MaskableText, int]], mask_id: int) -> list[float]:
    """Cross-entropy, in nats, of the masked token of each row."""
    ids = torch.from_numpy(np.stack([text.ids for text, _ in batch])).to(model.device)
    positions = torch.tensor([int(position) for _, position in batch], device=model.device)
    rows = torch.arange(len(batch), device=model.device)
    targets = ids[rows, positions]
    ids[rows, positions] = mask_id
    with _states_at(model, rows, positions):
        logits = model(input_ids=ids).logits
    # Without a separate backbone, the model has decoded every position.
    logits = logits[:, 0] if logits.shape[1] == 1 else logits[rows, positions]
    losses = F.cross_entropy(logits.float(), targets, reduction="none").tolist()
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"Losses of document {batch[0][0].document} are not finite. Set `dtype` to float32.")
    return losses


@contextmanager
def _states_at(model: PreTrainedModel, rows: torch.Tensor, positions: torch.Tensor) -> Iterator[None]:
    """Let the backbone return only one position of each row, so that the head decodes only that one."""

    def keep(module, args, output):
        output.last_hidden_state = output.last_hidden_state[rows, positions].unsqueeze(1)
        return output

    handle = model.base_model.register_forward_hook(keep) if model.base_model is not model else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def texts_fingerprint(texts: Sequence[MaskableText]) -> str:
    return fingerprint(*(values for text in texts for values in ([text.document], text.ids, text.positions)))


def read_losses(file: Path, settings: dict) -> list[float]:
    """The losses that an earlier run has stored, in the order of `masked_batches`; none if there is no file.

    The first line of the file holds the settings, every other line a batch. An incomplete last line, left by a killed
    process, is cut off.
    """
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    stored, *batches = map(json.loads, lines)
    check_same_settings(file, stored, settings, ADVICE)
    os.truncate(file, sum(len(line) + 1 for line in lines))
    return [loss for batch in batches for loss in batch]


def append_losses(file: Path, settings: dict, losses: list[float]) -> None:
    """Store a batch in one write; before the very first batch, store the settings."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(settings) + "\n")
    with open(file, "ab", buffering=0) as handle:
        handle.write(json.dumps(losses).encode() + b"\n")
