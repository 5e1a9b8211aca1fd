"""Optimizers and learning-rate schedules of pretraining."""

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_constant_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from neobert_hf.pretraining.settings import PretrainingArguments


def build_optimizer(model: nn.Module, arguments: PretrainingArguments) -> torch.optim.Optimizer:
    """Build an optimizer over all trainable parameters.

    `arguments.optimizer` is `adamw` (paper; without weight decay it is the Adam of ablations M0 to M3) or `muon`
    (hidden matrices; AdamW for embeddings, decoder, norms and biases), which comes from `pytorch_optimizer`. Muon's
    updates are scaled to the size of AdamW's, so one learning rate fits both; it computes in float32 on a CPU without
    AVX512-BF16, elsewhere in bfloat16. NeoBERT keeps several projections in one matrix, and Muon takes each by itself:
    with a million tokens this was better than whole matrices in four pairs of runs of four, by 0.04 to 0.26 nats
    (benchmarks/NOTES.md). On CUDA, AdamW uses torch's `fused` kernels.

    References:
        AdamW: Loshchilov & Hutter, arXiv 1711.05101. Muon: Liu et al., 2502.16982.
    """
    rate, epsilon = arguments.learning_rate, arguments.adam_epsilon
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    groups = _parameter_groups(model, arguments)
    if arguments.optimizer == "muon":
        for group in groups:
            if not group["use_muon"]:
                group |= {"lr": rate, "betas": betas, "eps": epsilon}
        return _muon_class(arguments.device)(groups, lr=rate, weight_decay=arguments.weight_decay, use_adjusted_lr=True)
    for group in groups:
        del group["use_muon"]
    # `fused=None` leaves the choice to torch.
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=arguments.device.type == "cuda" or None)


def _muon_class(device: torch.device) -> type[torch.optim.Optimizer]:
    from pytorch_optimizer import Muon
    from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

    class OwnMuon(Muon):
        """Muon whose Newton-Schulz iterations are in float32 where bfloat16 is slow, and that knows of projections.

        `pytorch_optimizer` runs them in bfloat16, which a CPU without AVX512-BF16 emulates: a step of the small model
        took 0.294 s that way, and takes 0.072 s in float32. Its `Muon` has no option for this.
        """

        @staticmethod
        def _orthogonalize(group: dict, updates: list[torch.Tensor]) -> list[torch.Tensor]:
            if "projections" in group:
                return [orthogonalize_projections(update, group, OwnMuon._orthogonalize) for update in updates]
            if device.type != "cpu" or torch.cpu._is_avx512_bf16_supported():
                return Muon._orthogonalize(group, updates)
            settings = {"num_steps": group["ns_steps"], "weights": group["ns_coeffs"], "dtype": torch.float32}
            return [zero_power_via_newton_schulz_5(update, **settings) for update in updates]

    return OwnMuon


def orthogonalize_projections(update: torch.Tensor, group: dict, orthogonalize: Callable) -> torch.Tensor:
    """Orthogonalise each projection of a matrix by itself.

    Args:
        group: its `projections` are how many blocks of rows the matrix has, and how many projections share each block.
    """
    blocks, count = group["projections"]
    parts = update.unflatten(0, (blocks, count, -1)).transpose(0, 1).flatten(1, 2)
    plain = {name: value for name, value in group.items() if name != "projections"}
    found = torch.stack(orthogonalize(plain, list(parts)))
    # Muon scales by the root of the longer side of the whole matrix.
    found = found * math.sqrt(max(parts.shape[1:]) / max(update.shape))
    return found.unflatten(1, (blocks, -1)).transpose(0, 1).flatten(0, 2)


def _parameter_groups(model: nn.Module, arguments: PretrainingArguments) -> list[dict]:
    """Parameters with and without weight decay, each divided into hidden matrices (for Muon) and the rest."""
    several = {}
    if arguments.optimizer == "muon":
        # Of NeoBERT: query, key and value of each head in turn; gate and input one behind the other.
        several = {"qkv": (model.config.num_attention_heads, 3), "w12": (1, 2)}
    groups = defaultdict(list)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_matrix, names = weight.ndim > 1, name.split(".")
            decayed = is_matrix or arguments.decay_norms_and_biases
            # Every encoder of Transformers numbers its blocks, so a number in the name marks a hidden layer.
            hidden = is_matrix and any(part.isdecimal() for part in names)
            projections = [value for part, value in several.items() if part in names]
            groups[(decayed, hidden, *projections)].append(weight)
    found = []
    for (decayed, hidden, *projections), weights in sorted(groups.items(), reverse=True):
        group = {"params": weights, "weight_decay": arguments.weight_decay if decayed else 0.0, "use_muon": hidden}
        found.append(group | ({"projections": projections[0]} if projections else {}))
    return found


def build_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    max_steps: int,
    decay_steps: float = 0.2,
    decay_shape: str = "1-sqrt",
) -> LRScheduler:
    """Learning rate over the steps: a linear warm-up, then the named schedule.

    `cosine_to_floor` (paper, section 3.3) falls to 10% of the peak at 90% of `max_steps` and stays there.
    (Transformers' `cosine_with_min_lr` rises again past its end; its `warmup_stable_decay` warms up from the floor.)
    `linear` falls to 0 at `max_steps`, `constant` does not fall: stage 2 of the paper. `wsd` (warm-up, stable, decay)
    stays at the peak and falls to 0 in the last `decay_steps`, so that a run can be continued from where it was stable
    (Hägele et al., 2024, arXiv 2405.18392, who found 1 - sqrt better than a linear decay).

    Raises:
        ValueError: if the learning rate would never reach its peak.
    """
    if warmup_steps > max_steps:
        raise ValueError(f"`warmup_steps` is {warmup_steps}, more than all {max_steps} steps: lower it.")
    if name == "linear":
        return get_linear_schedule_with_warmup(optimizer, warmup_steps, max_steps)
    if name == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup_steps)
    if name == "wsd":
        decay_steps = math.ceil(decay_steps * max_steps) if decay_steps <= 1 else int(decay_steps)
        if warmup_steps + decay_steps > max_steps:
            raise ValueError(
                f"`warmup_steps` and `decay_steps` are {warmup_steps} and {decay_steps}, more than all {max_steps} "
                "steps: lower one."
            )
        return get_wsd_schedule(optimizer, warmup_steps, decay_steps, max_steps, decay_type=decay_shape)
    falling_steps = max(1, round(0.9 * max_steps) - warmup_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / falling_steps)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
