"""Promise 2: every backend x layout x dtype gives the numbers of the plain implementation and of the original code."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, DataCollatorWithFlattening

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import CPU_BACKENDS, packed_batch, positions_of, ragged_batch, small_model
from tests.helpers.plain_neobert import plain_hidden_states
from tests.helpers.reference import KINDS, REFERENCE, VARIANTS, reference_weights, write_reference


LENGTHS = (13, 7, 1, 10)
ABLATIONS = {
    "published": {},
    "gelu": {"hidden_act": "gelu"},
    "layer_norm": {"rms_norm": False},
    "absolute": {"rope": False},
    "all": {"rope": False, "rms_norm": False, "hidden_act": "gelu"},
}
ENDS = pytest.mark.parametrize("changes", [ABLATIONS["published"], ABLATIONS["all"]], ids=["published", "ablation"])


def max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    assert left.shape == right.shape
    return (left.float() - right.float()).abs().max().item()


def expected_states(model, documents, positions=None) -> list[torch.Tensor]:
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    positions = positions or [None] * len(documents)
    return [plain_hidden_states(state, model.config, ids, where) for ids, where in zip(documents, positions)]


@torch.no_grad()
@ENDS
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("side", ["right", "left", "interior"])
def test_padded(backend, side, changes):
    model = small_model(attn_implementation=backend, **changes)
    ids, mask = ragged_batch(LENGTHS, side)
    states = model(ids, attention_mask=mask).last_hidden_state
    kept = [mask[row].nonzero().squeeze(1) for row in range(len(ids))]
    # A token masked out in the middle keeps its place under RoPE; absolute positions count real tokens (original).
    positions = [columns - columns[0] for columns in kept] if model.config.rope else None
    expected = expected_states(model, [ids[row, columns] for row, columns in enumerate(kept)], positions)
    for row, columns in enumerate(kept):
        assert max_difference(states[row, columns], expected[row]) <= 1e-5
    assert (states[mask == 0] == 0).all()


@torch.no_grad()
@ENDS
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids", "both"])
def test_packed(backend, form, changes):
    model = small_model(attn_implementation=backend, **changes)
    ids, packed = packed_batch(LENGTHS)
    kwargs = {} if form == "position_ids" else packed
    if form != "cu_seq_lens":
        kwargs = kwargs | {"position_ids": positions_of(LENGTHS)}
    states = model(ids, **kwargs).last_hidden_state
    expected = torch.cat(expected_states(model, ids[0].split(LENGTHS)))
    assert max_difference(states[0], expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_packed_rows_with_padding(backend, side):
    """Several packed rows: positions that return to 0 and a mask at once."""
    model = small_model(attn_implementation=backend)
    rows = [(5, 4, 3), (8, 1), (2, 2)]
    ids, mask = ragged_batch([sum(lengths) for lengths in rows], side)
    positions = torch.zeros_like(ids)
    for row, lengths in enumerate(rows):
        positions[row, mask[row].bool()] = positions_of(lengths)
    states = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    for row, lengths in enumerate(rows):
        real = mask[row].bool()
        expected = torch.cat(expected_states(model, ids[row, real].split(lengths)))
        assert max_difference(states[row, real], expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("changes", ABLATIONS.values(), ids=ABLATIONS)
def test_every_ablation(changes):
    model = small_model(**changes)
    ids, mask = ragged_batch((13, 13, 5))
    states = model(ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(mask.sum(1)):
        assert max_difference(states[row, :length], expected_states(model, [ids[row, :length]])[0]) <= 1e-5
    assert max_difference(model(ids[:2]).last_hidden_state, states[:2]) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["dense", "padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend, layout, dtype):
    """Against float32 with the same (rounded) weights: cosine >= 0.999, what 8 bits of mantissa leave on 2 layers."""
    model = small_model(attn_implementation=backend, embedding_init_range=0.5).to(dtype)
    if layout == "packed":
        ids, kwargs = packed_batch(LENGTHS)
        documents, states = ids[0].split(LENGTHS), model(ids, **kwargs).last_hidden_state[0].split(LENGTHS)
    else:
        ids, mask = ragged_batch((13,) * 4 if layout == "dense" else LENGTHS)
        output = model(ids, attention_mask=mask).last_hidden_state
        documents, states = zip(*[(ids[row, :n], output[row, :n]) for row, n in enumerate(mask.sum(1).tolist())])
    for got, expected in zip(states, expected_states(model, documents)):
        assert got.dtype == dtype
        assert torch.cosine_similarity(got.float(), expected).min() >= 0.999


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", ABLATIONS.values(), ids=ABLATIONS)
def test_gradients(changes, backend):
    """`eager` keeps the padding, `sdpa` strips it: both as without a batch, relative difference 2e-6 measured."""
    ids, mask = ragged_batch(LENGTHS, "left")
    weights = torch.randn(*ids.shape, 64)
    options = {"embedding_init_range": 0.3, **changes}
    model, one_by_one = small_model(attn_implementation=backend, **options).train(), small_model(**options)
    (model(ids, attention_mask=mask).last_hidden_state * weights).sum().backward()
    for row, real in enumerate(mask.bool()):
        states = plain_hidden_states(dict(one_by_one.named_parameters()), model.config, ids[row, real])
        (states * weights[row, real]).sum().backward()
    expected = {name: parameter.grad for name, parameter in one_by_one.named_parameters()}
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().clamp(min=1)
        assert (parameter.grad - expected[name]).abs().max() / scale <= 1e-5, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_inference_compute_the_same(dtype, mode):
    model = small_model().to(dtype)
    ids, mask = ragged_batch(LENGTHS)
    expected = model.train()(ids, attention_mask=mask).last_hidden_state
    with mode():
        found = model.eval()(ids, attention_mask=mask).last_hidden_state
    assert max_difference(found, expected) <= (1e-5 if dtype == torch.float32 else 2**-5)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_collator_of_transformers(backend):
    """DataCollatorWithFlattening's batch goes in as it is, labels included."""
    model = small_model(NeoBERTForMaskedLM, attn_implementation=backend)
    documents = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in LENGTHS]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, separator_id=-100)
    packed = model(**collator(documents, return_tensors="pt"))
    alone = [model(torch.tensor([document["input_ids"]])).logits[0] for document in documents]
    assert max_difference(packed.logits[0], torch.cat(alone)) <= 1e-5 and packed.loss.isfinite()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_recording(variant, kind):
    sums = torch.stack([tensor.double().sum() for tensor in reference_weights(variant, kind).values()])
    assert torch.allclose(sums, load_file(REFERENCE / variant / "expected.safetensors")[f"{kind}_sums"], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_original_outputs(variant, backend, tmp_path):
    """The recorded float32 outputs of the original code; measured maximum 2.4e-6."""
    recorded = load_file(REFERENCE / variant / "expected.safetensors")
    ids, mask = recorded["input_ids"].long(), recorded["attention_mask"]
    real, lengths = mask.bool(), mask.sum(1).tolist()
    folders = [write_reference(tmp_path / kind, variant, kind) for kind in KINDS]
    mlm = AutoModelForMaskedLM.from_pretrained(folders[0], attn_implementation=backend)
    classifier = AutoModelForSequenceClassification.from_pretrained(folders[1], attn_implementation=backend)
    states = mlm.model(ids, attention_mask=mask).last_hidden_state
    assert max_difference(states[real], recorded["last_hidden_state"]) <= 1e-5
    assert max_difference(mlm(ids, attention_mask=mask).logits[real][:, :100], recorded["logits"]) <= 1e-5
    scores = classifier(ids, attention_mask=mask).logits
    assert max_difference(scores, recorded["classification_logits"]) <= 1e-5

    packed_ids, offsets = ids[real].unsqueeze(0), torch.tensor([0, *lengths]).cumsum(0)
    for kwargs in ({"cu_seq_lens_q": offsets}, {"position_ids": positions_of(lengths)}):
        assert max_difference(mlm(packed_ids, **kwargs).logits[0, :, :100], recorded["logits"]) <= 1e-5
    scores = classifier(packed_ids, cu_seq_lens_q=offsets).logits
    assert max_difference(scores, recorded["classification_logits"]) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plain_implementation_is_the_original(variant, tmp_path):
    """What all other tests compare with, in float64, against the recorded outputs."""
    recorded = load_file(REFERENCE / variant / "expected.safetensors")
    ids, lengths = recorded["input_ids"].long(), recorded["attention_mask"].sum(1).tolist()
    weights = reference_weights(variant)
    config = AutoModelForMaskedLM.from_pretrained(write_reference(tmp_path, variant)).config
    state = {name.removeprefix("model."): tensor.double() for name, tensor in weights.items()}
    states = torch.cat([plain_hidden_states(state, config, row[:length]) for row, length in zip(ids, lengths)])
    assert max_difference(states, recorded["last_hidden_state"]) <= 1e-5
    logits = states.float() @ weights["decoder.weight"][:100].T + weights["decoder.bias"][:100]
    assert max_difference(logits, recorded["logits"]) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_in_the_repository_is_the_recording(shared, variant, kind):
    folder = shared / "reference" / variant
    original = load_file(folder / ("" if kind == "masked_lm" else kind) / "model.safetensors")
    drawn = reference_weights(variant, kind)
    assert original.keys() == drawn.keys()
    assert max(max_difference(original[name], drawn[name]) for name in drawn) <= 1e-6
    whole, kept = load_file(folder / "expected.safetensors"), load_file(REFERENCE / variant / "expected.safetensors")
    real = whole["attention_mask"].bool()
    assert torch.equal(whole["logits"][real][:, :100], kept["logits"])
    assert torch.equal(whole["last_hidden_state"][real], kept["last_hidden_state"])
    assert torch.equal(whole["classification_logits"], kept["classification_logits"])
