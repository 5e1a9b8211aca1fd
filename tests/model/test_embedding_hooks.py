"""What looks at token embeddings or hidden states from outside: hooks, noise, gradients."""

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import activate_neftune

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel
from tests.helpers.flash_kernel import flash_model, stand_in
from tests.helpers.models import packed_batch, ragged_batch, small_model


IDS, MASK = ragged_batch(side="left")
PACKED_IDS, PACKED = packed_batch()


@pytest.fixture(params=["sdpa", "eager", "flash_attention_2"])
def build(request, monkeypatch):
    """A small model of a class, with each backend that has gradients on a CPU."""
    if request.param != "flash_attention_2":
        return lambda cls: small_model(cls, request.param)
    stand_in(monkeypatch)
    return lambda cls: flash_model(cls, request.param)


def test_hooks_on_the_embedding_see_the_rows_of_the_batch(build):
    """As Captum's attributions and NEFTune's noise, which scales with the length that it sees."""
    model, seen = build(NeoBERTModel), []
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    for register in (model.encoder.register_forward_hook, model.encoder.register_full_backward_hook):
        hook = register(lambda module, inputs, output: seen.append(tuple((*inputs, *output)[-1].shape)))
        states = model(IDS, attention_mask=MASK).last_hidden_state
        states.sum().backward()
        hook.remove()
        assert torch.equal(states, expected)
    # The forward hook is given the output whole: its last row is (length, width).
    assert seen == [(13, 64), (4, 13, 64)]
    model(IDS, attention_mask=MASK)
    assert len(seen) == 2


def test_noise_of_training_scales_with_the_length_of_the_batch(build, tmp_path):
    """`neftune_noise_alpha` of Transformers: a step's loss is that of noisy embeddings of the padded batch."""
    alpha, labels = 5.0, torch.where(MASK.bool(), IDS, -100)
    model, reference, before_noise = build(NeoBERTForMaskedLM), build(NeoBERTForMaskedLM).train(), []
    model.model.encoder.register_forward_hook(lambda *_: before_noise.append(torch.get_rng_state()))
    rows = [{"input_ids": ids, "attention_mask": mask, "labels": label} for ids, mask, label in zip(IDS, MASK, labels)]
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.0, "use_cpu": True}
    settings |= {"neftune_noise_alpha": alpha, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings["train_sampling_strategy"] = "sequential"
    found = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=rows).train().training_loss

    embedded = reference.model.encoder(IDS)
    limit = alpha / (IDS.shape[1] * embedded.shape[-1]) ** 0.5
    (state,) = before_noise
    torch.set_rng_state(state)
    noisy = embedded + torch.empty_like(embedded).uniform_(-limit, limit)
    expected, plain = (reference(inputs_embeds=x, attention_mask=MASK, labels=labels).loss for x in (noisy, embedded))
    assert found == pytest.approx(expected.item(), abs=1e-4) and abs(found - plain.item()) > 1e-2


@torch.no_grad()
def test_noise_scales_with_the_length_of_the_batch_on_flex_attention():
    """It has no gradients on a CPU, so that no training can be run."""
    model = small_model(attn_implementation="flex_attention")
    embedded = model.encoder(IDS)
    limit = 5.0 / embedded[0].numel() ** 0.5
    torch.manual_seed(0)
    noisy = embedded + torch.empty_like(embedded).uniform_(-limit, limit)
    expected = model(inputs_embeds=noisy, attention_mask=MASK).last_hidden_state
    activate_neftune(model.train(), 5.0)
    torch.manual_seed(0)
    found = model(IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_without_hooks_padding_is_not_looked_up(monkeypatch):
    model, looked_up = small_model(), []
    lookup = torch.nn.functional.embedding
    monkeypatch.setattr(
        "torch.nn.functional.embedding", lambda ids, *rest: looked_up.append(tuple(ids.shape)) or lookup(ids, *rest)
    )
    model(IDS, attention_mask=MASK)
    assert looked_up == [(1, 31)]


@pytest.mark.parametrize("layout", ["full", "padded", "packed"])
def test_hidden_states_are_part_of_the_output(build, layout):
    """Each has a gradient; without gradients the same numbers come from the shorter way."""
    batch = {
        "full": {"input_ids": IDS},
        "padded": {"input_ids": IDS, "attention_mask": MASK},
        "packed": {"input_ids": PACKED_IDS, **PACKED},
    }[layout]
    model = build(NeoBERTForMaskedLM)
    outputs = model(**batch, output_hidden_states=True)
    for state in outputs.hidden_states:
        state.retain_grad()
    outputs.logits.square().sum().backward()
    for state in outputs.hidden_states:
        assert state.shape == (*batch["input_ids"].shape, 64) and state.grad.abs().max() > 0
        if layout == "padded":
            assert not state[~MASK.bool()].any()
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(outputs.hidden_states, expected.hidden_states))
    assert torch.allclose(outputs.logits, expected.logits, atol=1e-5)
