"""Vectors before a text: all layouts agree with the plain implementation, and every one of them is read."""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import packed_batch, ragged_batch, small_model
from tests.helpers.plain_neobert import plain_hidden_states


LENGTHS = (13, 7, 1, 10)
PREFIX = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3))
PREFIXES = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(4))


def max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    assert left.shape == right.shape
    return (left.double() - right.double()).abs().max().item()


def expected_states(model, ids, mask, prefix, text_position=0) -> list[torch.Tensor]:
    """Of the real tokens of every row, without package code."""
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    rows = []
    for row in range(len(ids)):
        columns = mask[row].nonzero().squeeze(1)
        positions = columns - columns[0] + text_position
        vectors = prefix[row % len(prefix)].float()
        rows.append(plain_hidden_states(state, model.config, ids[row, columns], positions, vectors))
    return rows


# `flex_attention` compiles a kernel for every shape, and on a CPU that takes seconds.
SIDES = ["dense", "right", "left", "interior"]
LAYOUTS = [(backend, side) for backend in ("sdpa", "eager") for side in SIDES] + [("flex_attention", "left")]


@torch.no_grad()
@pytest.mark.parametrize("backend, side", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text_position", [0, 6])
def test_every_backend_layout_and_dtype(backend, side, dtype, text_position):
    model = small_model(attn_implementation=backend, embedding_init_range=0.5).to(dtype)
    ids, mask = ragged_batch((13,) * 4 if side == "dense" else LENGTHS, side=side if side != "dense" else "right")
    for prefix in (PREFIX.to(dtype), PREFIXES.to(dtype)):
        states = model(ids, attention_mask=mask, prefix_embeds=prefix, text_position=text_position).last_hidden_state
        assert states.shape == (4, 13, 64) and states.dtype == dtype
        assert (states[mask == 0] == 0).all()
        for row, expected in enumerate(expected_states(model, ids, mask, prefix, text_position)):
            got = states[row, mask[row].bool()].float()
            if dtype == torch.float32:
                assert max_difference(got, expected) <= 1e-5
            else:
                assert torch.cosine_similarity(got, expected).min() >= 0.999


@torch.no_grad()
@pytest.mark.parametrize("backend", ("sdpa", "eager"))
def test_each_vector_alone_changes_every_row(backend):
    """Of its own row where rows have their own, and of all rows where they share it."""
    model = small_model(attn_implementation=backend)
    ids, mask = ragged_batch(LENGTHS)
    before = model(ids, attention_mask=mask, prefix_embeds=PREFIX).last_hidden_state
    own = model(ids, attention_mask=mask, prefix_embeds=PREFIXES).last_hidden_state
    for vector in range(PREFIX.shape[1]):
        other = PREFIX.clone()
        other[0, vector] += 1
        after = model(ids, attention_mask=mask, prefix_embeds=other).last_hidden_state
        changed = (after - before).abs().amax(-1)
        assert (changed[mask.bool()] > 1e-3).all(), f"vector {vector}"
        others = PREFIXES.clone()
        others[2, vector] += 1
        after = model(ids, attention_mask=mask, prefix_embeds=others).last_hidden_state
        assert [torch.equal(left, right) for left, right in zip(after, own)] == [True, True, False, True]


@torch.no_grad()
def test_the_order_of_the_vectors_does_not_matter():
    model = small_model().double()
    ids, mask = ragged_batch(LENGTHS)
    shuffled = PREFIX[:, torch.tensor([4, 0, 5, 2, 1, 3])]
    states = [
        model(ids, attention_mask=mask, prefix_embeds=prefix.double(), text_position=3).last_hidden_state
        for prefix in (PREFIX, shuffled)
    ]
    assert max_difference(*states) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize("backend", ("sdpa", "eager"))
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_prefix_of_length_0_is_the_plain_model(backend, side):
    model = small_model(attn_implementation=backend)
    ids, mask = ragged_batch(LENGTHS, side=side)
    plain = model(ids, attention_mask=mask, output_hidden_states=True)
    empty = model(ids, attention_mask=mask, output_hidden_states=True, prefix_embeds=PREFIX[:, :0])
    assert torch.equal(plain.last_hidden_state, empty.last_hidden_state)
    assert all(torch.equal(left, right) for left, right in zip(plain.hidden_states, empty.hidden_states))


@torch.no_grad()
@pytest.mark.parametrize("text_position", [0, 6])
def test_batched_or_one_by_one(text_position):
    model = small_model()
    right, mask = ragged_batch(LENGTHS)
    left, left_mask = torch.zeros_like(right), mask.flip(1)
    for row, length in enumerate(LENGTHS):
        left[row, 13 - length :] = right[row, :length]
    options = {"prefix_embeds": PREFIX, "text_position": text_position}
    padded = model(right, attention_mask=mask, **options).last_hidden_state
    other = model(left, attention_mask=left_mask, **options).last_hidden_state
    from_embeddings = model(inputs_embeds=model.encoder(right), attention_mask=mask, **options).last_hidden_state
    assert max_difference(padded, from_embeddings) == 0
    for row, length in enumerate(LENGTHS):
        alone = model(right[row : row + 1, :length], **options).last_hidden_state[0]
        assert max_difference(padded[row, :length], alone) <= 1e-5
        assert max_difference(other[row, 13 - length :], alone) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", ("sdpa", "eager"))
def test_all_outputs_are_of_the_text(backend):
    model = small_model(NeoBERTForMaskedLM, attn_implementation=backend)
    ids, mask = ragged_batch(LENGTHS)
    labels = ids.masked_fill(mask == 0, -100)
    outputs = model(ids, attention_mask=mask, labels=labels, prefix_embeds=PREFIX, output_hidden_states=True)
    assert outputs.logits.shape == (4, 13, 100) and outputs.loss.isfinite()
    assert [state.shape for state in outputs.hidden_states] == [(4, 13, 64)] * 3
    # The embeddings, which stand first, are not mixed with the prefix.
    assert torch.equal(outputs.hidden_states[0][0], model.model.encoder(ids[0]))
    weights = model(ids, attention_mask=mask, prefix_embeds=PREFIX, output_attentions=True).attentions
    assert weights[0].shape == (4, 4, 19, 19) and (weights[0][1, :, :, 13:] == 0).all()


def test_gradients_reach_every_vector_and_agree():
    """`eager` keeps the padding, `sdpa` strips it; measured relative difference 1e-6."""
    ids, mask = ragged_batch(LENGTHS, side="left")
    weights = torch.randn(*ids.shape, 64)
    gradients = []
    for backend in ("eager", "sdpa"):
        model = small_model(attn_implementation=backend, embedding_init_range=0.3).train()
        prefix = PREFIX.clone().requires_grad_()
        states = model(ids, attention_mask=mask, prefix_embeds=prefix).last_hidden_state
        (states * weights).sum().backward()
        assert (prefix.grad.norm(dim=-1) > 1e-3).all()
        gradients.append(prefix.grad)
    assert max_difference(*gradients) / gradients[0].abs().max() <= 1e-5


@torch.no_grad()
def test_a_row_without_real_tokens_stays_zero():
    model = small_model()
    ids, mask = ragged_batch(LENGTHS)
    mask[2] = 0
    states = model(ids, attention_mask=mask, prefix_embeds=PREFIX).last_hidden_state
    assert (states[2] == 0).all() and states.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_the_span_that_scaled_rope_looks_at(padded):
    """Vectors at position 0 make a text no longer; where it begins does."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    model = small_model(rope_parameters=rope, max_length=20)
    ids, mask = ragged_batch((13, 7) if padded else (13, 13))
    long = PREFIX.repeat(1, 5, 1)
    plain = small_model(max_length=20)
    arguments = {"attention_mask": mask, "prefix_embeds": long}
    inside, beyond = (
        max_difference(*(each(ids, text_position=position, **arguments).last_hidden_state for each in (model, plain)))
        for position in (7, 8)
    )
    assert inside == 0 and beyond > 1e-3


@pytest.mark.parametrize("layout", ["dense", "padded"])
def test_while_compiling(layout):
    model = small_model()
    ids, mask = ragged_batch(LENGTHS)
    mask = mask if layout == "padded" else None
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, prefix_embeds=PREFIX, text_position=6).last_hidden_state
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        got = compiled(ids, attention_mask=mask, prefix_embeds=PREFIX, text_position=6).last_hidden_state
    assert max_difference(got, expected) <= 1e-5


IDS, MASK = ragged_batch(LENGTHS)
PACKED_IDS, PACKED = packed_batch(LENGTHS)
NAN = PREFIX.clone()
NAN[0, 3, 5] = float("nan")
BAD = {
    "width": ({"prefix_embeds": PREFIX[:, :, :32]}, r"`prefix_embeds` has shape \(1, 6, 32\), it must be \(4 or 1"),
    "rows": ({"prefix_embeds": PREFIXES[:3]}, r"shape \(3, 6, 64\), it must be \(4 or 1, prefix, hidden_size=64\)"),
    "two_dimensions": ({"prefix_embeds": PREFIX[0]}, r"shape \(6, 64\)"),
    "integers": ({"prefix_embeds": torch.ones(1, 6, 64, dtype=torch.long)}, "dtype torch.int64"),
    "nan": ({"prefix_embeds": NAN}, "`prefix_embeds` holds nan"),
    "infinite": ({"prefix_embeds": PREFIX / 0}, "`prefix_embeds` holds -?inf"),
    "positions": ({"prefix_embeds": PREFIX, "position_ids": torch.arange(13)[None]}, "excludes `position_ids`"),
    "seq_idx": (
        {"prefix_embeds": PREFIX, "position_ids": torch.arange(13)[None], "seq_idx": torch.zeros(1, 13).long()},
        "excludes `position_ids`",
    ),
    "position_alone": ({"text_position": 6}, "`text_position` is 6, but has no effect without vectors"),
    "position_of_none": (
        {"prefix_embeds": PREFIX[:, :0], "text_position": 6},
        "`text_position` is 6, but has no effect without",
    ),
    "position_negative": ({"prefix_embeds": PREFIX, "text_position": -1}, "`text_position` is -1, it must be a whole"),
    "position_float": ({"prefix_embeds": PREFIX, "text_position": 1.5}, "`text_position` is 1.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        small_model()(IDS, attention_mask=MASK, **arguments)


def test_refused_without_rope_and_with_packed_rows():
    with pytest.raises(ValueError, match="`prefix_embeds` needs RoPE"):
        small_model(rope=False)(IDS, attention_mask=MASK, prefix_embeds=PREFIX)
    with pytest.raises(ValueError, match="excludes `cu_seq_lens_q`"):
        small_model()(PACKED_IDS, **PACKED, prefix_embeds=PREFIX)
