"""No attention across documents, and no row without tokens that spoils anything."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.packing_neobert import find_documents
from tests.helpers.models import CPU_BACKENDS, packed_batch, positions_of, ragged_batch, small_model


LENGTHS = (13, 7, 1, 10)


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_documents_do_not_leak(backend, form, dtype):
    """Bit-identical outputs for the untouched documents when one document changes."""
    model = small_model(attn_implementation=backend).to(dtype)
    changed = 1
    if form == "padded":
        ids, mask = ragged_batch(LENGTHS)
        other = ids.clone()
        other[changed] = (ids[changed] + 17) % 99 + 1
        before, after = (model(x, attention_mask=mask).last_hidden_state for x in (ids, other))
        before, after = list(before), list(after)
    else:
        ids, packed = packed_batch(LENGTHS)
        kwargs = packed if form == "cu_seq_lens" else {"position_ids": positions_of(LENGTHS)}
        other = ids.clone()
        start = sum(LENGTHS[:changed])
        other[0, start : start + LENGTHS[changed]] += 17
        other %= 100
        before, after = (model(x, **kwargs).last_hidden_state[0].split(LENGTHS) for x in (ids, other))
    for document, (left, right) in enumerate(zip(before, after)):
        assert torch.equal(left, right) == (document != changed)


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_padding_content_is_never_read(backend):
    model = small_model(attn_implementation=backend)
    ids, mask = ragged_batch(side="left")
    other = torch.where(mask.bool(), ids, (ids + 31) % 100)
    assert torch.equal(*(model(x, attention_mask=mask).last_hidden_state for x in (ids, other)))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("rows", ["one", "all"])
def test_rows_without_real_tokens_are_zero(backend, rows):
    model = small_model(attn_implementation=backend)
    model.requires_grad_(backend != "flex_attention")  # which has no backward pass on CPU
    ids, mask = ragged_batch()
    expected = model(ids, attention_mask=mask).last_hidden_state
    empty = [2] if rows == "one" else [0, 1, 2, 3]
    mask[empty] = 0
    states = model(ids, attention_mask=mask, output_hidden_states=True)
    assert (states.last_hidden_state[empty] == 0).all()
    if rows == "one":
        kept = [0, 1, 3]
        assert (states.last_hidden_state[kept] - expected[kept]).abs().max() <= 1e-5
    for state in states.hidden_states:
        assert state.shape == expected.shape and state.isfinite().all()
    if backend != "flex_attention":
        states.last_hidden_state.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_collator_of_transformers(backend):
    """DataCollatorWithFlattening's batch goes in as it is, labels included."""
    model = small_model(NeoBERTForMaskedLM, attn_implementation=backend)
    documents = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in LENGTHS]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, separator_id=-100)
    batch = collator(documents, return_tensors="pt")
    packed = model(**batch)
    alone = [model(torch.tensor([document["input_ids"]])).logits[0] for document in documents]
    assert (packed.logits[0] - torch.cat(alone)).abs().max() <= 1e-5
    assert packed.loss.isfinite()


@torch.no_grad()
def test_int64_and_int32_inputs_agree():
    model = small_model()
    ids, packed = packed_batch()
    narrow = {key: x.to(torch.int32) if torch.is_tensor(x) else x for key, x in packed.items()}
    wide = {key: x.long() if torch.is_tensor(x) else x for key, x in packed.items()}
    assert torch.equal(model(ids.int(), **narrow).last_hidden_state, model(ids, **wide).last_hidden_state)


def test_find_documents():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    assert find_documents(positions, None).tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6]
    # Left padding, and a token masked out in the middle: gaps are no borders, and padding's positions are not read.
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]]).bool()
    positions = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 9, 3, 4, 5]])
    assert find_documents(positions, mask)[0, 2:].tolist() == [0, 0, 1, 1]
    assert not find_documents(positions, mask)[1].any()


@torch.no_grad()
def test_sdpa_strips_padding_before_the_blocks():
    """Speed depends on it, so it is held here: every layer sees the real tokens and nothing else.

    test_embedding_hooks.py says the same of the embedding, where a hook would change it.
    """
    model, seen = small_model(), []
    for block in model.transformer_encoder:
        block.register_forward_hook(lambda module, args, output: seen.append(tuple(output[0].shape)))
    ids, mask = ragged_batch(LENGTHS)
    model(ids, attention_mask=mask)
    assert seen == [(1, sum(LENGTHS), 64)] * 2
    seen.clear()
    model(ids, attention_mask=torch.ones_like(mask))
    assert seen == [(4, 13, 64)] * 2, "without padding the batch stays as it is"


@torch.no_grad()
def test_attention_memory_does_not_grow_with_the_square():
    """16 x 8,192 in the original needs a mask of 96 GiB; here no mask exists at all."""
    model = small_model(max_length=8192, num_hidden_layers=1, hidden_size=16, num_attention_heads=1)
    ids = torch.ones(2, 8192, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 100:] = 0
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            for x in output if isinstance(output, (tuple, list)) else [output]:
                if torch.is_tensor(x):
                    largest = max(largest, x.numel())
            return output

    with Watch():
        model(ids, attention_mask=mask)
    assert largest < 8192 * 1024, "a length x length tensor was made"


def test_bfloat16_training_attends_in_float32_on_a_cpu():
    """No product of attention is in bfloat16, which oneDNN would compile for every length; gradients flow as before."""
    model = small_model(NeoBERTModel).train()
    ids, offsets = torch.randint(5, 60, (1, 9)), torch.tensor([0, 4, 9])
    arguments = {"input_ids": ids, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    dtypes = []

    class SeeAttention(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "scaled_dot_product" in str(function):
                dtypes.append(next(arg.dtype for arg in args if isinstance(arg, torch.Tensor)))
            return function(*args, **(kwargs or {}))

    def gradients(bfloat16):
        model.zero_grad()
        with SeeAttention(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            states = model(**arguments).last_hidden_state
            states.float().pow(2).sum().backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    expected, found = gradients(False), gradients(True)
    assert set(dtypes) == {torch.float32} and len(dtypes) == 2 * 2 * 2 * model.config.num_hidden_layers
    assert (found - expected).norm() < 0.05 * expected.norm()
