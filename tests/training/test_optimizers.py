"""Learning-rate schedules at their corners, parameter groups, and every optimizer."""

import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.training.optimizers import build_optimizer, build_schedule
from neobert_hf.training.pretraining_arguments import PretrainingArguments
from tests.helpers.models import ragged_batch, small_model


def learning_rates(name, warmup, steps, beyond=0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=6e-4)
    schedule = build_schedule(name, optimizer, warmup, steps)
    rates = []
    for _ in range(steps + beyond):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_cosine_warms_up_falls_to_a_tenth_at_90_percent_and_stays():
    rates = learning_rates("cosine_to_floor", 20, 1000, beyond=300)
    assert rates[0] == 0 and rates[10] == pytest.approx(3e-4) and rates[20] == pytest.approx(6e-4)
    assert rates[460] == pytest.approx(6e-4 * 0.55)  # Halfway of the cosine.
    assert rates[900] == pytest.approx(6e-5)
    # It does not rise again, in particular not beyond its end.
    assert rates[20:901] == sorted(rates[20:901], reverse=True)
    assert rates[900:] == pytest.approx([6e-5] * 400)


def test_linear_and_constant():
    rates = learning_rates("linear", 20, 1000)
    assert rates[20] == pytest.approx(6e-4) and rates[510] == pytest.approx(3e-4)
    assert rates[-1] == pytest.approx(6e-4 / 980)
    assert learning_rates("constant", 0, 50) == [6e-4] * 50
    with pytest.raises(ValueError, match="`warmup_steps` is 51"):
        learning_rates("linear", 51, 50)


def build(name, model, **changes):
    settings = {"learning_rate": 2e-3, "weight_decay": 0.1} | changes
    return build_optimizer(model, PretrainingArguments("unused", optimizer=name, use_cpu=True, bf16=False, **settings))


@pytest.mark.parametrize("everything", [True, False])
def test_weight_decay_on_everything_or_not_on_norms_and_biases(everything):
    model = small_model(NeoBERTForMaskedLM)
    optimizer = build("adamw", model, decay_norms_and_biases=everything)
    decay = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        expected = 0.1 if everything or not (name.endswith("bias") or "norm" in name) else 0.0
        assert decay[id(weight)] == expected, name


@pytest.mark.parametrize("name", ["adamw", "soap", "muon"])
def test_every_optimizer_learns_and_resumes_exactly(name):
    ids, mask = ragged_batch()
    labels = torch.where(mask.bool(), ids, -100)

    def steps(model, optimizer, number):
        losses = []
        for _ in range(number):
            loss = model(ids, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = small_model(NeoBERTForMaskedLM).train()
    optimizer = build(name, model)
    losses = steps(model, optimizer, 12)
    assert math.isfinite(losses[-1]) and losses[-1] < losses[0] - 0.5
    again = small_model(NeoBERTForMaskedLM).train()
    first = build(name, again)
    steps(again, first, 5)
    second = build(name, again)
    second.load_state_dict(first.state_dict())
    assert steps(again, second, 7) == losses[5:]


BERT = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize(
    "model, blocks",
    [(small_model(NeoBERTForMaskedLM), "transformer_encoder."), (BertForMaskedLM(BERT), "encoder.layer.")],
    ids=["NeoBERT", "BERT"],
)
def test_muon_takes_the_hidden_matrices_only(model, blocks):
    optimizer = build("muon", model)
    muon = {id(weight) for group in optimizer.param_groups if group["use_muon"] for weight in group["params"]}
    for name, weight in model.named_parameters():
        assert (id(weight) in muon) == (weight.ndim == 2 and blocks in name), name


def test_muon_is_in_float32_where_the_cpu_emulates_bfloat16(monkeypatch):
    """The same updates, but for the rounding; and none of their bits is bfloat16's."""
    model = small_model(NeoBERTForMaskedLM)
    torch.manual_seed(0)
    grads = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def updates(supported: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
        for name, weight in model.named_parameters():
            weight.data, weight.grad = before[name].clone(), grads[name].clone()
        build("muon", model).step()
        return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}

    rounded, exact = updates(True), updates(False)
    for name in before:
        similarity = torch.cosine_similarity(rounded[name].flatten(), exact[name].flatten(), 0)
        assert similarity > 0.99, (name, similarity)
    name = next(name for name in before if name.endswith("qkv.weight"))
    assert not torch.equal(rounded[name], exact[name])
