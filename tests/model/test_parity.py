"""Promises 2 and 3: every backend x layout x dtype gives the plain implementation's and the original code's numbers.

On a CPU, and with `pytest -m gpu` on a GPU; expected are always the numbers on the CPU, in float32.
"""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, DataCollatorWithFlattening
from transformers.modeling_flash_attention_utils import (
    FLASH_ATTENTION_COMPATIBILITY_MATRIX,
    FLASH_ATTN_KERNEL_FALLBACK,
    lazy_import_flash_attention,
)
from transformers.utils import is_kernels_available
from transformers.utils.generic import is_flash_attention_requested

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import LENGTHS, batch_of, positions_of, small_model
from tests.helpers.plain_neobert import plain_hidden_states
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
EVERY_BACKEND = pytest.mark.parametrize("device, backend", [*BACKENDS, ("cpu", "flex_attention")])
# On a CPU, flex_attention has no gradients, and is compiled with g++ for every layout.
BUT_FLEX = pytest.mark.parametrize("device, backend", BACKENDS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Heads of 64 on a GPU, as published; its kernels differ by that.
SIZES_ON_A_GPU = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192, "max_length": 512}


def model_on(device: str, backend: str, dtype: torch.dtype = torch.float32, **changes):
    """A small model; the test is skipped where there is no such backend."""
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


def expected_of(model, state: dict[str, torch.Tensor], ids: torch.Tensor, documents, layout: str) -> torch.Tensor:
    """The plain states of all documents, one after the other: (tokens, hidden_size)."""
    state, found = {name: tensor.float().cpu() for name, tensor in state.items()}, []
    for row, columns in documents:
        # A token masked out in the middle keeps its place under RoPE; absolute positions count real tokens (original).
        positions = columns - columns[0] if layout == "interior" and model.config.rope else None
        found.append(plain_hidden_states(state, model.config, ids[row, columns], positions))
    return torch.cat(found)


def close(found: torch.Tensor, expected: torch.Tensor, model) -> bool:
    """Float32 to 1e-5, on a GPU to 1e-4, since it adds in another order; 16 bits to a cosine of 0.999."""
    assert found.shape == expected.shape
    if model.dtype == torch.float32:
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
    assert close(states, expected_of(model, model.state_dict(), ids, documents, layout), model)
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
    (expected_of(model, state, ids, documents, layout) * wanted).sum().backward()
    for name, parameter in model.named_parameters():
        found, expected = parameter.grad.float().cpu(), state[name].grad
        if device == "cpu":
            assert (found - expected).abs().max() / expected.abs().max().clamp(min=1) <= 1e-5, name
        else:
            least = 0.99999 if dtype == torch.float32 else 0.99
            assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) >= least, name


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_collator_of_transformers(backend):
    """DataCollatorWithFlattening's batch goes in as it is, labels included."""
    model = small_model(NeoBERTForMaskedLM, attn_implementation=backend)
    documents = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in LENGTHS]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, separator_id=-100)
    packed = model(**collator(documents, return_tensors="pt"))
    alone = [model(torch.tensor([document["input_ids"]])).logits[0] for document in documents]
    assert close(packed.logits[0], torch.cat(alone), model) and packed.loss.isfinite()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_recording(variant, kind):
    sums = torch.stack([tensor.double().sum() for tensor in reference_weights(variant, kind).values()])
    assert torch.allclose(sums, load_file(REFERENCE / variant / "expected.safetensors")[f"{kind}_sums"], atol=1e-4)


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plain_implementation_is_the_original(variant, tmp_path):
    """What all other tests compare with, in float64, against the recorded outputs."""
    recorded = load_file(REFERENCE / variant / "expected.safetensors")
    ids, lengths = recorded["input_ids"].long(), recorded["attention_mask"].sum(1).tolist()
    weights = reference_weights(variant)
    model = AutoModelForMaskedLM.from_pretrained(write_reference(tmp_path, variant))
    state = {name.removeprefix("model."): tensor.double() for name, tensor in weights.items()}
    states = [plain_hidden_states(state, model.config, row[:length]) for row, length in zip(ids, lengths)]
    assert close(torch.cat(states), recorded["last_hidden_state"], model)
    logits = torch.cat(states).float() @ weights["decoder.weight"][:100].T + weights["decoder.bias"][:100]
    assert close(logits, recorded["logits"], model)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@EVERY_DTYPE
def test_compiled_blocks_give_the_numbers_of_eager_ones(dtype, training):
    """Batches of every layout and of several shapes, one after the other: the loss of masked language modelling."""
    options = {"cls": NeoBERTForMaskedLM, "sparse_prediction": True}
    models = [model_on("cuda", "sdpa", dtype, **options).train(training) for _ in "ab"]
    models[1].compile(dynamic=True)
    for layout in ("cu_seq_lens", "dense", "right", "left", "cu_seq_lens"):
        ids, kwargs, documents = batch_of(layout)
        labels = torch.full_like(ids, -100)
        for row, columns in documents:
            labels[row, columns[::5]] = 7
        kwargs = {name: value.cuda() if torch.is_tensor(value) else value for name, value in kwargs.items()}
        losses = []
        for model in models:
            with torch.set_grad_enabled(training):
                losses.append(model(ids.cuda(), **kwargs, labels=labels.cuda()).loss)
        torch.testing.assert_close(*losses, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=0)
        if training:
            for loss in losses:
                loss.backward()
            for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
                pair = [parameter.grad.float().flatten() for parameter in (one, other)]
                assert torch.cosine_similarity(*pair, dim=0) >= 0.99, name
