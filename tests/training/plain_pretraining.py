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


class PlainAdam:
    """Adam or AdamW, with a moment for each number of each tensor by name."""

    def __init__(self, arguments: PretrainingArguments, weights: dict[str, torch.Tensor]):
        self.arguments = arguments
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], rate: float) -> None:
        self.steps += 1
        beta1, beta2 = self.arguments.adam_beta1, self.arguments.adam_beta2
        for name, weight in weights.items():
            first, second = self.moments[name]
            first.mul_(beta1).add_(gradients[name], alpha=1 - beta1)
            second.mul_(beta2).add_(gradients[name] ** 2, alpha=1 - beta2)
            denominator = (second / (1 - beta2**self.steps)).sqrt() + self.arguments.adam_epsilon
            decayed = weight.ndim > 1 or self.arguments.decay_norms_and_biases
            decay = self.arguments.weight_decay * weight if decayed else 0
            weight -= rate * (first / (1 - beta1**self.steps) / denominator + decay)


def plain_pretraining(
    train: MicroBatches, data: DataArguments, arguments: PretrainingArguments, config, weights: dict[str, torch.Tensor]
) -> Iterator[PlainStep]:
    """Each step of training `weights`, the tensors of a `NeoBERTForMaskedLM`, which change with it."""
    optimizer, batches = PlainAdam(arguments, weights), iter(train.sampler)
    micro_batches = data.global_batch_tokens // data.micro_batch_tokens
    for step in range(arguments.max_steps):
        losses = []
        for keys in islice(batches, micro_batches):
            for ids, labels in rows_of(train, keys, data):
                losses.append(masked_losses(weights, config, ids, labels))
        losses = torch.cat(losses)
        loss = losses.sum() / len(losses)
        gradients = dict(zip(weights, torch.autograd.grad(loss, weights.values(), allow_unused=True)))
        gradients = {name: torch.zeros_like(weights[name]) if g is None else g for name, g in gradients.items()}
        norm = sum((gradient**2).sum() for gradient in gradients.values()) ** 0.5
        if arguments.max_grad_norm:
            share = min(1.0, arguments.max_grad_norm / (norm.item() + 1e-6))
            gradients = {name: gradient * share for name, gradient in gradients.items()}
        rate = learning_rate(arguments, step)
        optimizer.step(weights, gradients, rate)
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
