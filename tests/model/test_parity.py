"""Promises 2 and 3: every backend x layout x dtype gives the plain implementation's and the original code's numbers.

On a CPU, and with `pytest tests/model/test_parity.py -m gpu` on a GPU, which needs no other packages than the model.
Expected are always the numbers on the CPU, in float32.
"""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.modeling_flash_attention_utils import (
    FLASH_ATTENTION_COMPATIBILITY_MATRIX,
    FLASH_ATTN_KERNEL_FALLBACK,
    lazy_import_flash_attention,
)
from transformers.utils import is_kernels_available
from transformers.utils.generic import is_flash_attention_requested

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import batch_of, positions_of, small_model
from tests.helpers.plain_neobert import plain_documents
from tests.model.reference import KINDS, REFERENCE, VARIANTS, reference_weights, write_reference


ABLATIONS = {
    "published": {},
    "gelu": {"hidden_act": "gelu"},
    "layer_norm": {"rms_norm": False},
    "absolute": {"rope": False},
    "all": {"rope": False, "rms_norm": False, "hidden_act": "gelu"},
}
# Packages by their names in Transformers, and the kernels of the Hub in their place.
FLASH = [f"flash_attention_{version}" for version in (3, 4, 2)]
ON_A_GPU = ["sdpa", *FLASH, *(FLASH_ATTN_KERNEL_FALLBACK[name] for name in FLASH), "eager", "flex_attention"]
BACKENDS = [("cpu", "sdpa"), ("cpu", "eager")]
BACKENDS += [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ON_A_GPU]
# On a CPU, flex_attention has no gradients, and is compiled with g++ for every layout.
CPU_FLEX = pytest.param("cpu", "flex_attention", marks=pytest.mark.slow)
EVERY_BACKEND = pytest.mark.parametrize("device, backend", [*BACKENDS, CPU_FLEX])
BUT_FLEX = pytest.mark.parametrize("device, backend", BACKENDS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Heads of 64 on a GPU, as published; its kernels differ by that.
SIZES_ON_A_GPU = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192, "max_length": 512}


