"""`model.compile()`: one graph for all blocks and batches, the same numbers, and everything around it stays eager."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import packed_batch, ragged_batch, small_model


PACKED_IDS, PACKED = packed_batch()
FULL = [{"input_ids": ragged_batch((length,) * rows)[0]} for rows, length in ((3, 10), (2, 17))]
PACKS = [{"input_ids": PACKED_IDS, **PACKED}]


def ragged_batches(number: int) -> list[dict]:
    """Two to nine rows, and one row whose padding leaves a single document."""
    generator = torch.Generator().manual_seed(3)
    lengths = [torch.randint(1, 30, (2 + place % 8,), generator=generator).tolist() for place in range(number - 1)]
    ids, mask = zip(*(ragged_batch(rows) for rows in lengths))
    batches = [{"input_ids": row, "attention_mask": rest} for row, rest in zip(ids, mask)]
    alone = torch.tensor([[1, 1, 1, 1, 0, 0]])
    return batches + [{"input_ids": ids[0][:1, :6], "attention_mask": alone}]


def gradients(model, batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logits = model(**batch).logits
    logits.square().sum().backward()
    return logits.detach(), [weight.grad.clone() for weight in model.parameters()]


def assert_same(model, eager, batches, logits: float = 3e-6, gradient: float = 2e-6) -> None:
    """Logits against their largest, gradients each against its largest."""
    for batch in batches:
        (got, own), (expected, others) = gradients(model, batch), gradients(eager, batch)
        assert (got - expected).abs().max() <= logits * max(1, expected.abs().max())
        for left, right in zip(own, others, strict=True):
            assert (left - right).abs().max() <= gradient * max(1, right.abs().max())


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_blocks_and_batches_share_a_graph(checkpointing):
    """24 ragged batches, packed rows among them, in at most 3 compilations; whole rows have one of their own."""
    counter, layers = CompileCounter(), {"num_hidden_layers": 3}
    model, eager = (small_model(NeoBERTForMaskedLM, **layers).train() for _ in range(2))
    if checkpointing:
        model.activation_checkpointing_enable()
    model.compile(backend=counter)
    assert_same(model, eager, ragged_batches(24) + PACKS)
    ragged = counter.frame_count
    assert 1 <= ragged <= (3 if checkpointing else 2)
    assert_same(model, eager, FULL)
    assert counter.frame_count <= ragged + 1
    assert not counters["graph_break"]


def test_other_ways_to_compile_blocks_do_not_count_documents():
    """`block.compile()`, and with it accelerate's `compile_regions`: sizes are fixed at first, then they are not."""
    counter = CompileCounter()
    model, eager = (small_model(NeoBERTForMaskedLM).train() for _ in range(2))
    for block in model.base_model.transformer_encoder:
        block.compile(backend=counter)
    batches = ragged_batches(12)
    assert_same(model, eager, batches[:3])
    compiled = counter.frame_count
    assert 1 <= compiled <= 4
    assert_same(model, eager, batches[3:])
    assert counter.frame_count == compiled


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_cpu_without_gradients_blocks_stay_as_they_are(dtype):
    """They are faster there."""
    counter, model, eager = CompileCounter(), small_model().to(dtype), small_model().to(dtype)
    model.compile(backend=counter)
    batch = ragged_batches(2)[0]
    assert torch.equal(model(**batch).last_hidden_state, eager(**batch).last_hidden_state)
    assert counter.frame_count == 0


def test_copies_and_pickles_are_not_compiled():
    model = small_model(NeoBERTForMaskedLM)
    model.compile(backend="eager")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.base_model.compiled_block is None
        assert torch.equal(copied.base_model.encoder.weight, model.base_model.encoder.weight)
    assert model.base_model.compiled_block is not None


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_by_inductor(checkpointing):
    model, eager = (small_model(NeoBERTForMaskedLM, embedding_init_range=0.3).train() for _ in range(2))
    if checkpointing:
        model.activation_checkpointing_enable()
    model.compile()
    assert_same(model, eager, ragged_batches(4) + PACKS + FULL, gradient=1e-5)
