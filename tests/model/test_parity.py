"""Every backend x layout x dtype gives the numbers of the plain implementation and of the original code."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from neobert_hf.modeling_neobert import NeoBERTSwiGLU
from tests.helpers.models import CPU_BACKENDS, packed_batch, positions_of, ragged_batch, small_model
from tests.helpers.plain_neobert import plain_hidden_states


ABLATION = {"rope": False, "rms_norm": False, "hidden_act": "gelu"}


def max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    assert left.shape == right.shape
    return (left.float() - right.float()).abs().max().item()


def expected_states(model, documents, positions=None) -> list[torch.Tensor]:
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    positions = positions or [None] * len(documents)
    return [plain_hidden_states(state, model.config, ids, where) for ids, where in zip(documents, positions)]


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, ABLATION], ids=["published", "ablation"])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("side", ["right", "left", "interior"])
def test_padded(backend, side, changes):
    model = small_model(attn_implementation=backend, **changes)
    ids, mask = ragged_batch(side=side)
    states = model(ids, attention_mask=mask).last_hidden_state
    kept = [mask[row].nonzero().squeeze(1) for row in range(len(ids))]
    # A token masked out in the middle keeps its place under RoPE; absolute positions count real tokens (original).
    positions = [columns - columns[0] for columns in kept] if model.config.rope else None
    expected = expected_states(model, [ids[row, columns] for row, columns in enumerate(kept)], positions)
    for row, columns in enumerate(kept):
        assert max_difference(states[row, columns], expected[row]) <= 1e-5
    assert (states[mask == 0] == 0).all(), "padding must be zero on every backend"


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, ABLATION], ids=["published", "ablation"])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids", "both"])
def test_packed(backend, form, changes):
    model = small_model(attn_implementation=backend, **changes)
    lengths = (13, 7, 1, 10)
    ids, packed = packed_batch(lengths)
    kwargs = {} if form == "position_ids" else packed
    if form != "cu_seq_lens":
        kwargs = kwargs | {"position_ids": positions_of(lengths)}
    states = model(ids, **kwargs).last_hidden_state
    expected = torch.cat(expected_states(model, ids[0].split(lengths)))
    assert max_difference(states[0], expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_packed_rows_with_padding(backend):
    """Several packed rows, padded on the right: restarting positions and a mask at once."""
    model = small_model(attn_implementation=backend)
    rows = [(5, 4, 3), (8, 1), (2, 2)]
    length = max(map(sum, rows))
    ids = torch.randint(1, 100, (len(rows), length))
    mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, lengths in enumerate(rows):
        mask[row, : sum(lengths)] = 1
        positions[row, : sum(lengths)] = positions_of(lengths)
    states = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    for row, lengths in enumerate(rows):
        expected = torch.cat(expected_states(model, ids[row, : sum(lengths)].split(lengths)))
        assert max_difference(states[row, : sum(lengths)], expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("layout", ["dense", "padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend, layout, dtype):
    """Against float32 with the same (rounded) weights: cosine >= 0.999, what 8 bits of mantissa leave on 2 layers."""
    model = small_model(attn_implementation=backend, embedding_init_range=0.5).to(dtype)
    lengths = (13, 7, 1, 10)
    if layout == "packed":
        ids, kwargs = packed_batch(lengths)
        documents, states = ids[0].split(lengths), model(ids, **kwargs).last_hidden_state[0].split(lengths)
    else:
        ids, mask = ragged_batch((13,) * 4 if layout == "dense" else lengths)
        output = model(ids, attention_mask=mask).last_hidden_state
        documents, states = zip(*[(ids[row, :n], output[row, :n]) for row, n in enumerate(mask.sum(1).tolist())])
    for got, expected in zip(states, expected_states(model, documents)):
        assert got.dtype == dtype
        assert torch.cosine_similarity(got.float(), expected).min() >= 0.999


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("variant", ["published", "layernorm_abs"])
def test_original_outputs(shared, variant, backend):
    """The recorded float32 outputs of the original code; measured maximum 2.4e-6."""
    folder = shared / "reference" / variant
    recorded = load_file(folder / "expected.safetensors")
    ids, mask = recorded["input_ids"], recorded["attention_mask"]
    real, lengths = mask.bool(), mask.sum(1).tolist()
    mlm = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=backend)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        folder / "sequence_classification", attn_implementation=backend
    )
    outputs = mlm(ids, attention_mask=mask, output_hidden_states=True)
    assert max_difference(outputs.hidden_states[-1][real], recorded["last_hidden_state"][real]) <= 1e-5
    assert max_difference(outputs.logits[real], recorded["logits"][real]) <= 1e-5
    scores = classifier(ids, attention_mask=mask).logits
    assert max_difference(scores, recorded["classification_logits"]) <= 1e-5

    packed_ids = ids[real].unsqueeze(0)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    for kwargs in ({"cu_seq_lens_q": offsets}, {"position_ids": positions_of(lengths)}):
        assert max_difference(mlm(packed_ids, **kwargs).logits[0], recorded["logits"][real]) <= 1e-5
    scores = classifier(packed_ids, cu_seq_lens_q=offsets).logits
    assert max_difference(scores, recorded["classification_logits"]) <= 1e-5
    dense = mlm(ids[:1])
    assert max_difference(dense.logits[0], recorded["logits"][0]) <= 1e-5


@pytest.mark.parametrize("changes", [{}, ABLATION], ids=["published", "ablation"])
def test_gradients_of_padded_and_unpadded_paths_are_equal(changes):
    """`eager` keeps the padding, `sdpa` strips it; measured relative difference 2e-6."""
    ids, mask = ragged_batch(side="left")
    weights = torch.randn(*ids.shape, 64)
    gradients = {}
    for backend in ("eager", "sdpa"):
        model = small_model(attn_implementation=backend, embedding_init_range=0.3, **changes).train()
        states = model(ids, attention_mask=mask).last_hidden_state
        (states * weights).sum().backward()
        gradients[backend] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients["eager"]) == set(gradients["sdpa"]) == {name for name, _ in model.named_parameters()}
    for name, expected in gradients["eager"].items():
        scale = expected.abs().max().clamp(min=1)
        assert ((gradients["sdpa"][name] - expected).abs().max() / scale) <= 1e-5, name


@pytest.mark.parametrize("changes", [{}, {"rms_norm": False}, ABLATION], ids=["published", "layer_norm", "ablation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
def test_fewer_passes_give_the_numbers_of_training(dtype, mode, changes, padded):
    """Without gradients float32 is computed in other steps. With them, documents attend in float32 on a CPU."""
    model = small_model(**changes)
    tolerance = 5e-6 if dtype == torch.float32 and not changes else 0.0
    model.to(dtype if isinstance(dtype, torch.dtype) else torch.float32)
    ids, mask = ragged_batch(side="right")
    if not padded:
        ids, mask = ids[:, :3], None
    elif dtype != torch.float32:
        tolerance = 2**-5  # four steps of bfloat16 at the largest states, which are between 1 and 2
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        expected = model(ids, attention_mask=mask, output_hidden_states=True)
        with mode():
            got = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(got.hidden_states) == model.config.num_hidden_layers + 1
    for state, other in zip(got.hidden_states, expected.hidden_states):
        assert state.dtype == other.dtype and max_difference(state, other) <= tolerance


def kernels(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, int]:
    """How often one forward pass called each."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(ids)
    return {event.key: event.count for event in profile.key_averages()}