def model_on(device: str, backend: str, dtype: torch.dtype = torch.float32, **changes):
    """A small model; the test is skipped where there is no such backend."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if is_flash_attention_requested(requested_attention_implementation=backend):
        if dtype == torch.float32 or not is_there(backend):
            pytest.skip(f"{backend} takes 16 bits, and it must be installed, or come from the Hub")
    if (device, backend) == ("cpu", "flex_attention") and dtype != torch.float32:
        pytest.skip("on a CPU it takes float32 only")
    sizes = SIZES_ON_A_GPU if device == "cuda" else {}
    # 16 bits cannot follow hidden states that are as sharp as those of the small model.
    sharpness = {} if dtype == torch.float32 else {"embedding_init_range": 0.5}
    return small_model(attn_implementation=backend, **sizes | sharpness | changes).to(device, dtype)


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


def states_of(model, ids: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """(batch, length, hidden_size) on the CPU in float32, with the padding."""
    kwargs = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in kwargs.items()}
    return model(ids.to(model.device), **kwargs).last_hidden_state.float().cpu()


def close(found: torch.Tensor, expected: torch.Tensor, model) -> bool:
    """Float32 to 1e-5, on a GPU to 1e-4, since it adds in another order; 16 bits to a cosine of 0.999."""
    assert found.shape == expected.shape
    if model.dtype.itemsize >= 4:
        return (found.float() - expected).abs().max() <= (1e-5 if model.device.type == "cpu" else 1e-4)
    return torch.cosine_similarity(found.float(), expected, dim=-1).min() >= 0.999


LAYOUTS = ["dense", "right", "left", "interior", "cu_seq_lens", "position_ids", "both", "packed rows"]


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, ABLATIONS["all"]], ids=["published", "ablation"])
@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY_DTYPE
@EVERY_BACKEND
def test_numbers_are_those_of_the_plain_implementation(layout, device, backend, dtype, changes):
    model, (ids, kwargs, documents) = model_on(device, backend, dtype, **changes), batch_of(layout)
    found, real = states_of(model, ids, kwargs), torch.zeros_like(ids, dtype=torch.bool)
    for row, columns in documents:
        real[row, columns] = True
    states = torch.cat([found[row, columns] for row, columns in documents])
    state = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    assert close(states, plain_documents(state, model.config, ids, documents), model)
    assert (found[~real] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("layout", ["right", "interior", "cu_seq_lens", "position_ids"])
@EVERY_DTYPE
@BUT_FLEX
def test_a_changed_document_leaves_the_others_to_the_bit(layout, device, backend, dtype):
    model, (ids, kwargs, documents) = model_on(device, backend, dtype), batch_of(layout)
    # Padding changes as well, and is never read.
    padding, (row, columns) = kwargs.get("attention_mask", torch.ones_like(ids)) == 0, documents[1]
    other = torch.where(padding, (ids + 31) % 100, ids)
    other[row, columns] = (ids[row, columns] + 17) % 99 + 1
    before, after = states_of(model, ids, kwargs), states_of(model, other, kwargs)
    same = [torch.equal(before[row, columns], after[row, columns]) for row, columns in documents]
    assert same == [True, False, True, True]


@pytest.mark.parametrize("changes", ABLATIONS.values(), ids=ABLATIONS)
@pytest.mark.parametrize("layout", ["left", "cu_seq_lens"])
@BUT_FLEX
def test_gradients(changes, layout, device, backend):
    """`eager` keeps the padding, `sdpa` strips it: both as without a batch, relative difference 2e-6 measured."""
    dtype = torch.float32 if "flash" not in backend else torch.bfloat16
    ids, kwargs, documents = batch_of(layout)
    model = model_on(device, backend, dtype, **{"embedding_init_range": 0.3} | changes).train()
    weights = torch.randn(*ids.shape, model.config.hidden_size)
    (states_of(model, ids, kwargs) * weights).sum().backward()
    state = {name: weight.detach().float().cpu().requires_grad_() for name, weight in model.state_dict().items()}
    wanted = torch.cat([weights[row, columns] for row, columns in documents])
    (plain_documents(state, model.config, ids, documents) * wanted).sum().backward()
    for name, parameter in model.named_parameters():
        found, expected = parameter.grad.float().cpu(), state[name].grad
        if device == "cpu":
            assert (found - expected).abs().max() / expected.abs().max().clamp(min=1) <= 1e-5, name
        else:
            least = 0.99999 if dtype == torch.float32 else 0.99
            assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) >= least, name


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@EVERY_BACKEND
def test_original_outputs(variant, device, backend, tmp_path):
    """The recorded float32 outputs of the original code; measured maximum 2.4e-6."""
    dtype = torch.float32 if "flash" not in backend else torch.bfloat16
    model_on(device, backend, dtype)  # Skips what is not there.
    recorded = load_file(REFERENCE / variant / "expected.safetensors")
    ids, mask = recorded["input_ids"].long().to(device), recorded["attention_mask"].to(device)
    real, lengths = mask.bool(), mask.sum(1).tolist()
    folders = [write_reference(tmp_path / kind, variant, kind) for kind in KINDS]
    options = {"attn_implementation": backend, "dtype": dtype}
    mlm = AutoModelForMaskedLM.from_pretrained(folders[0], **options).to(device)
    classifier = AutoModelForSequenceClassification.from_pretrained(folders[1], **options).to(device)
    assert close(mlm.model(ids, attention_mask=mask).last_hidden_state[real].cpu(), recorded["last_hidden_state"], mlm)
    assert close(mlm(ids, attention_mask=mask).logits[real][:, :100].cpu(), recorded["logits"], mlm)
    scores = classifier(ids, attention_mask=mask).logits.cpu()
    assert close(scores, recorded["classification_logits"], classifier)

    packed_ids, offsets = ids[real].unsqueeze(0), torch.tensor([0, *lengths], device=device).cumsum(0)
    for kwargs in ({"cu_seq_lens_q": offsets}, {"position_ids": positions_of(lengths).to(device)}):
        assert close(mlm(packed_ids, **kwargs).logits[0, :, :100].cpu(), recorded["logits"], mlm)
    scores = classifier(packed_ids, cu_seq_lens_q=offsets).logits.cpu()
    assert close(scores, recorded["classification_logits"], classifier)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plain_implementation_is_the_original(variant, tmp_path):
    """What all other tests compare with, in float64, against the recorded outputs."""
    recorded = load_file(REFERENCE / variant / "expected.safetensors")
    for kind in KINDS:  # Otherwise torch's random numbers have changed, and no model is wrong.
        sums = torch.stack([tensor.double().sum() for tensor in reference_weights(variant, kind).values()])
        assert torch.allclose(sums, recorded[f"{kind}_sums"], atol=1e-4)
    model = AutoModelForMaskedLM.from_pretrained(write_reference(tmp_path, variant)).double()
    ids, mask = recorded["input_ids"].long(), recorded["attention_mask"]
    documents = [(row, kept.nonzero()[:, 0]) for row, kept in enumerate(mask)]
    states = plain_documents(model.model.state_dict(), model.config, ids, documents)
    assert close(states, recorded["last_hidden_state"], model)
    assert close(model.decoder(states)[:, :100], recorded["logits"], model)


@pytest.mark.gpu
@EVERY_DTYPE
def test_compiled_training_gives_the_numbers_of_eager_training(dtype):
    """Batches of every layout and of several shapes, one after the other: the loss and the gradients."""
    models = [model_on("cuda", "sdpa", dtype, cls=NeoBERTForMaskedLM, sparse_prediction=True).train() for _ in "ab"]
    models[1].compile(dynamic=True)
    for layout in ("cu_seq_lens", "dense", "right", "left", "cu_seq_lens"):
        ids, kwargs, _ = batch_of(layout)
        kwargs = {name: value.cuda() if torch.is_tensor(value) else value for name, value in kwargs.items()}
        labels = torch.full_like(ids, -100)
        labels[:, ::5] = 7
        losses = [model(ids.cuda(), **kwargs, labels=labels.cuda()).loss for model in models]
        torch.testing.assert_close(*losses, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=0)
        for loss in losses:
            loss.backward()
        for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
            pair = [parameter.grad.float().flatten() for parameter in (one, other)]
            assert torch.cosine_similarity(*pair, dim=0) >= 0.99, name
