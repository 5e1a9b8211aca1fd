"""Training on the route of a GPU: gradients through its attention kernels, and graphs of blocks that call them.

The tensors lie on the CPU, and the kernels have stand-ins; which of them a GPU takes is test_attention_choice.py's.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F

from neobert_hf import NeoBERTForMaskedLM, attention_neobert
from neobert_hf.attention_neobert import attend_to_documents, sdpa_attention_forward
from tests.helpers.models import small_config, small_model
from tests.helpers.pretend_cuda import PretendTensor, varlen_attn
from tests.model.test_compiled_blocks import FULL, PACKS, assert_same, ragged_batches


CALLS = []


def note(name: str) -> None:
    if not torch.compiler.is_compiling():  # A graph would depend on the list.
        CALLS.append(name)


def dense_kernel(query, key, value, softmax_scale):
    """(batch, length, heads, dim_head)."""
    note("dense")
    states = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(*states, scale=softmax_scale).transpose(1, 2)


def varlen_kernel(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale):
    """(tokens, heads, dim_head), as one operation of a graph, as the kernels are."""
    note("varlen")
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    states = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    return attend_to_documents(*states, cu_seqlens_q, softmax_scale)[0]


@pytest.fixture
def faster_kernels(monkeypatch):
    """FlashAttention 3 is installed, for float32 heads of the tests' models."""
    CALLS.clear()
    kernels = {(torch.float32, small_model().config.head_dim): (dense_kernel, varlen_kernel)}
    monkeypatch.setattr(attention_neobert, "FASTER_KERNELS", kernels)
    monkeypatch.setattr(attention_neobert, "has_varlen_kernel", lambda *arguments: True)
    monkeypatch.setattr(attention_neobert, "find_faster_kernel", lambda *arguments: True)
    torch.compiler.reset()
    counters.clear()


def models() -> list[NeoBERTForMaskedLM]:
    """One for the route of a GPU, one that attends by `eager`."""
    return [small_model(NeoBERTForMaskedLM, attn_implementation=name).train() for name in ("sdpa", "eager")]


def test_gradients_go_through_the_faster_kernels(faster_kernels):
    model, eager = models()
    assert_same(model, eager, [*ragged_batches(4), *PACKS, *FULL], logits=1e-5, gradient=1e-5)
    assert {"dense", "varlen"} == set(CALLS)


def test_compiled_blocks_share_graphs_around_the_faster_kernels(faster_kernels):
    """Whatever the number of documents and the longest of them."""
    counter, (model, eager) = CompileCounter(), models()
    model.compile(backend=counter)
    assert_same(model, eager, [*ragged_batches(24), *PACKS], logits=1e-5, gradient=1e-5)
    assert counter.frame_count == 1
    assert_same(model, eager, FULL, logits=1e-5, gradient=1e-5)
    assert counter.frame_count == 2 and not counters["graph_break"]


@pytest.fixture
def kernel_of_torch(monkeypatch):
    """Blocks run torch's own FlashAttention, on tensors without data: no kernel is started, and its shapes are real."""
    monkeypatch.setattr(attention_neobert, "has_varlen_kernel", lambda *arguments: True)
    monkeypatch.setattr(attention_neobert, "find_faster_kernel", lambda *arguments: None)
    # Asked about the device of the tensors, it knows no `meta`.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *arguments: False)
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_compiled_blocks_share_a_graph_around_the_kernel_of_torch(kernel_of_torch, training):
    """Whatever the number of tokens, of documents, and the longest of them; whole rows have a graph of their own.

    A single document first would cost one more: torch takes sizes that are equal then for one size.
    """
    counter = CompileCounterWithBackend("eager")
    with torch.device("meta"):
        config = small_config(num_hidden_layers=3)
        model = NeoBERTForMaskedLM._from_config(config, dtype=torch.bfloat16).train(training)
    model.base_model.check_values = False  # There are none.
    model.compile(backend=counter)

    def run(rows: int, length: int, **packed) -> None:
        with torch.set_grad_enabled(training):
            logits = model(torch.empty(rows, length, dtype=torch.long, device="meta"), **packed).logits
        assert logits.shape == (rows, length, 100)
        if training:
            logits.float().sum().backward()

    for tokens, documents, longest in ((48, 5, 20), (33, 1, 33), (7, 7, 1), (100, 9, 31), (64, 2, 40)):
        offsets = torch.empty(documents + 1, dtype=torch.int32, device="meta")
        run(1, tokens, cu_seq_lens_q=offsets, max_length_q=longest)
    assert counter.frame_count == 1
    assert any("varlen_attn" in str(node.target) for node in counter.graphs[0].graph.nodes)
    for rows, length in ((3, 10), (2, 17)):
        run(rows, length)
    assert counter.frame_count == 2 and not counters["graph_break"]


def test_gradients_go_through_the_kernel_of_torch(monkeypatch):
    """With offsets on the device, (1, heads, tokens, dim_head)."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    lengths, generator = [3, 7, 1], torch.Generator().manual_seed(0)
    states = [torch.randn(1, 2, sum(lengths), 16, generator=generator).requires_grad_() for _ in range(3)]
    offsets = PretendTensor(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))
    output, _ = sdpa_attention_forward(None, *states, None, scaling=16**-0.5, cu_seq_lens_q=offsets, max_length_q=7)
    expected = attend_to_documents(*states, torch.tensor([0, *lengths]).cumsum(0), 16**-0.5)
    wanted = torch.randn(output.shape, generator=generator)
    pairs = zip(
        (output, *torch.autograd.grad(output, states, wanted)),
        (expected, *torch.autograd.grad(expected, states, wanted)),
    )
    for left, right in pairs:
        torch.testing.assert_close(left, right, atol=2e-6, rtol=1e-6)
