"""`prepare_for_inference`: the same numbers from packed weights, and never those of weights that are gone."""

import copy
import gc
import pickle

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel, cpu_neobert
from neobert_hf.cpu_neobert import PACKED_TOKENS, PACKED_WEIGHTS
from tests.helpers.models import ragged_batch, small_model


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """How many tokens each product with packed weights had."""
    seen, plain = [], cpu_neobert.linear

    def counting(hidden_states, weight):
        packed = PACKED_WEIGHTS.get(weight)
        tokens = hidden_states.shape[:-1].numel()
        if packed is not None and tokens <= PACKED_TOKENS and packed.is_of(weight):
            seen.append(tokens)
        return plain(hidden_states, weight)

    monkeypatch.setattr(cpu_neobert, "linear", counting)
    return seen


@torch.no_grad()
def states(model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(ids, attention_mask=mask).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_packed_weights_give_the_same_states(rows, products):
    model = small_model(NeoBERTModel)
    ids, mask = ragged_batch([13] if rows == 1 else [13, 7, 1, 10] * (rows // 4))
    expected = states(model, ids, mask)
    assert model.prepare_for_inference() is model
    torch.testing.assert_close(states(model, ids, mask), expected, rtol=0, atol=1e-5)
    tokens = int(mask.sum())
    # Four products in each of two blocks, unless the input is long.
    assert products == ([tokens] * 8 if tokens <= PACKED_TOKENS else [])
    assert (tokens <= PACKED_TOKENS) is (rows < 40)


@pytest.mark.parametrize("change", ["optimizer", "load", "data", "new data", "deleted"])
def test_changed_weights_count(change, products, caplog):
    model = small_model(NeoBERTModel).prepare_for_inference()
    ids, mask = ragged_batch()
    states(model, ids, mask)
    weight = model.transformer_encoder[0].ffn.w12.weight
    if change == "optimizer":
        loss = model.train()(ids, attention_mask=mask).last_hidden_state.square().mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=10.0).step()
        model.eval()
    elif change == "load":
        model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    elif change == "data":
        # As PEFT merges an adapter.
        weight.data += 0.1
    elif change == "new data":
        weight.data = weight.data * 2
    else:
        model.transformer_encoder[0].ffn.w12.weight = torch.nn.Parameter(weight.detach() * 2)
    products.clear()
    found = states(model, ids, mask)
    fresh = small_model(NeoBERTModel)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(found, states(fresh, ids, mask), rtol=0, atol=1e-5)
    assert len(products) < 8
    model.prepare_for_inference()
    products.clear()
    torch.testing.assert_close(states(model, ids, mask), found, rtol=0, atol=1e-5)
    assert len(products) == 8


def test_a_prepared_model_is_copied_pickled_saved_and_freed(tmp_path):
    model = small_model(NeoBERTForMaskedLM).prepare_for_inference()
    ids, mask = ragged_batch()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            found = other(ids, attention_mask=mask).logits[mask.bool()]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    gc.collect()
    before = len(PACKED_WEIGHTS)
    del model, other
    gc.collect()
    assert len(PACKED_WEIGHTS) == before - 8


def test_gradients_are_those_of_the_weights():
    model, ids = small_model(NeoBERTModel), torch.tensor([[5, 6, 7]])
    model(ids).last_hidden_state.sum().backward()
    expected = model.transformer_encoder[0].qkv.weight.grad.clone()
    model.zero_grad()
    model.prepare_for_inference()(ids).last_hidden_state.sum().backward()
    assert torch.equal(model.transformer_encoder[0].qkv.weight.grad, expected)


def test_an_ablation_that_runs_module_by_module_is_as_it_was(products):
    model = small_model(NeoBERTModel, hidden_act="gelu", rms_norm=False)
    ids, mask = ragged_batch()
    expected = states(model, ids, mask)
    assert torch.equal(states(model.prepare_for_inference(), ids, mask), expected) and not products


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match="The weights are torch.bfloat16 on cpu; only float32 on a CPU is packed"):
        small_model(NeoBERTModel).bfloat16().prepare_for_inference()
    with torch.inference_mode():
        model = small_model(NeoBERTModel)
    with pytest.raises(ValueError, match=r"made in torch.inference_mode\(\): load the model outside"):
        model.prepare_for_inference()
