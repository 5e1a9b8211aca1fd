"""The model on a GPU: every backend x layout x dtype, documents kept apart, gradients, recorded outputs, compilation.

Each test but that of compilation runs on the CPU as well, so that it is known to pass before a GPU is at hand. What is
expected are always the numbers of the plain implementation on the CPU, in float32.
"""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM
from transformers.modeling_flash_attention_utils import (
    FLASH_ATTENTION_COMPATIBILITY_MATRIX,
    FLASH_ATTN_KERNEL_FALLBACK,
    lazy_import_flash_attention,
)
from transformers.utils import is_kernels_available
from transformers.utils.generic import is_flash_attention_requested

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model
from tests.helpers.plain_neobert import plain_hidden_states


# Packages by their names in Transformers, and the kernels of the Hub in their place.
FLASH = [f"flash_attention_{version}" for version in (3, 4, 2)]
BACKENDS = ["sdpa", *FLASH, *(FLASH_ATTN_KERNEL_FALLBACK[name] for name in FLASH), "eager"]
PLACES = [("cpu", "sdpa"), ("cpu", "eager"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in BACKENDS)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# Heads of 64, as published; kernels for GPUs differ by it.
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192, "max_length": 512}
LENGTHS = (130, 17, 1, 64)


def model_on(device: str, dtype: torch.dtype, backend: str = "sdpa", **changes):
    """A small model; the test is skipped where there is no such backend."""
    if is_flash_attention_requested(requested_attention_implementation=backend):
        if dtype == torch.float32 or not is_there(backend):
            pytest.skip(f"{backend} takes 16 bits, and it must be installed, or come from the Hub")
    options = SIZES | {"embedding_init_range": 0.5, "attn_implementation": backend} | changes
    return small_model(**options).to(device, dtype)


@cache
def is_there(backend: str) -> bool:
    """Whether this package, or this kernel of the Hub, can be loaded and has kernels for this GPU."""
    if not torch.cuda.is_available():
        return False
    if "/" not in backend:
        found = FLASH_ATTENTION_COMPATIBILITY_MATRIX[int(backend[-1])]
        newest = torch.cuda.get_device_capability()[0] >= found.get("cuda_min_major_version", 8)
        return newest and found["general_availability_check"]()
    if not is_kernels_available():
        return False
    try:
        lazy_import_flash_attention(backend)
    except Exception:  # There is no network, or no kernel for this GPU and this torch.
        return False
    return True


def batch_of(layout: str) -> tuple[torch.Tensor, dict, list[torch.Tensor]]:
    """Ids, the other arguments, and for each document the places of its tokens in the flattened batch."""
    if layout == "packed":
        ids, kwargs = packed_batch(LENGTHS)
        return ids, kwargs, list(torch.arange(sum(LENGTHS)).split(LENGTHS))
    lengths, side = ((64,) * 4, "right") if layout == "full" else (LENGTHS, layout)
    ids, mask = ragged_batch(lengths, side)
    places = [row * ids.shape[1] + mask[row].nonzero().squeeze(1) for row in range(len(ids))]
    return ids, {} if layout == "full" else {"attention_mask": mask}, places


def states_of(model, ids: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """(tokens, hidden_size) on the CPU in float32, with the padding."""
    device = model.device
    kwargs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in kwargs.items()}
    return model(ids.to(device), **kwargs).last_hidden_state.flatten(0, 1).float().cpu()


def expected_of(model, ids: torch.Tensor, places: list[torch.Tensor]) -> list[torch.Tensor]:
    state = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    return [plain_hidden_states(state, model.config, ids.flatten()[where]) for where in places]


@torch.no_grad()
def check_numbers(model, layout: str) -> None:
    """Float32 to 1e-4, since a GPU adds in another order; 16 bits to a cosine of 0.999, as on a CPU."""
    ids, kwargs, places = batch_of(layout)
    found, expected = states_of(model, ids, kwargs), expected_of(model, ids, places)
    for where, states in zip(places, expected):
        if model.dtype == torch.float32:
            torch.testing.assert_close(found[where], states, rtol=0, atol=1e-4)
        else:
            assert torch.cosine_similarity(found[where], states).min() >= 0.999
    real = torch.zeros(len(found), dtype=torch.bool).index_fill(0, torch.cat(places), True)
    assert (found[~real] == 0).all(), "padding must be zero"


