"""What pretraining at full size costs, computed from the FLOPs of a step and the bytes it keeps. Prints the tables of
benchmarks/results/scaling.md.

    python benchmarks/scaling.py

No speed was measured on a GPU here. FLOPs are counted by `neobert_hf.training.flops`. The activations that are kept
for the backward pass are counted on a CPU. Their number and dtypes are those of a GPU once the model's special backward
passes for CPUs are switched off.
"""

from unittest import mock

import torch
from runner import table

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.modeling_neobert import NeoBERTRMSNorm
from neobert_hf.training.flops import DATASHEET_PEAKS, training_flops


H100, STEP_TOKENS = DATASHEET_PEAKS["H100"], 2**21
STAGES = {"stage 1: 1,000,000 steps at 1,024": (1_000_000, 1024), "stage 2: 50,000 steps at 4,096": (50_000, 4096)}
# By number of GPUs, the bytes per second at which one GPU exchanges gradients: NVLink within a machine, 400 Gbit/s
# InfiniBand between machines.
LINKS = {8: 450e9, 64: 50e9}
MFUS = (0.3, 0.4, 0.5)


def flops_per_token(length: int, masked: float = 0.2) -> float:
    """FLOPs of forward and backward pass if all documents have `length` tokens, which is the most a token can cost."""
    return training_flops(NeoBERTConfig(), length, length**2, round(masked * length)) / length


def gpu_hours(steps: int, length: int, mfu: float) -> float:
    return steps * STEP_TOKENS * flops_per_token(length) / (mfu * H100) / 3600


def both_stages(mfu: float) -> float:
    return sum(gpu_hours(*stage, mfu) for stage in STAGES.values())


def kept_bytes(layers: int, tokens: int = 512) -> int:
    """Bytes that are kept for the backward pass in bf16 autocast, without weights.

    The batch is one document, since a CPU computes the attention of packed documents in float32.
    """
    model = NeoBERTForMaskedLM(NeoBERTConfig(num_hidden_layers=layers, sparse_prediction=True))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(5, 30522, (1, tokens))
    labels = torch.where(torch.arange(tokens) % 5 == 0, ids, -100)
    # On a GPU, norms are one kernel.
    as_on_gpu = mock.patch.object(NeoBERTRMSNorm, "forward", torch.nn.RMSNorm.forward)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, as_on_gpu, torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=labels).loss
    # Autocast's bf16 copies of the weights are kept once, not for each token, so they are subtracted.
    cast = sum(parameter.numel() * 2 for parameter in model.parameters() if parameter.ndim > 1)
    cast -= model.model.encoder.weight.numel() * 2
    assert loss.requires_grad
    return sum(kept.values()) - cast


def cost_table() -> str:
    rows = []
    for name, (steps, length) in STAGES.items():
        token = flops_per_token(length)
        hours = [f"{gpu_hours(steps, length, mfu):,.0f}" for mfu in MFUS]
        rows.append([name, f"{token / 1e9:.2f}", f"{steps * STEP_TOKENS * token:.2e}", *hours])
    rows.append(["both", "", "", *(f"{both_stages(mfu):,.0f}" for mfu in MFUS)])
    head = ["", "GFLOP a token", "total FLOP", "GPU hours at 30%", "at 40%", "at 50% MFU"]
    return table(head, rows)


def share_table() -> str:
    config = NeoBERTConfig()
    rows = {"linear layers": [], "attention": [], "decoder on the masked fifth": []}
    for length in (1024, 4096):
        linear = training_flops(config, 1, 0, 0)
        attention = training_flops(config, 0, length, 0)
        whole = flops_per_token(length)
        for cells, flops in zip(rows.values(), (linear, attention, whole - linear - attention)):
            cells.append(f"{flops / whole:.0%}")
    return table(
        ["part of a token's FLOPs", "1,024 tokens", "4,096 tokens"], [[name, *cells] for name, cells in rows.items()]
    )


def memory_table(parameters: int) -> str:
    few, many = kept_bytes(1), kept_bytes(3)
    layer = (many - few) / 2 / 512
    token = layer * NeoBERTConfig().num_hidden_layers + (few - layer * 512) / 512
    activations = f"activations of 32,768 tokens, {layer / 1e3:.1f} kB a layer and token"
    weights = "weights, gradients and AdamW's two moments, float32 (DDP)"
    rows = [[weights, f"{16 * parameters / 1e9:.1f}"], [activations, f"{32768 * token / 1e9:.1f}"]]
    return table(["memory of one GPU", "GB"], rows)


def scale_table(parameters: int) -> str:
    rows = []
    for gpus, link in LINKS.items():
        seconds = STEP_TOKENS * flops_per_token(1024) / (0.4 * H100 * gpus)
        exchange = 2 * 4 * parameters * (gpus - 1) / gpus / link
        days = both_stages(0.4) / gpus / 24 * (1 + exchange / seconds)
        steps = STEP_TOKENS // (32768 * gpus)
        rows.append([gpus, steps, f"{seconds:.3f}", f"{exchange:.3f}", f"{days:.1f}"])
    seconds = "seconds of computing a step at 40%"
    return table(["GPUs", "accumulation", seconds, "of exchanging gradients", "days for both stages"], rows)


def tables() -> list[str]:
    parameters = sum(weight.numel() for weight in NeoBERTForMaskedLM(NeoBERTConfig()).parameters())
    return [cost_table(), share_table(), memory_table(parameters), scale_table(parameters)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
