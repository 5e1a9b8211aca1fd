"""Promise 6: blocks that are compiled one by one, as training on GPUs does it, are compiled once for all lengths."""

import copy

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.utils import counters
from torch.nn import functional as F

from neobert_hf import NeoBERTForMaskedLM, modeling_neobert
from tests.helpers.models import batch_of, small_model


# Ragged batches of different numbers of rows, by turns padded and packed.
BATCHES = [
    ("right", (13, 7, 1, 10)),
    ("cu_seq_lens", (5, 20, 3)),
    ("left", (30, 2)),
    ("packed rows", (4, 9, 6)),
    ("position_ids", (8, 8, 2, 11, 3)),
    ("right", (3, 40, 17, 22, 9, 12)),
]


def documents(cu_seq_lens, *states):
    """The documents, (heads, length, dim_head), of states (tokens, heads, dim_head)."""
    return zip(*(each.transpose(0, 1).split(cu_seq_lens.diff().tolist(), dim=1) for each in states))


@torch.library.custom_op("neobert_tests::varlen", mutates_args=())
def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor, longest: int
) -> torch.Tensor:
    """A stand-in for the kernel of a GPU, which is one node of the graph."""
    attended = [F.scaled_dot_product_attention(*states) for states in documents(cu_seq_lens, query, key, value)]
    return torch.cat(attended, dim=1).transpose(0, 1).contiguous()


@torch.library.custom_op("neobert_tests::varlen_backward", mutates_args=())
def varlen_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found, scaling = [], query.shape[-1] ** -0.5
    for of_output, q, k, v in documents(cu_seq_lens, gradient, query, key, value):
        weights = (q @ k.mT * scaling).softmax(-1)
        of_weights = of_output @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scaling
        found.append((of_scores @ k, of_scores.mT @ q, weights.mT @ of_output))
    return tuple(torch.cat(states, dim=1).transpose(0, 1).contiguous() for states in zip(*found))


varlen.register_fake(lambda query, key, value, cu_seq_lens, longest: torch.empty_like(query))
varlen_backward.register_fake(
    lambda gradient, query, key, value, cu_seq_lens: tuple(map(torch.empty_like, (query, key, value)))
)
varlen.register_autograd(
    lambda ctx, gradient: (*varlen_backward(gradient, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:4]),
)


@pytest.fixture(params=["a call for each document", "the kernel of a GPU"])
def breaks(request, monkeypatch) -> int:
    """Attention as on a CPU, or with the stand-in; the breaks in the graph of a block."""
    if request.param == "a call for each document":
        return 1
    monkeypatch.setattr(modeling_neobert, "has_varlen_kernel", lambda query, dropout: True)
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn",
        lambda query, key, value, offsets, same, longest, longest_too: varlen(query, key, value, offsets, longest),
    )
    return 0


def graphs_of_batches(plain, training: bool, backend: str, tolerance: float) -> list[int]:
    """How many graphs there are after each batch; outputs and gradients are those of the plain model.

    Args:
        tolerance: of the norm of a difference, as a share of the norm.
    """

    def near(found, expected) -> bool:
        return (found - expected).norm() <= tolerance * expected.norm() + 1e-6

    torch.compiler.reset()
    compiled = compile_regions(copy.deepcopy(plain), backend=backend, dynamic=True)
    counters.clear()
    graphs = []
    for layout, lengths in BATCHES:
        ids, arguments, _ = batch_of(layout, lengths)
        inputs = {"input_ids": ids, "labels": ids, **arguments}
        inputs = {name: each.to(plain.device) if torch.is_tensor(each) else each for name, each in inputs.items()}
        with torch.set_grad_enabled(training):
            found, expected = (model(**inputs) for model in (compiled, plain))
        assert near(found.logits, expected.logits)
        if training:
            found.loss.backward()
            expected.loss.backward()
            for parameter, same in zip(compiled.parameters(), plain.parameters()):
                assert near(parameter.grad, same.grad)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.parametrize("training", [False, True])
def test_blocks_are_compiled_once(training, breaks):
    plain = small_model(NeoBERTForMaskedLM, sparse_prediction=True).train(training)
    # Without code generation: what is tested are the graphs.
    graphs = graphs_of_batches(plain, training, "aot_eager", tolerance=1e-5)
    # A single row is another graph of the embeddings than several.
    assert graphs[1] == graphs[-1] > 0
    assert len(counters["graph_break"]) == breaks


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_blocks_are_compiled_once_on_a_gpu(training):
    """With the kernel itself, whose block is one graph, and generated code; in 16 bits."""
    plain = small_model(NeoBERTForMaskedLM, sparse_prediction=True).to("cuda", torch.bfloat16).train(training)
    graphs = graphs_of_batches(plain, training, "inductor", tolerance=0.05)
    assert graphs[1] == graphs[-1] > 0 and not counters["graph_break"]
