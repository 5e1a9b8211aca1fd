"""Random settings of pretraining and the numbers of the formulas written out here."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import set_seed

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.data.batches import DataArguments
from neobert_hf.data.collator import MLMCollator
from neobert_hf.training.optimizers import build_schedule
from neobert_hf.training.pretraining import ModelArguments, PretrainingArguments, build_config, read_data
from neobert_hf.training.pretraining_trainer import MLMTrainer
from tests.helpers.properties import reproducible
from tests.helpers.small_tokenizer import small_tokenizer
from tests.training.plain_pretraining import learning_rate, plain_pretraining


def arguments_with(values: dict) -> PretrainingArguments:
    fixed = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    return PretrainingArguments(**fixed | values)


rates = {"learning_rate": st.floats(0, 1, exclude_min=True), "max_steps": st.integers(20, 50)}
warmups = st.integers(0, 20) | st.floats(0, 1, exclude_max=True)
schedules = st.sampled_from(["cosine_to_floor", "linear", "constant"])


@reproducible(100)
@given(st.fixed_dictionaries(rates | {"warmup_steps": warmups}), schedules)
def test_schedules(values, name):
    arguments = arguments_with(values | {"schedule": name})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    warmup = arguments.get_warmup_steps(arguments.max_steps)
    schedule = build_schedule(name, optimizer, warmup, arguments.max_steps)
    for step in range(min(arguments.max_steps, 60)):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate(arguments, step), rel=1e-9), step
        optimizer.step()
        schedule.step()


TOKENIZER = small_tokenizer()
masks = {
    "mlm_probability": st.floats(0, 1, exclude_min=True),
    "mask_replace_prob": st.floats(0, 1),
    "random_replace_prob": st.just(0.0),
}


@reproducible(100)
@given(st.fixed_dictionaries(masks), st.floats(0, 0.999), st.integers(0, 2**32 - 1))
def test_masks(values, share_of_rest, seed):
    values["random_replace_prob"] = share_of_rest * (1 - values["mask_replace_prob"])
    DataArguments(["unused"], 64, **values)
    collator = MLMCollator(TOKENIZER, **values, seed=seed)
    ids = np.random.default_rng(0).integers(0, 100, size=4_000)
    masked = collator.mask(ids, (seed % 7, 1, 0))
    ids, found, labels = torch.from_numpy(ids), masked["input_ids"], masked["labels"]
    chosen = labels != -100
    # The first five entries of the vocabulary are the special tokens.
    assert not chosen[ids < 5].any() and torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(found[~chosen], ids[~chosen])

    def close(count, total: int, share: float) -> bool:
        """Within five standard deviations of a binomial count; rare events have longer tails."""
        return abs(int(count) - total * share) <= 5 * (total * share * (1 - share)) ** 0.5 + 5

    number, mask, other = int(chosen.sum()), values["mask_replace_prob"], values["random_replace_prob"]
    assert close(number, int((ids >= 5).sum()), values["mlm_probability"])
    # A random token is [MASK], or the one that was there, once in a hundred times.
    assert close((found[chosen] == TOKENIZER.mask_token_id).sum(), number, mask + other / 100)
    assert close((found[chosen] == ids[chosen]).sum(), number, 1 - mask - other + other / 100)


training = {
    "learning_rate": st.floats(1e-4, 1e-2),
    "adam_beta1": st.floats(0, 0.999),
    "adam_beta2": st.floats(0, 0.999),
    "adam_epsilon": st.floats(1e-6, 1e-2),
    "max_grad_norm": st.floats(0, 1),
    "warmup_steps": st.integers(0, 1),
    "logging_steps": st.integers(1, 3),
    "weight_decay": st.floats(0, 2),
    "seed": st.integers(0, 2**32 - 1),
}
batching = {"mlm_probability": st.floats(0.02, 1), "mask_replace_prob": st.floats(0, 1)}
architectures = st.fixed_dictionaries(
    {
        "hidden_act": st.sampled_from(["swiglu", "gelu"]),
        "rope": st.booleans(),
        "rms_norm": st.booleans(),
        "norm_eps": st.floats(1e-6, 1e-2),
        "embedding_init_range": st.floats(0.1, 1),
        "decoder_init_range": st.floats(0.1, 0.3),
    }
)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@st.composite
def runs(draw):
    values = draw(st.fixed_dictionaries(training | batching))
    data = {name: values.pop(name) for name in batching}
    length = draw(st.integers(8, 40))
    micro_batch = length * draw(st.integers(1, 3))
    data |= {"max_length": length, "micro_batch_tokens": micro_batch, "layout": draw(st.sampled_from(LAYOUTS))}
    data |= {"global_batch_tokens": micro_batch * draw(st.integers(1, 3))}
    values |= {"decay_norms_and_biases": draw(st.booleans()), "schedule": draw(schedules), "max_steps": 3}
    return TINY | draw(architectures), data, values


LAYOUTS = ["packed", "padded", "naive"]


def test_pretraining(prepared, tmp_path):
    """Three steps of the Trainer against a plain loop, in float64: Adam makes much of what float32 rounds."""

    @reproducible(8)
    @given(runs())
    def check(drawn):
        architecture, data, values = drawn
        data = DataArguments([str(prepared / "train")], **data)
        arguments = arguments_with(values | {"output_dir": str(tmp_path), "save_strategy": "no"})
        arguments.gradient_accumulation_steps = data.accumulation_steps(1)
        material = read_data(data, arguments)
        set_seed(arguments.seed)
        model = NeoBERTForMaskedLM(build_config(ModelArguments(**architecture), data, material, None)).double()
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
        expected = list(plain_pretraining(material.train, data, arguments, model.config, weights))
        trainer = MLMTrainer(model, arguments, material, settings={})
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        every = values["logging_steps"]
        windows = [expected[end - every : end] for end in range(every, 4, every)]
        means = [sum(step.loss for step in window) / every for window in windows]
        assert [entry["loss"] for entry in log] == pytest.approx(means, rel=1e-5)
        for name in ("grad_norm", "learning_rate"):
            last = [vars(window[-1])[name] for window in windows]
            assert [entry[name] for entry in log] == pytest.approx(last, rel=1e-4)
        for name, weight in model.named_parameters():
            assert torch.allclose(weight, weights[name], rtol=1e-4, atol=1e-3 * arguments.learning_rate), name

    check()
