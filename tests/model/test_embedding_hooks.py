"""What looks at token embeddings or hidden states from outside: hooks, noise, gradients."""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import packed_batch, ragged_batch, small_model


IDS, MASK = ragged_batch(side="left")
PACKED_IDS, PACKED = packed_batch()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_hooks_on_the_embedding_see_the_rows_of_the_batch(backend):
    """As Captum's attributions and NEFTune's noise, which scales with the length that it sees."""
    model, seen = small_model(attn_implementation=backend), []
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    for register in (model.encoder.register_forward_hook, model.encoder.register_full_backward_hook):
        hook = register(lambda module, inputs, output: seen.append(tuple((*inputs, *output)[-1].shape)))
        states = model(IDS, attention_mask=MASK).last_hidden_state
        states.sum().backward()
        hook.remove()
        assert torch.equal(states, expected)
    # The forward hook is given the output whole: its last row is (length, width).
    assert seen == [(13, 64), (4, 13, 64)]
    model(IDS, attention_mask=MASK)
    assert len(seen) == 2


def test_without_hooks_padding_is_not_looked_up(monkeypatch):
    model, looked_up = small_model(), []
    lookup = torch.nn.functional.embedding
    monkeypatch.setattr(
        "torch.nn.functional.embedding", lambda ids, *rest: looked_up.append(tuple(ids.shape)) or lookup(ids, *rest)
    )
    model(IDS, attention_mask=MASK)
    assert looked_up == [(1, 31)]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["full", "padded", "packed"])
def test_hidden_states_are_part_of_the_output(backend, layout):
    """Each has a gradient; without gradients the same numbers come from the shorter way."""
    batch = {
        "full": {"input_ids": IDS},
        "padded": {"input_ids": IDS, "attention_mask": MASK},
        "packed": {"input_ids": PACKED_IDS, **PACKED},
    }[layout]
    model = small_model(NeoBERTForMaskedLM, backend)
    outputs = model(**batch, output_hidden_states=True)
    for state in outputs.hidden_states:
        state.retain_grad()
    outputs.logits.square().sum().backward()
    for state in outputs.hidden_states:
        assert state.shape == (*batch["input_ids"].shape, 64) and state.grad.abs().max() > 0
        if layout == "padded":
            assert not state[~MASK.bool()].any()
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(outputs.hidden_states, expected.hidden_states))
    assert torch.allclose(outputs.logits, expected.logits, atol=1e-5)
