"""What pretraining at full size costs, computed from the FLOPs of a step and the bytes it keeps. Prints the tables of
benchmarks/results/scaling.md.

    python benchmarks/scaling.py

No speed is measured here. FLOPs are counted by `neobert_hf.pretraining.flops`, and the activations that are kept
for the backward pass on a CPU.
"""

from unittest import mock

import torch
from runner import table

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.modeling_neobert import NeoBERTRMSNorm
from neobert_hf.pretraining.flops import DATASHEET_PEAKS, training_flops


H100, STEP_TOKENS, MICRO_BATCH = DATASHEET_PEAKS["H100"], 2**21, 32_768
STAGES = {"stage 1: 1,000,000 steps at 1,024": (1_000_000, 1024), "stage 2: 50,000 steps at 4,096": (50_000, 4096)}


def flops_per_token(length: int, masked: float = 0.2) -> float:
    """FLOPs of forward and backward pass if all documents have `length` tokens, which is the most a token can cost."""
    return training_flops(NeoBERTConfig(), length, length**2, round(masked * length)) / length


def stage_flops(steps: int, length: int) -> float:
    return steps * STEP_TOKENS * flops_per_token(length)


def bytes_of_token(layers: int) -> float:
    """Bytes that each token adds to what is kept for the backward pass in bf16 autocast.

    A batch is one document, since a CPU computes the attention of packed documents in float32.
    """
    model = NeoBERTForMaskedLM(NeoBERTConfig(num_hidden_layers=layers, sparse_prediction=True))
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def kept_bytes(tokens: int) -> int:
        kept.clear()
        ids = torch.randint(5, 30522, (1, tokens))
        labels = torch.where(torch.arange(tokens) % 5 == 0, ids, -100)
        # On a GPU, norms are one kernel.
        as_on_gpu = mock.patch.object(NeoBERTRMSNorm, "forward", torch.nn.RMSNorm.forward)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, as_on_gpu, torch.autocast("cpu", torch.bfloat16):
            # What is kept lives as long as the loss.
            loss = model(ids, labels=labels).loss
        return sum(kept.values()) * loss.requires_grad

    # Weights, and autocast's copies of them, are as large for any number of tokens.
    return (kept_bytes(1020) - kept_bytes(510)) / 510


def cost_table() -> str:
    stages = {name: stage_flops(*stage) for name, stage in STAGES.items()}
    tokens = {name: f"{flops_per_token(length) / 1e9:.2f}" for name, (_, length) in STAGES.items()}
    rows = []
    for name, flops in {**stages, "both": sum(stages.values())}.items():
        counts = [tokens[name], f"{flops:.2e}"] if name in tokens else ["", ""]
        rows.append([name, *counts, *(f"{flops / mfu / H100 / 3600:,.0f}" for mfu in (0.3, 0.4, 0.5))])
    return table(["", "GFLOP a token", "total FLOP", "GPU hours at 30%", "at 40%", "at 50% MFU"], rows)


def share_table() -> str:
    config, columns = NeoBERTConfig(), []
    for length in (1024, 4096):
        linear, attention = training_flops(config, 1, 0, 0), training_flops(config, 0, length, 0)
        whole = flops_per_token(length)
        columns.append([f"{part / whole:.0%}" for part in (linear, attention, whole - linear - attention)])
    rows = zip(("linear layers", "attention", "decoder on the masked fifth"), *columns)
    return table(["part of a token's FLOPs", "1,024 tokens", "4,096 tokens"], list(rows))


def memory_table(parameters: int) -> str:
    few = bytes_of_token(1)
    layer = (bytes_of_token(3) - few) / 2
    token = few + layer * (NeoBERTConfig().num_hidden_layers - 1)
    activations = f"activations of {MICRO_BATCH:,} tokens, {layer / 1e3:.1f} kB a layer and token"
    weights = "weights, gradients and AdamW's two moments, float32 (DDP)"
    rows = [[weights, f"{16 * parameters / 1e9:.1f}"], [activations, f"{MICRO_BATCH * token / 1e9:.1f}"]]
    return table(["memory of one GPU", "GB"], rows)


def tables() -> list[str]:
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in NeoBERTForMaskedLM(NeoBERTConfig()).parameters())
    return [cost_table(), share_table(), memory_table(parameters)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
