"""Promise 8: pretraining has the numbers of the paper's formulas, written out here in a plain loop."""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import set_seed

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.data.batches import DataArguments
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import DocumentKey
from neobert_hf.pretraining.data import read_data
from neobert_hf.pretraining.flops import training_flops
from neobert_hf.pretraining.optimizers import build_optimizer, build_schedule
from neobert_hf.pretraining.recipe import build_config
from neobert_hf.pretraining.settings import ModelArguments, PretrainingArguments
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.run import Run
from tests.helpers.models import ragged_batch, small_model
from tests.helpers.plain_neobert import plain_hidden_states
from tests.helpers.small_tokenizer import small_tokenizer


def arguments_with(**values) -> PretrainingArguments:
    fixed = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    return PretrainingArguments(**fixed | values)


def plain_learning_rate(arguments: PretrainingArguments, step: int) -> float:
    """Of the step that follows `step` others."""
    steps, warmup = arguments.max_steps, arguments.warmup_steps
    warmup = int(warmup) if warmup >= 1 else math.ceil(warmup * steps)
    if step < warmup:
        return arguments.learning_rate * step / warmup
    if arguments.schedule == "constant":
        return arguments.learning_rate
    if arguments.schedule == "wsd":
        decay = math.ceil(arguments.decay_steps * steps) if arguments.decay_steps <= 1 else arguments.decay_steps
        done = max(0, step - (steps - decay)) / decay
        return arguments.learning_rate * (1 - (math.sqrt(done) if arguments.decay_shape == "1-sqrt" else done))
    if arguments.schedule == "linear":
        return arguments.learning_rate * max(0, steps - step) / (steps - warmup)
    # The cosine is at its floor, a tenth, after 90% of the steps.
    end = round(0.9 * steps)
    done = 1.0 if step >= end or end <= warmup else (step - warmup) / (end - warmup)
    # A warm-up until then or longer is followed by the peak itself, once.
    done = 0.0 if step == warmup else done
    return arguments.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@pytest.mark.parametrize("name", ["cosine_to_floor", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 0.06, 0.5, 17, 18, 20])
def test_schedules(name, warmup):
    arguments = arguments_with(learning_rate=0.3, max_steps=20, warmup_steps=warmup, schedule=name)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    schedule = build_schedule(name, optimizer, arguments.get_warmup_steps(20), 20)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_learning_rate(arguments, step), rel=1e-9), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
@pytest.mark.parametrize("decay", [0.2, 0.01, 1.0, 3, 13])
def test_the_last_steps_of_wsd_fall_to_0(shape, decay):
    options = {"schedule": "wsd", "decay_steps": decay, "decay_shape": shape}
    arguments = arguments_with(learning_rate=0.3, max_steps=20, warmup_steps=0 if decay == 1.0 else 7, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    schedule = build_schedule("wsd", optimizer, arguments.get_warmup_steps(20), 20, decay, shape)
    for step in range(21):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_learning_rate(arguments, step), abs=1e-9), step
        optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match="`warmup_steps` and `decay_steps` are 8 and 13"):
        build_schedule("wsd", optimizer, 8, 20, 13, shape)


