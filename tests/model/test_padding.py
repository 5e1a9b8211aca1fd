"""Promise 3: padding is not computed and never read, it is zero in the output, and documents do not see each other."""

import pytest
import torch

from neobert_hf import NeoBERTModel
from tests.helpers.flash_kernel import flash_model, stand_in
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model


LENGTHS = (13, 7, 1, 10)
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
    model = small_model(unpad=False)
    assert rows_seen(model, input_ids=ids, attention_mask=mask) == {(4, 13)}
    expected = small_model()(ids, attention_mask=mask).last_hidden_state
    assert (model(ids, attention_mask=mask).last_hidden_state - expected).abs().max() <= 1e-5
    packed_ids, packed = packed_batch(LENGTHS)
    expected = small_model()(packed_ids, **packed).last_hidden_state
    assert (model(packed_ids, **packed).last_hidden_state - expected).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_do_not_see_each_other(backend, form, dtype):
    """To the bit: when one document changes, the others' outputs do not."""
    model, changed = small_model(attn_implementation=backend).to(dtype), 1
    if form == "padded":
        ids, mask = ragged_batch(LENGTHS)
        other = ids.clone()
        other[changed] = (ids[changed] + 17) % 99 + 1
        before, after = (list(model(x, attention_mask=mask).last_hidden_state) for x in (ids, other))
    else:
        ids, packed = packed_batch(LENGTHS)
        kwargs = packed if form == "cu_seq_lens" else {"position_ids": positions_of(LENGTHS)}
        other = ids.clone()
        start = sum(LENGTHS[:changed])
        other[0, start : start + LENGTHS[changed]] += 17
        other %= 100
        before, after = (model(x, **kwargs).last_hidden_state[0].split(LENGTHS) for x in (ids, other))
    assert [torch.equal(*pair) for pair in zip(before, after)] == [True, False, True, True]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "interior"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_padding_is_never_read(backend, side):
    model = small_model(attn_implementation=backend)
    ids, mask = ragged_batch(LENGTHS, side)
    other = torch.where(mask.bool(), ids, (ids + 31) % 100)
    assert torch.equal(*(model(x, attention_mask=mask).last_hidden_state for x in (ids, other)))


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


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("layout", ["full", "padded", "packed"])
def test_hidden_states_have_the_callers_shape_and_gradients(backend, layout, monkeypatch):
    if backend == "flash_attention_2":
        stand_in(monkeypatch)
        model = flash_model(NeoBERTModel, backend)
    else:
        model = small_model(attn_implementation=backend)
    ids, mask = ragged_batch(LENGTHS, "left")
    packed_ids, packed = packed_batch(LENGTHS)
    batch = {"full": {"input_ids": ids}, "padded": {"input_ids": ids, "attention_mask": mask}}
    batch = batch.get(layout) or {"input_ids": packed_ids, **packed}
    expected = small_model()(**batch).last_hidden_state
    outputs = model(**batch, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.allclose(outputs.last_hidden_state, expected, atol=1e-5)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert torch.equal(outputs.hidden_states[0][real], model.encoder(batch["input_ids"])[real])
    assert all(state.shape == (*batch["input_ids"].shape, 64) for state in outputs.hidden_states)
    if (backend, layout) == ("flash_attention_2", "packed"):
        return  # What its blocks computed lies end to end; these are copies in the caller's shape.
    for state in outputs.hidden_states:
        state.retain_grad()
    outputs.last_hidden_state.square().sum().backward()
    for state in outputs.hidden_states:
        assert state.grad.abs().amax(-1)[real].min() > 0


@torch.no_grad()
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_attention_weights_of_eager(layout):
    model = small_model(attn_implementation="eager")
    if layout == "padded":
        ids, mask = ragged_batch(LENGTHS)
        weights = model(ids, attention_mask=mask, output_attentions=True).attentions
        parts = [layer[row, :, :n, :n] for layer in weights for row, n in enumerate(LENGTHS)]
    else:
        ids, packed = packed_batch(LENGTHS)
        weights = model(ids, **packed, output_attentions=True).attentions
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        parts = [layer[0, :, end - n : end, end - n : end] for layer in weights for end, n in zip(ends, LENGTHS)]
    assert len(weights) == 2 and weights[0].shape == (*ids.shape[:1], 2, *ids.shape[1:] * 2)
    for part in parts:  # All of the attention is within the document.
        torch.testing.assert_close(part.sum(-1), torch.ones(2, len(part[0])))


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
            sizes.extend(
                x.numel() for x in (output if isinstance(output, (tuple, list)) else [output]) if torch.is_tensor(x)
            )
            return output

    with Watch():
        model(ids, attention_mask=mask)
    assert max(sizes) < 8192 * 1024
