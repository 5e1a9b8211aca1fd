"""What pretraining at full size costs, from the FLOPs of a step and the bytes it keeps. Prints the tables of
docs/scaling.md.

    python benchmarks/scaling.py

Nothing here is a speed that was measured on a GPU: FLOPs are counted by `neobert_hf.pretraining.training_flops`, kept
activations on a CPU, where their number and dtypes are the same.
"""

import torch

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.pretraining.trainer import DATASHEET_PEAKS, training_flops


H100, STEP_TOKENS = DATASHEET_PEAKS["H100"], 2**21
STAGES = {"stage 1: 1,000,000 steps at 1,024": (1_000_000, 1024), "stage 2: 50,000 steps at 4,096": (50_000, 4096)}
# Bytes a second of one GPU's gradients: NVLink within a machine, 400 Gbit/s InfiniBand between machines.
LINKS = {8: 450e9, 64: 50e9}


def flops_per_token(length: int, masked: float = 0.2) -> float:
    """Forward and backward, of documents that are all `length` tokens long: the most that a token can cost."""
    return training_flops(NeoBERTConfig(), length, length**2, round(masked * length)) / length


def gpu_hours(steps: int, length: int, mfu: float) -> float:
    return steps * STEP_TOKENS * flops_per_token(length) / (mfu * H100) / 3600


def kept_bytes(layers: int, tokens: int = 512) -> int:
    """Bytes that the backward pass of packed documents in bf16 autocast needs, without weights."""
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
    offsets = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=labels, cu_seq_lens_q=offsets).loss
    # The weights that autocast cast to bf16 are kept once, not for each token.
    cast = sum(parameter.numel() * 2 for parameter in model.parameters() if parameter.ndim > 1)
    cast -= model.model.encoder.weight.numel() * 2
    assert loss.requires_grad
    return sum(kept.values()) - cast


def tables() -> list[list[str]]:
    config = NeoBERTConfig()
    parameters = sum(weight.numel() for weight in NeoBERTForMaskedLM(config).parameters())
    costs = [
        "| | GFLOP a token | total FLOP | GPU hours at 30% | at 40% | at 50% MFU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (steps, length) in STAGES.items():
        hours = " | ".join(f"{gpu_hours(steps, length, mfu):,.0f}" for mfu in (0.3, 0.4, 0.5))
        total = steps * STEP_TOKENS * flops_per_token(length)
        costs.append(f"| {name} | {flops_per_token(length) / 1e9:.2f} | {total:.2e} | {hours} |")
    hours = [sum(gpu_hours(*stage, mfu) for stage in STAGES.values()) for mfu in (0.3, 0.4, 0.5)]
    costs.append(f"| both | | | {' | '.join(f'{value:,.0f}' for value in hours)} |")

    shares = ["| part of a token's FLOPs | 1,024 tokens | 4,096 tokens |", "| --- | --- | --- |"]
    parts = {"linear layers": lambda length: training_flops(config, 1, 0, 0)}
    parts["attention"] = lambda length: training_flops(config, 0, length, 0)
    parts["decoder on the masked fifth"] = lambda length: (
        flops_per_token(length) - sum(parts[name](length) for name in ("linear layers", "attention"))
    )
    for name, cost in parts.items():
        values = " | ".join(f"{cost(length) / flops_per_token(length):.0%}" for length in (1024, 4096))
        shares.append(f"| {name} | {values} |")

    few, many = kept_bytes(1), kept_bytes(3)
    layer = (many - few) / 2 / 512
    token = layer * config.num_hidden_layers + (few - layer * 512) / 512
    gradients = 4 * parameters
    memory = ["| memory of one GPU | GB |", "| --- | --- |"]
    memory.append(f"| weights, gradients and AdamW's two moments, float32 (DDP) | {16 * parameters / 1e9:.1f} |")
    memory.append(
        f"| activations of 32,768 tokens, {layer / 1e3:.1f} kB a layer and token | {32768 * token / 1e9:.1f} |"
    )

    scale = [
        "| GPUs | accumulation | seconds of computing a step at 40% | of exchanging gradients | days for both stages |"
    ]
    scale.append("| --- | --- | --- | --- | --- |")
    for gpus, link in LINKS.items():
        seconds = STEP_TOKENS * flops_per_token(1024) / (0.4 * H100 * gpus)
        exchange = 2 * gradients * (gpus - 1) / gpus / link
        days = hours[1] / gpus / 24 * (1 + exchange / seconds)
        scale.append(f"| {gpus} | {STEP_TOKENS // (32768 * gpus)} | {seconds:.3f} | {exchange:.3f} | {days:.1f} |")
    return [costs, shares, memory, scale]


if __name__ == "__main__":
    print("\n\n".join("\n".join(table) for table in tables()))
