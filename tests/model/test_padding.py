"""Promise 3: padding is not computed, and is zero in the output. That it is not read is tested with the numbers."""

import pytest
import torch

from tests.helpers.models import LENGTHS, batch_of, packed_batch, ragged_batch, small_model


LINEAR = ("qkv", "wo", "ffn.w12", "ffn.w3")


def rows_seen(model, **batch) -> set[tuple[int, ...]]:
    """The shapes, without the width, of what the linear layers of the blocks were given."""
    seen = []
    for block in model.transformer_encoder:
        for name in LINEAR:
            layer = block.get_submodule(name)
            layer.register_forward_pre_hook(lambda layer, inputs: seen.append(tuple(inputs[0].shape[:-1])))
    model(**batch)
    assert len(seen) == len(LINEAR) * len(model.transformer_encoder)
    return set(seen)


@pytest.mark.parametrize("side", ["right", "left", "interior"])
@pytest.mark.parametrize("training", [True, False])
def test_the_layers_see_the_real_tokens_only(side, training):
    ids, mask = ragged_batch(LENGTHS, side)
    model = small_model().train(training)
    with torch.set_grad_enabled(training):
        assert rows_seen(model, input_ids=ids, attention_mask=mask) == {(1, sum(LENGTHS))}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_hooks_on_the_embedding_see_the_rows(backend):
    """As Captum's attributions and NEFTune's noise, which scales with the length that it sees."""
    model, seen = small_model(attn_implementation=backend), []
    model.encoder.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    ids, mask = ragged_batch(LENGTHS)
    model(ids, attention_mask=mask)
    assert seen == [(4, 13, 64)]


@torch.no_grad()
def test_a_full_batch_and_unpad_false_keep_the_rows():
    ids, mask = ragged_batch(LENGTHS, "left")
    assert rows_seen(small_model(), input_ids=ids, attention_mask=torch.ones_like(mask)) == {(4, 13)}
    model, (packed_ids, packed) = small_model(unpad=False), packed_batch()
    assert rows_seen(model, input_ids=ids, attention_mask=mask) == {(4, 13)}
    for batch in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": packed_ids, **packed}):
        assert (model(**batch).last_hidden_state - small_model()(**batch).last_hidden_state).abs().max() <= 1e-5


@pytest.mark.parametrize("empty", [[2], [0, 1, 2, 3]], ids=["one row", "all rows"])
@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_rows_without_real_tokens(backend, unpad, empty):
    """As the sampler of an evaluation makes them; they are zero, and spoil neither other rows nor gradients."""
    model = small_model(attn_implementation=backend, unpad=unpad)
    ids, mask = ragged_batch(LENGTHS)
    expected = model(ids, attention_mask=mask).last_hidden_state.detach()
    mask[empty] = 0
    states = model(ids, attention_mask=mask).last_hidden_state
    kept = [row for row in range(4) if row not in empty]
    assert (states[empty] == 0).all() and torch.allclose(states[kept], expected[kept], atol=1e-5)
    states.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["dense", "left", "cu_seq_lens"])
def test_hidden_states_have_the_callers_shape_and_gradients(backend, layout):
    model, (ids, kwargs, _) = small_model(attn_implementation=backend), batch_of(layout)
    outputs = model(ids, **kwargs, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.allclose(outputs.last_hidden_state, small_model()(ids, **kwargs).last_hidden_state, atol=1e-5)
    real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    assert torch.equal(outputs.hidden_states[0][real], model.encoder(ids)[real])
    for state in outputs.hidden_states:
        state.retain_grad()
    outputs.last_hidden_state.square().sum().backward()
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


@torch.no_grad()
def test_memory_does_not_grow_with_the_square():
    """The original needs a mask of 96 GiB for 16 x 8,192 tokens; here none is made."""
    model = small_model(max_length=8192, num_hidden_layers=1, hidden_size=32, num_attention_heads=1)
    ids = torch.ones(2, 8192, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 100:] = 0
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            outputs = output if isinstance(output, (tuple, list)) else [output]
            sizes.extend(each.numel() for each in outputs if torch.is_tensor(each))
            return output

    with Watch():
        model(ids, attention_mask=mask)
    assert max(sizes) < 8192 * 1024