@torch.no_grad()
def check_documents(model, layout: str) -> None:
    """A changed document leaves the others the same to the bit."""
    ids, kwargs, places = batch_of(layout)
    other = ids.flatten().clone()
    other[places[1]] = (other[places[1]] + 1) % 100
    before, after = states_of(model, ids, kwargs), states_of(model, other.view_as(ids), kwargs)
    for number, where in enumerate(places):
        assert torch.equal(before[where], after[where]) == (number != 1), f"document {number}"


def check_gradients(model, layout: str) -> None:
    """Of every weight, by a loss that looks at each state in its own way."""
    model.train()
    ids, kwargs, places = batch_of(layout)
    order = torch.cat(places)
    wanted = torch.randn(len(order), SIZES["hidden_size"])
    states = {name: tensor.float().cpu().detach().requires_grad_() for name, tensor in model.state_dict().items()}
    documents = [plain_hidden_states(states, model.config, ids.flatten()[where]) for where in places]
    (torch.cat(documents) * wanted).sum().backward()
    (states_of(model, ids, kwargs)[order] * wanted).sum().backward()
    for name, parameter in model.named_parameters():
        found, expected = parameter.grad.float().cpu().flatten(), states[name].grad.flatten()
        assert torch.cosine_similarity(found, expected, dim=0) >= (0.99999 if model.dtype == torch.float32 else 0.99), (
            name
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "full", "right", "left"])
@pytest.mark.parametrize("device, backend", PLACES)
def test_numbers_are_those_of_the_plain_implementation(layout, dtype, backend, device):
    check_numbers(model_on(device, dtype, backend), layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "left"])
@pytest.mark.parametrize("device, backend", PLACES)
def test_a_changed_document_leaves_the_others_to_the_bit(layout, dtype, backend, device):
    check_documents(model_on(device, dtype, backend), layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "right"])
@pytest.mark.parametrize("device, backend", PLACES)
def test_gradients_are_those_of_the_plain_implementation(layout, dtype, backend, device):
    check_gradients(model_on(device, dtype, backend), layout)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["published", "layernorm_abs"])
@pytest.mark.parametrize("device, backend", PLACES)
def test_recorded_outputs_of_the_original_code(shared, variant, dtype, backend, device):
    model_on(device, dtype, backend)  # Skips what is not there.
    folder = shared / "reference" / variant
    recorded = load_file(folder / "expected.safetensors")
    ids, mask = recorded["input_ids"].to(device), recorded["attention_mask"].to(device)
    model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=backend, dtype=dtype).to(device)
    expected = recorded["logits"][recorded["attention_mask"].bool()]
    padded = model(ids, attention_mask=mask).logits[mask.bool()]
    real = ids[mask.bool()].unsqueeze(0)
    packed = model(real, position_ids=positions_of(recorded["attention_mask"].sum(1).tolist()).to(device)).logits[0]
    for found in (padded.float().cpu(), packed.float().cpu()):
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        else:
            assert torch.cosine_similarity(found, expected).min() >= 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_blocks_give_the_numbers_of_eager_ones(dtype, training):
    """Batches of every layout and of several shapes, one after the other: the loss of masked language modelling."""
    models = [model_on("cuda", dtype, cls=NeoBERTForMaskedLM, sparse_prediction=True).train(training) for _ in "ab"]
    models[1].compile(dynamic=True)
    for layout in ("packed", "full", "right", "left", "packed"):
        ids, kwargs, places = batch_of(layout)
        labels = torch.full_like(ids, -100).flatten()
        labels[torch.cat(places)[::5]] = 7
        kwargs = {name: value.cuda() if torch.is_tensor(value) else value for name, value in kwargs.items()}
        losses = []
        for model in models:
            with torch.set_grad_enabled(training):
                losses.append(model(ids.cuda(), **kwargs, labels=labels.view_as(ids).cuda()).loss)
        torch.testing.assert_close(*losses, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=0)
        if training:
            for loss in losses:
                loss.backward()
            for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
                pair = [parameter.grad.float().flatten() for parameter in (one, other)]
                assert torch.cosine_similarity(*pair, dim=0) >= 0.99, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "right"])
def test_flex_attention(layout, dtype):
    """The last one, since it compiles a kernel for every layout; on a CPU tests/model has it."""
    model = model_on("cuda", dtype, "flex_attention")
    check_numbers(model, layout)
    check_documents(model, layout)
    check_gradients(model, layout)