@torch.no_grad()
def test_passes_are_spared():
    """In each of two layers SiLU and the last sum; not in one with a hook inside, whose neighbour's stay."""
    model = small_model()
    ids, _ = packed_batch((20,))
    spared = ("aten::silu_", "aten::addmm_")
    assert [kernels(model, ids).get(name) for name in spared] == [2, 2]
    handle = model.transformer_encoder[1].register_forward_hook(lambda *_: None)
    assert [kernels(model, ids).get(name) for name in spared] == [2, 2]
    handle.remove()
    for layer in ("qkv", "wo", "dropout", "ffn", "ffn.w12", "ffn.w3", "attention_norm", "ffn_norm"):
        handle = model.transformer_encoder[1].get_submodule(layer).register_forward_pre_hook(lambda *_: None)
        assert [kernels(model, ids).get(name) for name in spared] == [1, 1], layer
        handle.remove()
    with torch.enable_grad():
        assert not set(spared) & set(kernels(model, ids))


PARTS = "qkv wo ffn ffn.w12 ffn.w3 dropout attention_norm ffn_norm everywhere".split()
MLP_PARTS = "wo ffn ffn.0 ffn.1 ffn.2".split()


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("part, changes", [*((part, {}) for part in PARTS), *((part, ABLATION) for part in MLP_PARTS)])
def test_what_a_hook_keeps_is_not_overwritten(part, changes, once):
    """Inputs and outputs, kept without a copy, are those of training; also if the hook is there for one call only."""
    model = small_model(**changes)
    ids, _ = packed_batch((20,))

    def record() -> list[torch.Tensor]:
        kept = []

        def keep(module, inputs, output):
            kept.extend(x for x in (*inputs, output) if isinstance(x, torch.Tensor))
            if once and part != "everywhere":
                handle.remove()

        if part == "everywhere":
            handle = torch.nn.modules.module.register_module_forward_hook(keep)
        else:
            handle = model.transformer_encoder[1].get_submodule(part).register_forward_hook(keep)
        model(ids)
        handle.remove()
        return kept

    expected = record()
    with torch.no_grad():
        got = record()
    assert len(got) >= 2
    for tensor, other in zip(got, expected, strict=True):
        assert max_difference(tensor, other) <= 1e-5


