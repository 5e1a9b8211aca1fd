"""Promise 2: random batches, padded anywhere or packed, give the plain implementation's numbers."""

import pytest
import torch

from tests.helpers.models import small_model
from tests.helpers.plain_neobert import plain_hidden_states


SIZES = {"vocab_size": 20, "num_hidden_layers": 1, "intermediate_size": 24, "max_length": 32}
ROWS, LENGTH = 3, 7


def random_batch(layout: str) -> tuple[dict, list[tuple[int, torch.Tensor, torch.Tensor]]]:
    """Arguments of a forward pass, and the documents in them: (row, columns, positions). Rows may be empty."""
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 20
    if layout == "offsets":
        lengths = torch.randint(1, 5, (ROWS,)).tolist()
        places = torch.arange(sum(lengths)).split(lengths)
        ids, offsets = ids.view(1, -1)[:, : sum(lengths)], torch.tensor([0, *lengths]).cumsum(0)
        batch = {"input_ids": ids, "cu_seq_lens_q": offsets}
        return batch, [(0, columns, torch.arange(len(columns))) for columns in places]
    first, last = torch.randint(0, LENGTH + 1, (2, ROWS, 1)).sort(0).values
    mask = (torch.arange(LENGTH) >= first) & (torch.arange(LENGTH) < last)
    if layout == "holes":
        mask &= torch.rand(ROWS, LENGTH) < 0.7
    batch, documents = {"input_ids": ids, "attention_mask": mask.long()}, []
    for row, real in enumerate(mask):
        columns = real.nonzero()[:, 0]
        if layout != "packed rows" and len(columns):
            documents.append((row, columns, columns - columns[0]))
        if layout == "packed rows":
            parts = columns.tensor_split(torch.randint(0, LENGTH, (2,)).sort().values)
            documents += [(row, part, torch.arange(len(part))) for part in parts if len(part)]
    if layout == "packed rows":
        batch["position_ids"] = torch.zeros_like(ids)
        for row, columns, positions in documents:
            batch["position_ids"][row, columns] = positions
    return batch, documents


@torch.no_grad()
@pytest.mark.parametrize("layout", ["padded", "holes", "offsets", "packed rows"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_random_batches(backend, layout):
    model = small_model(attn_implementation=backend, **SIZES)
    for _ in range(20):
        batch, documents = random_batch(layout)
        if not batch.get("position_ids", torch.ones(1)).any():
            continue  # Nothing but zeros is refused.
        ids = batch["input_ids"]
        expected = torch.zeros(*ids.shape, 64)
        for row, columns, positions in documents:
            expected[row, columns] = plain_hidden_states(model.state_dict(), model.config, ids[row, columns], positions)
        assert (model(**batch).last_hidden_state - expected).abs().max() <= 1e-5, batch
