"""The steps of a block with backward passes of their own, against the same formulas left to autograd."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.gradients_neobert import NeoBERTRMSNorm, is_eager_on_cpu, split_and_rotate, swiglu
from neobert_hf.rotary_neobert import rotary_table
from tests.helpers.models import packed_batch, small_model


CONFIG = NeoBERTConfig(hidden_size=32, num_attention_heads=4)
TABLE = rotary_table(CONFIG, torch.arange(5)[None], 5)


def plain_swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up,)


def plain_rotation(qkv):
    """Pairs of queries and keys as complex numbers, written out."""
    cos, sin = TABLE.unbind(-1)
    x0, x1 = qkv[..., :2, :].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2).to(qkv.dtype)
    return *rotated.unbind(-2), qkv[..., 2, :]


def plain_norm(states, weight):
    return (states * (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight,)


def own_norm(states, weight):
    norm = NeoBERTRMSNorm(32, eps=1e-5)
    return (torch.func.functional_call(norm, {"weight": weight}, states),)


# Of each step: this file's function, the plain formula, and the shapes of what it is given.
STEPS = {
    "swiglu": (lambda states: (swiglu(states),), plain_swiglu, [(2, 5, 48)]),
    "rotation": (lambda qkv: split_and_rotate(qkv, TABLE), plain_rotation, [(2, 5, 4, 3, 8)]),
    "norm": (own_norm, plain_norm, [(2, 5, 32), (32,)]),
}


def random_inputs(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_outputs_and_gradients_are_those_of_the_formula(step, strided):
    """Also of gradients that come back with their dimensions in another order, as those of attention do."""
    own, plain, shapes = STEPS[step]
    inputs = random_inputs(shapes)
    outputs, expected = own(*inputs), plain(*inputs)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(output.shape, generator=generator) for output in outputs]
    if strided:
        gradients = [part.transpose(0, -1).contiguous().transpose(0, -1) for part in gradients]
    found = torch.autograd.grad(outputs, inputs, gradients)
    wanted = torch.autograd.grad(expected, inputs, gradients)
    for left, right in zip((*outputs, *found), (*expected, *wanted)):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("step", ["swiglu", "rotation"])
def test_in_bfloat16_they_round_as_autograd_does(step):
    own, plain, shapes = STEPS[step]
    inputs = random_inputs(shapes, torch.bfloat16)
    outputs, expected = own(*inputs), plain(*inputs)
    gradients = [torch.ones_like(output) for output in outputs]
    found = torch.autograd.grad(outputs, inputs, gradients)
    wanted = torch.autograd.grad(expected, inputs, gradients)
    for left, right in zip((*outputs, *found), (*expected, *wanted)):
        assert left.dtype == torch.bfloat16
        # A step of bfloat16 at 4 is 2 ** -6.
        torch.testing.assert_close(left, right, atol=2**-6, rtol=2**-7)


@pytest.mark.parametrize("step, frozen", [*((step, None) for step in STEPS), ("norm", 0), ("norm", 1)])
def test_gradients_of_gradients(step, frozen):
    """What penalties on gradients differentiate, also where the states or a weight need no gradient."""
    own, plain, shapes = STEPS[step]
    given = random_inputs(shapes)

    def penalty_gradients(function):
        inputs = given if frozen is None else [*given[:frozen], given[frozen].detach(), *given[frozen + 1 :]]
        inputs_with = [part for part in inputs if part.requires_grad]
        outputs = function(*inputs)
        total = sum(output.pow(3).sum() for output in outputs)
        gradients = torch.autograd.grad(total, inputs_with, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in gradients), inputs_with)

    for left, right in zip(penalty_gradients(own), penalty_gradients(plain)):
        assert (left - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("step", STEPS)
def test_transforms_of_functions_get_the_formula(step):
    own, plain, shapes = STEPS[step]
    inputs = [part.detach() for part in random_inputs(shapes)]

    def gradients(function):
        return torch.func.grad(lambda *states: sum(part.square().sum() for part in function(*states)))(*inputs)

    torch.testing.assert_close(gradients(own), gradients(plain), atol=2e-6, rtol=1e-6)


def test_gradients_of_each_row_by_vmap():
    """As Opacus and influence functions take them; nobody can read the numbers of the batch then."""
    model = small_model(NeoBERTForMaskedLM)
    ids = torch.randint(1, 100, (3, 12))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, row, label):
        return torch.func.functional_call(model, weights, (row[None],), {"labels": label[None]}).loss

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, ids, ids)
    for row in range(3):
        expected = torch.func.grad(loss)(weights, ids[row], ids[row])
        for name, gradient in expected.items():
            assert torch.allclose(found[name][row], gradient, atol=1e-6), name


@pytest.mark.parametrize("step", STEPS)
def test_many_gradients_at_once_and_forward_gradients(step):
    own, plain, shapes = STEPS[step]
    inputs = random_inputs(shapes)
    outputs = own(*inputs)
    batches = [torch.stack([torch.ones_like(output), output.detach()]) for output in outputs]
    batched = torch.autograd.grad(outputs, inputs, batches, is_grads_batched=True)
    for number in range(2):
        wanted = torch.autograd.grad(plain(*inputs), inputs, [part[number] for part in batches])
        torch.testing.assert_close([part[number] for part in batched], list(wanted), atol=2e-6, rtol=1e-6)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(part.detach(), torch.ones_like(part)) for part in inputs]
        tangents = [[forward_ad.unpack_dual(part).tangent for part in function(*duals)] for function in (own, plain)]
    torch.testing.assert_close(*tangents, atol=2e-6, rtol=1e-6)


def test_a_backward_pass_inside_autocast_stays_in_float32():
    own, plain, shapes = STEPS["norm"]
    inputs = random_inputs(shapes)
    wanted = torch.autograd.grad(plain(*inputs)[0].square().sum(), inputs)
    output = own(*inputs)[0].square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(output, inputs)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-6)


def test_a_training_step_takes_them_and_compilers_do_not():
    model = small_model()
    ids, _ = packed_batch((20,))
    output = model(ids).last_hidden_state
    assert "RMSNormOnCPUBackward" in output.grad_fn.name()

    def seen(states):
        assert torch.compiler.is_compiling() != is_eager_on_cpu(states)
        return states * 2

    seen(torch.ones(2))
    torch.compile(seen, backend="eager", fullgraph=True)(torch.ones(2))