class Stored(torch.nn.Module):
    """Puts out a tensor that it keeps."""

    def __init__(self, output: torch.Tensor):
        super().__init__()
        self.output = output

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output


@torch.no_grad()
@pytest.mark.parametrize("how", ["module", "forward"])
@pytest.mark.parametrize("part", ["qkv", "wo", "ffn", "ffn.w12", "ffn.w3"])
def test_what_somebody_elses_module_puts_out_is_not_overwritten(part, how):
    model = small_model()
    ids, _ = packed_batch((20,))
    block = model.transformer_encoder[1]
    widths = {"qkv": 3 * model.config.hidden_size, "ffn.w12": block.ffn.w12.out_features}
    stored = torch.randn(1, 20, widths.get(part, model.config.hidden_size))
    before = stored.clone()
    if how == "module":
        block.set_submodule(part, Stored(stored))
    else:
        # As Accelerate's `add_hook_to_module` does.
        block.get_submodule(part).forward = lambda _: stored
    first, second = (model(ids).last_hidden_state for _ in range(2))
    assert torch.equal(stored, before) and torch.equal(first, second)
    with torch.enable_grad():
        assert max_difference(model(ids).last_hidden_state, first) <= 5e-6


@torch.no_grad()
@pytest.mark.parametrize("when", ["forward", "forward_pre"])
def test_hooks_on_every_module_are_called(when):
    model, called = small_model(), []
    ids, _ = packed_batch((20,))
    register = getattr(torch.nn.modules.module, f"register_module_{when}_hook")
    handle = register(lambda module, *_: called.append(module))
    model(ids)
    handle.remove()
    assert set(called) == set(model.modules()) - {model.transformer_encoder}


class Wrapped(torch.nn.Module):
    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


@torch.no_grad()
def test_a_block_inside_another_module():
    model = small_model()
    ids, _ = packed_batch((20,))
    expected = model(ids).last_hidden_state
    model.transformer_encoder[1] = Wrapped(model.transformer_encoder[1])
    assert max_difference(model(ids).last_hidden_state, expected) <= 5e-6


@torch.no_grad()
@pytest.mark.parametrize("part", ["qkv", "wo", "ffn.w12", "ffn.w3"])
def test_an_added_bias_counts(part):
    model = small_model()
    ids, _ = packed_batch((20,))
    before = model(ids).last_hidden_state
    layer = model.transformer_encoder[1].get_submodule(part)
    layer.bias = torch.nn.Parameter(torch.ones(layer.out_features))
    with torch.enable_grad():
        expected = model(ids).last_hidden_state
    assert max_difference(model(ids).last_hidden_state, expected) <= 5e-6 and max_difference(before, expected) > 1e-3


