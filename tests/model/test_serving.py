"""vLLM's Transformers backend, up to its attention: what it gives a model, and what it needs of one.

vLLM is not installed here. A stand-in takes the place of its attention function, with the same signature, shapes and
conventions (vllm/model_executor/models/transformers/__init__.py): it gets one row of tokens, finds what it keeps for a
layer in `attention_instances`, and gives back (tokens, hidden_size).
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert_hf import NeoBERTModel
from tests.helpers.models import packed_batch, positions_of, small_config, small_model
from tests.helpers.pretend_cuda import model_on_device, on_device, pretend_cuda


LENGTHS = (13, 7, 1, 10)
IDS, PACKED = packed_batch(LENGTHS)
POSITIONS = positions_of(LENGTHS)


class LayerAttention:
    """What vLLM keeps for a layer. It knows the texts from elsewhere: here, from the mask that it is made with."""

    def __init__(self, lengths=LENGTHS):
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.same_text = numbers[:, None] == numbers
        self.calls = 0

    def __call__(self, query, key, value, scale: float, head_dim: int) -> torch.Tensor:
        self.calls += 1
        states = (part.view(len(part), -1, head_dim).transpose(0, 1) for part in (query, key, value))
        mask = self.same_text.to(query.device)
        return F.scaled_dot_product_attention(*states, mask, scale=scale).transpose(0, 1).flatten(1)


def stand_in(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    assert attention_mask is None and not module.is_causal and kwargs.get("marker") == "server"
    head_dim, tokens = query.shape[-1], query.shape[-2]
    states = (part.transpose(1, 2).reshape(tokens, -1) for part in (query, key, value))
    return attention_instances[module.layer_idx](*states, scaling, head_dim), None


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Without a mask function, as vLLM registers it."""
    assert "vllm" not in ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", stand_in)


def served_model(**changes) -> NeoBERTModel:
    """As vLLM makes one: the implementation is set on the config, the class found by `AutoModel`."""
    config = small_config(**changes)
    config._attn_implementation = "vllm"
    model = AutoModel.from_config(config).eval()
    model.load_state_dict(small_model(**changes).state_dict())
    return model


def serve(model, instances, **changes):
    """The arguments with which vLLM calls a model."""
    given = {"input_ids": IDS, "inputs_embeds": None, "position_ids": POSITIONS, "marker": "server"}
    return model(**given | changes, use_cache=False, attention_instances=instances, return_dict=False)


def new_instances(layers: int = 2) -> dict[int, LayerAttention]:
    return {number: LayerAttention() for number in range(layers)}


@pytest.mark.parametrize(
    "changes",
    [{}, {"hidden_act": "gelu", "rms_norm": False}, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}],
)
@torch.no_grad()
def test_a_served_row_is_a_packed_one(changes):
    instances = new_instances()
    got = serve(served_model(**changes), instances)
    expected = small_model(**changes)(IDS, **PACKED).last_hidden_state
    assert isinstance(got, tuple) and (got[0] - expected).abs().max() <= 1e-5
    assert [instance.calls for instance in instances.values()] == [1, 1]


def test_gradients_are_those_of_a_packed_row():
    model, plain = served_model(), small_model()
    serve(model, new_instances())[0].square().mean().backward()
    plain(IDS, **PACKED).last_hidden_state.square().mean().backward()
    for left, right in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(left.grad, right.grad, atol=1e-6)


@torch.no_grad()
def test_rows_of_zeros_are_no_documents():
    """What a server warms up with: positions that would be documents of one token each, or nothing at all."""
    output = serve(served_model(), new_instances(), input_ids=IDS * 0, position_ids=POSITIONS * 0)[0]
    assert output.shape == (1, 31, 64) and output.isfinite().all()


@torch.no_grad()
def test_no_value_is_read(monkeypatch):
    """A server records graphs: not even the checks may make the host wait."""
    with pretend_cuda(monkeypatch) as device:
        there = model_on_device(served_model())
        device.reads.clear()
        got = serve(there, new_instances(), **on_device({"input_ids": IDS, "position_ids": POSITIONS}))[0]
        assert not device.reads, device.reads
        assert (got.host - small_model()(IDS, **PACKED).last_hidden_state).abs().max() <= 1e-5


@torch.no_grad()
def test_one_graph_for_rows_of_all_sizes():
    """vLLM compiles the class of `get_decoder()`, whole, with the dimension of tokens left open."""
    torch.compiler.reset()
    model = served_model()
    assert model.get_decoder() is model
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for lengths in (LENGTHS, (5, 20), (3, 3, 3)):
        ids, packed = packed_batch(lengths)
        instances = {number: LayerAttention(lengths) for number in range(2)}
        got = serve(compiled, instances, input_ids=ids, position_ids=positions_of(lengths))[0]
        assert (got - small_model()(ids, **packed).last_hidden_state).abs().max() <= 1e-5
    assert len(graphs) == 1


class MissingLayer(nn.Identity):
    """What vLLM puts in place of modules of another stage: the first argument, whatever else comes."""

    def forward(self, *args, **kwargs):
        return args[0] if args else next(iter(kwargs.values()))


@torch.no_grad()
def test_stages_of_a_pipeline():
    """Divided by the plan: what is named before the list of blocks is the first stage's, what behind it the last's."""
    first, last = served_model(), served_model()
    names = list(first._pp_plan)
    assert [isinstance(first.get_submodule(name), nn.ModuleList) for name in names] == [False, True, False]
    assert {name for name, _ in first.named_children()} == set(names)
    before, blocks, behind = names
    setattr(first, behind, MissingLayer())
    setattr(last, before, MissingLayer())
    first.get_submodule(blocks)[1] = MissingLayer()
    last.get_submodule(blocks)[0] = MissingLayer()
    instances = new_instances()
    between = serve(first, instances)[0]
    got = serve(last, instances, input_ids=None, inputs_embeds=between)[0]
    assert (got - small_model()(IDS, **PACKED).last_hidden_state).abs().max() <= 1e-5
    assert [instance.calls for instance in instances.values()] == [1, 1]


def test_the_model_can_be_made_without_weights():
    config = small_config()
    config._attn_implementation = "vllm"
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert {weight.device.type for weight in model.parameters()} == {"meta"} and not list(model.buffers())
    assert [block.layer_idx for block in model.transformer_encoder] == [0, 1]
    # By this vLLM knows an encoder, and by that what it may replace.
    assert any(not getattr(module, "is_causal", True) for module in model.modules())
    assert model._supports_attention_backend and model.tp_plan and model.supports_pp_plan


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"position_ids": None}, "no `position_ids`. It takes one row"),
        ({"attention_mask": torch.ones_like(IDS)}, "`attention_mask` and its"),
        ({"input_ids": IDS.expand(2, -1)}, r"shape \(2, 31\)"),
        (PACKED, "`cu_seq_lens_q` and its"),
        ({"output_attentions": True}, "'vllm' returns no weights"),
    ],
)
def test_what_a_server_cannot_mean_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        serve(served_model(), new_instances(), **arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope": False}, "Serve a model with RoPE"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "which a server does not report"),
    ],
)
def test_models_whose_numbers_would_be_wrong_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        serve(served_model(**changes), new_instances())


def test_other_backends_take_no_arguments_of_a_server():
    with pytest.raises(TypeError, match="has no argument `attention_instances`, `marker`"):
        serve(small_model(), new_instances())