@pytest.mark.parametrize("chosen_share", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("mask, other", [(1.0, 0.0), (0.8, 0.1), (0.0, 0.5), (0.3, 0.7)])
def test_masks(chosen_share, mask, other):
    """Of 4,000 tokens as many are chosen, masked and replaced as the settings say, and no special one."""
    tokenizer, ids = small_tokenizer(), np.random.default_rng(0).integers(0, 100, size=4_000)
    masked = MLMCollator(tokenizer, chosen_share, mask, other).mask(ids, DocumentKey(3, 1, 0))
    # The share may be another one at this step of the training.
    again = MLMCollator(tokenizer, 0.5, mask, other).mask(ids, DocumentKey(3, 1, 0, chosen_share))
    assert all(torch.equal(masked[name], again[name]) for name in masked)
    ids, found, labels = torch.from_numpy(ids), masked["input_ids"], masked["labels"]
    chosen = labels != -100
    # The first five entries of the vocabulary are the special tokens.
    assert not chosen[ids < 5].any() and torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(found[~chosen], ids[~chosen])

    def close(count, total: int, share: float) -> bool:
        """Within five standard deviations of a binomial count; rare events have longer tails."""
        return abs(int(count) - total * share) <= 5 * (total * share * (1 - share)) ** 0.5 + 5

    number = int(chosen.sum())
    assert close(number, int((ids >= 5).sum()), chosen_share)
    # A random token is [MASK], or the one that was there, once in a hundred times.
    assert close((found[chosen] == tokenizer.mask_token_id).sum(), number, mask + other / 100)
    assert close((found[chosen] == ids[chosen]).sum(), number, 1 - mask - other + other / 100)


def plain_steps(train, data: DataArguments, arguments: PretrainingArguments, config, weights) -> Iterator[dict]:
    """What each step of training `weights`, the tensors of a `NeoBERTForMaskedLM`, logs. They change with it.

    Of the package it takes what is random: the micro-batches, and the mask of each document.
    """
    decays = {True: arguments.weight_decay, False: 0.0}
    groups = [
        {"params": [weight], "weight_decay": decays[weight.ndim > 1 or arguments.decay_norms_and_biases]}
        for weight in weights.values()
    ]
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=arguments.adam_epsilon, foreach=False)
    batches, micro_batches = iter(train.sampler), data.global_batch_tokens // data.micro_batch_tokens
    for step in range(arguments.max_steps):
        rows = [row for keys in islice(batches, micro_batches) for row in rows_of(train, keys, data)]
        loss = torch.cat([masked_losses(weights, config, *row) for row in rows]).mean()
        gradients = torch.autograd.grad(loss, weights.values(), allow_unused=True)
        for weight, gradient in zip(weights.values(), gradients):
            weight.grad = torch.zeros_like(weight) if gradient is None else gradient
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), arguments.max_grad_norm or math.inf)
        rate = plain_learning_rate(arguments, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        yield {"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate}


def rows_of(train, keys: list, data: DataArguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each sequence within which tokens attend to each other."""
    documents = [train.collator.mask(row["input_ids"], row["key"]) for row in train.documents.__getitems__(keys)]
    rows = [(document["input_ids"], document["labels"]) for document in documents]
    if data.layout == "naive":
        joined = [torch.cat(parts) for parts in zip(*rows)]
        whole = len(joined[0]) // data.max_length * data.max_length
        rows = list(zip(*(part[: whole or None].split(data.max_length) for part in joined)))
    if all(label == -100 for _, labels in rows for label in labels.tolist()):
        # Something is to be predicted in every batch: the ordinary token in the middle of its first row.
        (ids, labels), tokenizer = rows[0], train.collator.tokenizer
        ordinary = [place for place, token in enumerate(ids.tolist()) if token not in tokenizer.all_special_ids]
        place = ordinary[len(ordinary) // 2]
        labels[place], ids[place] = ids[place].item(), tokenizer.mask_token_id
    return rows


def masked_losses(weights: dict[str, torch.Tensor], config, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    backbone = {name.removeprefix("model."): weight for name, weight in weights.items()}
    states = plain_hidden_states(backbone, config, ids)[labels != -100]
    logits = states @ weights["decoder.weight"].T + weights["decoder.bias"]
    return F.cross_entropy(logits, labels[labels != -100], reduction="none")


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"embedding_init_range": 0.5, "decoder_init_range": 0.2}
# Architecture, data and training, in the second and later ones far from the defaults.
RUNS = {
    "packed": ({}, {"max_length": 40}, {"schedule": "cosine_to_floor"}),
    "packed, a step of one micro-batch": (
        {"rms_norm": False},
        {"max_length": 16, "global_batch_tokens": 48, "mask_replace_prob": 0.5},
        {"schedule": "constant", "warmup_steps": 0, "adam_beta1": 0.5, "adam_beta2": 0.8, "weight_decay": 2.0},
    ),
    "padded": (
        {"rope": False, "rms_norm": False, "hidden_act": "gelu", "norm_eps": 1e-2},
        {"max_length": 32, "layout": "padded"},
        {"schedule": "linear", "decay_norms_and_biases": False, "weight_decay": 1.5, "max_grad_norm": 0.0},
    ),
    "padded, with few labels": (
        {"hidden_act": "gelu"},
        {"max_length": 10, "layout": "padded", "mlm_probability": 0.02},
        {"schedule": "constant", "adam_epsilon": 1e-2, "logging_steps": 2, "seed": 7},
    ),
    "naive": (
        {"rope": False},
        {"max_length": 24, "layout": "naive", "mlm_probability": 0.9},
        {"schedule": "linear", "warmup_steps": 0, "max_grad_norm": 0.1, "logging_steps": 3, "seed": 2**32 - 1},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_training(name, prepared, tmp_path):
    """Three steps of the Trainer against a plain loop, in float64: Adam makes much of what float32 rounds."""
    architecture, data, values = RUNS[name]
    sizes = {"micro_batch_tokens": 3 * data["max_length"], "global_batch_tokens": 9 * data["max_length"]}
    data = DataArguments([str(prepared / "train")], **sizes | data)
    every = values.get("logging_steps", 1)
    defaults = {"output_dir": str(tmp_path), "save_strategy": "no", "max_steps": 3, "warmup_steps": 1}
    arguments = arguments_with(**defaults | {"learning_rate": 3e-3, "logging_steps": 1} | values)
    arguments.gradient_accumulation_steps = data.accumulation_steps(1)
    material = read_data(data, arguments)
    set_seed(arguments.seed)
    model = NeoBERTForMaskedLM(build_config(ModelArguments(**SIZES | architecture), data, material, None)).double()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    expected = list(plain_steps(material.train, data, arguments, model.config, weights))
    trainer = MLMTrainer(model, arguments, material, Run(tmp_path))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    windows = [expected[end - every : end] for end in range(every, 4, every)]
    means = [sum(step["loss"] for step in window) / every for window in windows]
    assert [entry["loss"] for entry in log] == pytest.approx(means, rel=1e-5)
    for key in ("grad_norm", "learning_rate"):
        assert [entry[key] for entry in log] == pytest.approx([window[-1][key] for window in windows], rel=1e-4)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight, weights[name], rtol=1e-4, atol=1e-3 * arguments.learning_rate), name


def test_muon_takes_the_hidden_matrices_and_learns():
    ids, mask = ragged_batch()
    labels = torch.where(mask.bool(), ids, -100)
    model = small_model(NeoBERTForMaskedLM).train()
    arguments = arguments_with(optimizer="muon", learning_rate=2e-3, weight_decay=0.1)
    optimizer, losses = build_optimizer(model, arguments), []
    muon = {id(weight) for group in optimizer.param_groups if group["use_muon"] for weight in group["params"]}
    for name, weight in model.named_parameters():
        assert (id(weight) in muon) == (weight.ndim == 2 and "transformer_encoder." in name), name
    for _ in range(12):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_muon_takes_query_key_and_value_and_gate_and_input_each_as_a_matrix():
    """Its step on the fused matrices is that of plain Muon on separate ones."""
    model = small_model(NeoBERTForMaskedLM)
    heads, block = model.config.num_attention_heads, model.model.transformer_encoder[0]
    arguments = arguments_with(optimizer="muon", learning_rate=2e-3, weight_decay=0.1)
    optimizer = build_optimizer(model, arguments)
    ids, _ = ragged_batch()
    model(ids, labels=ids).loss.backward()
    separate = {
        "query, key, value": (block.qkv.weight, lambda matrix: matrix.view(heads, 3, -1, 64).unbind(1)),
        "gate, input": (block.ffn.w12.weight, lambda matrix: matrix.chunk(2)),
    }
    expected = {}
    for name, (fused, parts) in separate.items():
        weights = [torch.nn.Parameter(part.reshape(-1, 64).detach().clone()) for part in parts(fused)]
        for weight, gradient in zip(weights, parts(fused.grad)):
            weight.grad = gradient.reshape(-1, 64).clone()
        group = {"params": weights, "use_muon": True}
        type(optimizer)([group], lr=2e-3, weight_decay=0.1, use_adjusted_lr=True).step()
        expected[name] = torch.stack([weight.detach() for weight in weights])
    optimizer.step()
    for name, (fused, parts) in separate.items():
        found = torch.stack([part.reshape(-1, 64) for part in parts(fused.detach())])
        # Steps are of 4e-4; where a CPU computes in bfloat16, the order of its sums shows.
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-5)


def test_flops_against_the_profiler():
    model = small_model(NeoBERTForMaskedLM, attn_implementation="eager", sparse_prediction=True)
    ids = torch.randint(5, model.config.vocab_size, (3, 40))
    labels = torch.where(torch.rand(3, 40) < 0.2, ids, -100)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).loss.backward()
    expected = training_flops(model.config, 120, 3 * 40**2, int((labels != -100).sum()))
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)