class Quantised(torch.Tensor):
    """A weight that knows the linear layer, and no transposition."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.t:
            raise TypeError("no transposition")
        return super().__torch_function__(function, types, args, kwargs or {})


@torch.no_grad()
def test_a_weight_of_another_kind_is_left_to_its_module():
    model = small_model()
    ids, _ = packed_batch((20,))
    expected = model(ids).last_hidden_state
    layer = model.transformer_encoder[1].ffn.w3
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Quantised), requires_grad=False)
    assert max_difference(model(ids).last_hidden_state, expected) <= 5e-6


@torch.no_grad()
@pytest.mark.parametrize("owner, name", [(torch.nn.Linear, "forward"), (NeoBERTSwiGLU, "forward"), (F, "linear")])
def test_what_is_replaced_in_the_whole_program_is_called(owner, name, monkeypatch):
    """As with gradients, where every module computes as it is written."""
    model, calls = small_model(), []
    ids, _ = packed_batch((20,))
    written = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: calls.append(1) or written(*arguments))
    model(ids)
    without = len(calls)
    with torch.enable_grad():
        model(ids)
    assert without and len(calls) == 2 * without


@torch.no_grad()
def test_dropout_that_is_left_on_drops():
    """Monte Carlo dropout: the model in evaluation, its dropout in training."""
    model = small_model(dropout=0.5)
    ids, _ = packed_batch((20,))
    assert torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)
    for module in model.modules():
        module.training = isinstance(module, torch.nn.Dropout)
    assert not torch.allclose(model(ids).last_hidden_state, model(ids).last_hidden_state)


SIZES = {
    # The recorded checkpoints' size, and the published one. Rounding to bfloat16 alone (measured on a CPU, where it is
    # the same arithmetic without the kernel) leaves 0.99996 and 0.99986.
    "small": (dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=384), 0.9999),
    "published": (dict(hidden_size=768, num_hidden_layers=28, num_attention_heads=12, intermediate_size=3072), 0.9995),
}


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("size", SIZES)
def test_gpu_varlen_kernel(layout, size):
    """bfloat16 FlashAttention inside torch against float32 on the CPU."""
    sizes, cosine = SIZES[size]
    model = small_model(embedding_init_range=0.02, decoder_init_range=0.02, max_length=4096, **sizes)
    lengths = (300, 17, 1, 512)
    ids, rest = ragged_batch(lengths) if layout == "padded" else packed_batch(lengths)
    kwargs = {"attention_mask": rest} if layout == "padded" else rest
    expected = model(ids, **kwargs).last_hidden_state
    on_gpu = {key: x.cuda() if torch.is_tensor(x) else x for key, x in kwargs.items()}
    got = model.to("cuda", torch.bfloat16)(ids.cuda(), **on_gpu).last_hidden_state.float().cpu()
    real = rest.bool() if layout == "padded" else torch.ones_like(ids, dtype=torch.bool)
    assert torch.cosine_similarity(got[real], expected[real], dim=-1).min() >= cosine


@pytest.mark.gpu
def test_gpu_gradients_and_leaks():
    """The kernel's backward pass against one SDPA call a document, and its documents kept apart to the bit."""
    lengths = (300, 17, 1, 512)
    ids, packed = packed_batch(lengths)
    packed = {key: x.cuda() if torch.is_tensor(x) else x for key, x in packed.items()}
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        model = small_model(embedding_init_range=0.3, max_length=4096).to("cuda", dtype)
        states = model(ids.cuda(), **packed).last_hidden_state
        states.float().square().mean().backward()
        gradients.append(model.transformer_encoder[0].qkv.weight.grad.float().flatten())
        other = ids.clone()
        other[0, 300:317] += 1
        with torch.no_grad():
            changed = model(other.cuda() % 100, **packed).last_hidden_state
        assert torch.equal(changed[0, :300], states[0, :300]) and torch.equal(changed[0, 317:], states[0, 317:])
    assert torch.cosine_similarity(*gradients, dim=0) >= 0.999
