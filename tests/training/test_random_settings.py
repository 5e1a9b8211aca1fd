"""Random settings of pretraining and the numbers of the formulas written out here."""

import copy
import math
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import set_seed

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.data.batches import DataArguments, MLMBatchSampler
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import Documents
from neobert_hf.training.optimizers import build_optimizer, build_schedule
from neobert_hf.training.pretraining import ModelArguments, PretrainingArguments, build_config, read_data
from neobert_hf.training.pretraining_trainer import MLMTrainer
from tests.helpers.properties import reproducible
from tests.helpers.shards import write_folder
from tests.helpers.small_tokenizer import small_tokenizer
from tests.training.plain_pretraining import PlainAdam, learning_rate, plain_pretraining


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


adam = {
    "learning_rate": st.floats(0, 1, exclude_min=True),
    "adam_beta1": st.floats(0, 0.999),
    "adam_beta2": st.floats(0, 0.999),
    "adam_epsilon": st.floats(1e-12, 1),
}


def test_optimizers():
    """In float64, where formula and library agree to the last digits; in float32 the weights stay finite, too."""

    @reproducible(60)
    @given(st.fixed_dictionaries(adam | {"weight_decay": st.floats(0, 2)}), st.booleans())
    def check(values, everything):
        arguments = arguments_with(values | {"decay_norms_and_biases": everything})
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).double()
        single = copy.deepcopy(model).float()
        expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        plain = PlainAdam(arguments, expected)
        optimizers = [build_optimizer(each, arguments) for each in (model, single)]
        for _ in range(4):
            gradients = {name: torch.randn_like(weight) for name, weight in expected.items()}
            # As of a token that no text holds.
            gradients["1.bias"].zero_()
            plain.step(expected, gradients, arguments.learning_rate)
            for each, library in zip((model, single), optimizers):
                for name, weight in each.named_parameters():
                    weight.grad = gradients[name].to(weight.dtype)
                library.step()
        for name, weight in model.named_parameters():
            assert torch.allclose(weight, expected[name], rtol=1e-6, atol=1e-12), name
            assert single.get_parameter(name).isfinite().all(), name

    check()


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


@st.composite
def plans(draw):
    """A corpus, the settings of its micro-batches, and processes."""
    lengths = draw(st.lists(st.integers(3, 60), min_size=3, max_size=30))
    ends = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    shards = np.diff([0, *ends, len(lengths)]).tolist()
    max_length, world_size = draw(st.integers(8, 40)), draw(st.integers(1, 3))
    micro_batch = max_length * draw(st.integers(1, 3)) + draw(st.integers(0, 20))
    legal = {
        "max_length": st.just(max_length),
        "micro_batch_tokens": st.just(micro_batch),
        "global_batch_tokens": st.integers(1, 3).map(lambda steps: steps * micro_batch * world_size),
        "shuffle_shards": st.integers(1, 4),
    }
    values = draw(st.fixed_dictionaries(legal))
    if draw(st.booleans()):
        share = draw(st.integers(1, 7)) / 8
        values |= {"min_lengths": [0, draw(st.integers(0, max(lengths)))], "probabilities": [share, 1 - share]}
    values["layout"] = draw(st.sampled_from(["packed", "padded", "naive"]))
    return lengths, shards, values, draw(st.integers(0, 2**32 - 1)), world_size


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """With ids that no other document has, but for [CLS] and [SEP]."""
    return [np.concatenate([[2], 100 * number + np.arange(5, 3 + size), [3]]) for number, size in enumerate(lengths)]


@reproducible(80)
@given(plans())
def test_micro_batches(drawn):
    lengths, shards, values, seed, world_size = drawn
    documents = documents_of(lengths)
    data = DataArguments(["unused"], **values)
    steps = data.accumulation_steps(world_size)
    temporary = tempfile.TemporaryDirectory()  # Deleted with the variable.
    corpus = Documents([write_folder(Path(temporary.name), documents, shards, 100_000)], data.max_length)
    plan = MLMBatchSampler(corpus, data, seed)
    assert steps * data.micro_batch_tokens * world_size == data.global_batch_tokens
    batches = []
    while min(subset["epoch"] for subset in plan.cursor["subsets"]) < 2:
        batches.append(next(iter(plan)))
        plan.advance(len(batches))
    for rank in range(world_size):
        own = MLMBatchSampler(corpus, data, seed, rank, world_size)
        assert list(islice(own, len(batches[rank::world_size]))) == batches[rank::world_size]

    # A document is cut as the tokenizer would: its last token, [SEP], stays.
    cut = [np.append(ids[: data.max_length - 1], ids[-1]) if len(ids) > data.max_length else ids for ids in documents]
    collator = MLMCollator(TOKENIZER, 0.5, 1.0, 0.0, data.layout, data.max_length, seed)
    for keys in batches:
        expected = [cut[key.row] for key in keys]
        check_layout(collator(corpus.__getitems__(keys)), expected, data)
        rows = [data.max_length] * len(keys) if data.layout == "padded" else map(len, expected)
        assert sum(rows) <= data.micro_batch_tokens
    for subset, least in enumerate(data.min_lengths):
        kept = {row for row, length in enumerate(lengths) if length >= least}
        counts = Counter((key.row, key.epoch) for keys in batches for key in keys if key.subset == subset)
        for epoch in range(2):
            assert {row: counts[row, epoch] for row in range(len(lengths))} == {
                row: int(row in kept) for row in range(len(lengths))
            }


def check_layout(batch: dict, expected: list[np.ndarray], data: DataArguments) -> None:
    """Whether a batch holds these documents in its layout, where labels stand for what was masked."""
    ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    joined = torch.from_numpy(np.concatenate(expected))
    if data.layout == "naive":
        whole = len(joined) // data.max_length * data.max_length
        assert torch.equal(ids.flatten(), joined[: whole or None])
        assert whole == 0 or ids.shape[1] == data.max_length
    elif data.layout == "padded":
        assert torch.equal(ids[batch["attention_mask"].bool()], joined)
        assert batch["attention_mask"].sum(1).tolist() == list(map(len, expected))
    else:
        assert torch.equal(ids[0], joined) and len(ids) == 1
        assert batch["cu_seq_lens_q"].diff().tolist() == list(map(len, expected))


training = adam | {
    "learning_rate": st.floats(1e-4, 1e-2),
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
        # Steps, or below 1 a share of the three.
        every = int(values["logging_steps"]) or math.ceil(3 * values["logging_steps"])
        windows = [expected[end - every : end] for end in range(every, 4, every)]
        means = [sum(step.loss for step in window) / every for window in windows]
        assert [entry["loss"] for entry in log] == pytest.approx(means, rel=1e-5)
        for name in ("grad_norm", "learning_rate"):
            last = [vars(window[-1])[name] for window in windows]
            assert [entry[name] for entry in log] == pytest.approx(last, rel=1e-4)
        for name, weight in model.named_parameters():
            assert torch.allclose(weight, weights[name], rtol=1e-4, atol=1e-3 * arguments.learning_rate), name

    check()
