"""Pretraining written from the paper in a plain loop, one document at a time: what the Trainer must equal.

Of the package it takes what is random: the micro-batches, and the mask of each document.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn import functional as F

from neobert_hf.data.batches import DataArguments
from neobert_hf.training.pretraining import MicroBatches, PretrainingArguments
from tests.helpers.plain_neobert import plain_hidden_states


@dataclass
class PlainStep:
    loss: float
    grad_norm: float
    learning_rate: float


def learning_rate(arguments: PretrainingArguments, step: int) -> float:
    """Of the step that follows `step` others."""
    steps, warmup = arguments.max_steps, arguments.warmup_steps
    warmup = int(warmup) if warmup >= 1 else math.ceil(warmup * steps)
    if step < warmup:
        return arguments.learning_rate * step / warmup
    if arguments.schedule == "constant":
        return arguments.learning_rate
    if arguments.schedule == "linear":
        return arguments.learning_rate * max(0, steps - step) / (steps - warmup)
    # The cosine is at its floor, a tenth, after 90% of the steps.
    end = round(0.9 * steps)
    done = 1.0 if step >= end or end <= warmup else (step - warmup) / (end - warmup)
    # A warm-up until then or longer is followed by the peak itself, once.
    done = 0.0 if step == warmup else done
    return arguments.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def build_adamw(arguments: PretrainingArguments, weights: dict[str, torch.Tensor]) -> torch.optim.AdamW:
    decays = {True: arguments.weight_decay, False: 0.0}
    groups = [
        {"params": [weight], "weight_decay": decays[weight.ndim > 1 or arguments.decay_norms_and_biases]}
        for weight in weights.values()
    ]
    return torch.optim.AdamW(
        groups, betas=(arguments.adam_beta1, arguments.adam_beta2), eps=arguments.adam_epsilon, foreach=False
    )


def plain_pretraining(
    train: MicroBatches, data: DataArguments, arguments: PretrainingArguments, config, weights: dict[str, torch.Tensor]
) -> Iterator[PlainStep]:
    """Each step of training `weights`, the tensors of a `NeoBERTForMaskedLM`, which change with it."""
    optimizer, batches = build_adamw(arguments, weights), iter(train.sampler)
    micro_batches = data.global_batch_tokens // data.micro_batch_tokens
    for step in range(arguments.max_steps):
        losses = []
        for keys in islice(batches, micro_batches):
            for ids, labels in rows_of(train, keys, data):
                losses.append(masked_losses(weights, config, ids, labels))
        losses = torch.cat(losses)
        loss = losses.sum() / len(losses)
        gradients = torch.autograd.grad(loss, weights.values(), allow_unused=True)
        for weight, gradient in zip(weights.values(), gradients):
            weight.grad = torch.zeros_like(weight) if gradient is None else gradient
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), arguments.max_grad_norm or math.inf)
        rate = learning_rate(arguments, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        yield PlainStep(loss.item(), norm.item(), rate)


def rows_of(train: MicroBatches, keys: list, data: DataArguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
