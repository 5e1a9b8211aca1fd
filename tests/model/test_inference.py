"""Promise 7: `prepare_for_inference` gives the same numbers from packed weights, for inference alone."""

import copy

import pytest
import torch

from neobert_hf.cpu_neobert import Int8Linear, pack_linear_layers
from tests.helpers.models import ragged_batch, small_model


IDS, MASK = ragged_batch()


@torch.no_grad()
def states(model, ids=IDS, mask=MASK) -> torch.Tensor:
    return model(ids, attention_mask=mask).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("changes", [{}, {"rope": False, "rms_norm": False, "hidden_act": "gelu"}])
@pytest.mark.parametrize("lengths", [(1,), (13, 7, 1, 10), (13, 13)])
def test_float32(lengths, changes):
    model = small_model(**changes)
    ids, mask = ragged_batch(lengths)
    expected = states(model.train(), ids, mask)
    assert model.prepare_for_inference() is model and not model.training
    assert (states(model, ids, mask) - expected).abs().max() <= 1e-5


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("lengths", [(13,), (13, 7, 1, 10)])
def test_bfloat16(lengths):
    model = small_model().bfloat16()
    ids, mask = ragged_batch(lengths)
    expected = states(model, ids, mask)
    # Two steps of bfloat16 at 4, the largest state: a product may sum in another order.
    torch.testing.assert_close(states(model.prepare_for_inference(), ids, mask), expected, rtol=0, atol=2**-5)


@pytest.mark.parametrize("changes", [{}, {"rope": False, "rms_norm": False, "hidden_act": "gelu"}])
def test_int8(changes):
    """With one scale for a whole batch, it would matter that the first text has an embedding 50 times as large."""
    model = small_model(**changes)
    model.encoder.weight.data[7] *= 50
    ids = IDS.clone()
    ids[0, 3] = 7
    exact = states(model, ids)
    model.prepare_for_inference(int8=True)
    together = states(model, ids)
    assert not torch.allclose(together, exact, atol=1e-5)
    assert torch.cosine_similarity(together, exact, dim=-1).min() >= 0.9994
    alone = [states(model, row[kept.bool()][None], kept[kept.bool()][None]) for row, kept in zip(ids, MASK)]
    assert torch.equal(torch.cat(alone), together)


def test_int8_adds_a_bias():
    """As other encoders' layers have, which `pack_linear_layers` packs, too."""
    torch.manual_seed(0)
    layer, rows = torch.nn.Sequential(torch.nn.Linear(64, 32)).requires_grad_(False), torch.randn(5, 64)
    layer[0].bias.fill_(3.0)
    expected = layer(rows)
    pack_linear_layers(layer, Int8Linear)
    assert (layer(rows) - expected).abs().max() < 0.05


def train(model) -> None:
    model.requires_grad_(True)
    model.train()(IDS, attention_mask=MASK)[0].sum().backward()


USES = {
    "save": lambda model, folder: model.save_pretrained(folder),
    "copy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: torch.save(model, folder / "model.pt"),
    "load into": lambda model, folder: model.load_state_dict(small_model().state_dict()),
    "train": lambda model, folder: train(model),
    "prepare again": lambda model, folder: model.prepare_for_inference(int8=True),
    "gradients of inputs": lambda model, folder: model(inputs_embeds=torch.ones(1, 3, 64, requires_grad=True)),
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_prepared_model_is_for_inference_only(use, int8, tmp_path):
    model = small_model().prepare_for_inference(int8=int8)
    # No second copy of the weights is left.
    assert not [name for name, _ in model.named_parameters() if "norm" not in name and name != "encoder.weight"]
    with pytest.raises(RuntimeError, match="prepared for inference"):
        USES[use](model, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
