"""Promise 3: padding is not computed, and is zero in the output. That it is not read is tested with the numbers."""

import pytest
import torch

from tests.helpers.models import LENGTHS, batch_of, ragged_batch, small_model


LINEAR = ("qkv", "wo", "ffn.w12", "ffn.w3")


@pytest.mark.parametrize("side", ["right", "left", "interior"])
@pytest.mark.parametrize("training", [True, False])
def test_the_layers_see_the_real_tokens_only(side, training):
    model, seen = small_model().train(training), []
    for block in model.transformer_encoder:
        for name in LINEAR:
            layer = block.get_submodule(name)
            layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[:-1]))
    ids, mask = ragged_batch(LENGTHS, side)
    with torch.set_grad_enabled(training):
        model(ids, attention_mask=mask)
    assert seen == [(1, sum(LENGTHS))] * len(LINEAR) * 2


@pytest.mark.parametrize("empty", [[2], [0, 1, 2, 3]], ids=["one row", "all rows"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_rows_without_real_tokens(backend, empty):
    """As the sampler of an evaluation makes them; they are zero, and spoil neither other rows nor gradients."""
    model = small_model(attn_implementation=backend)
    ids, mask = ragged_batch(LENGTHS)
    expected = model(ids, attention_mask=mask).last_hidden_state.detach()
    mask[empty] = expected[empty] = 0
    states = model(ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(states, expected, atol=1e-5) and (states[empty] == 0).all()
    states.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["dense", "left", "cu_seq_lens"])
def test_hidden_states_have_the_callers_shape_and_gradients(backend, layout):
    model, (ids, kwargs, _) = small_model(attn_implementation=backend), batch_of(layout)
    outputs = model(ids, **kwargs, output_hidden_states=True)
    assert torch.allclose(outputs.last_hidden_state, small_model()(ids, **kwargs).last_hidden_state, atol=1e-5)
    assert len(outputs.hidden_states) == 3 and torch.equal(outputs.hidden_states[0], model.encoder(ids))
    for state in outputs.hidden_states:
        state.retain_grad()
    outputs.last_hidden_state.square().sum().backward()
    real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    for state in outputs.hidden_states:
        assert state.shape == (*ids.shape, 64) and state.grad.abs().amax(-1)[real].min() > 0


@torch.no_grad()
@pytest.mark.parametrize("layout", ["right", "cu_seq_lens"])
def test_attention_weights_of_eager(layout):
    model, (ids, kwargs, documents) = small_model(attn_implementation="eager"), batch_of(layout)
    weights = model(ids, **kwargs, output_attentions=True).attentions
    assert len(weights) == 2 and weights[0].shape == (len(ids), 2, *ids.shape[1:] * 2)
    for row, columns in documents:  # All of the attention is within the document.
        part = weights[0][row, :, columns][:, :, columns]
        torch.testing.assert_close(part.sum(-1), torch.ones(2, len(columns)))
