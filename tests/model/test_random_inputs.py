"""Promise 2: random batches, padded anywhere or packed, give the plain implementation's numbers."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.models import small_model
from tests.helpers.plain_neobert import plain_hidden_states
from tests.helpers.properties import reproducible


SIZES = {"vocab_size": 20, "num_hidden_layers": 1, "intermediate_size": 24, "max_length": 32}
LENGTH = 7


@st.composite
def batches(draw):
    """Arguments of a forward pass, and the documents in them: (row, columns, positions)."""
    layout = draw(st.sampled_from(["padded", "holes", "offsets", "positions", "packed rows"]))
    rows = draw(st.integers(1, 3))
    mask = torch.zeros(rows, LENGTH, dtype=torch.long)
    positions, documents = torch.zeros_like(mask), []
    if layout == "offsets":
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        places = [torch.arange(first, last) for first, last in zip(offsets[:-1], offsets[1:])]
        documents = [(0, columns, torch.arange(len(columns))) for columns in places]
        return {"input_ids": torch.arange(int(offsets[-1]))[None] % 20, "cu_seq_lens_q": offsets}, documents
    for row in range(rows):
        first = draw(st.integers(0, LENGTH - 1))
        length = draw(st.integers(0 if layout == "padded" else 1, LENGTH - first))
        columns = torch.arange(first, first + length)
        if layout == "holes":
            kept = draw(st.lists(st.booleans(), min_size=length, max_size=length))
            columns = columns[torch.tensor(kept, dtype=torch.bool)]
        mask[row, columns] = 1
        if layout in ("padded", "holes"):
            if len(columns):
                documents.append((row, columns, columns - columns[0]))
            continue
        cuts = draw(st.lists(st.integers(0, length), max_size=2))
        for part in columns.tensor_split(sorted(cuts)):
            if len(part):
                positions[row, part] = torch.arange(len(part))
                documents.append((row, part, torch.arange(len(part))))
    if layout in ("positions", "packed rows"):
        assume(positions.any())  # Nothing but zeros is refused.
    batch = {"input_ids": torch.arange(rows * LENGTH).view(rows, LENGTH) % 20, "attention_mask": mask}
    return batch | ({} if layout in ("padded", "holes") else {"position_ids": positions}), documents


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_random_batches(backend):
    model = small_model(attn_implementation=backend, **SIZES)

    @reproducible(50)
    @given(batches())
    @torch.no_grad()
    def check(drawn):
        batch, documents = drawn
        ids = batch["input_ids"]
        expected = torch.zeros(*ids.shape, 64)
        for row, columns, positions in documents:
            expected[row, columns] = plain_hidden_states(model.state_dict(), model.config, ids[row, columns], positions)
        assert (model(**batch).last_hidden_state - expected).abs().max() <= 1e-5, batch

    check()
