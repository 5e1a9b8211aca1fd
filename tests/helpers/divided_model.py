"""One process of several that hold a NeoBERT together, for test_parallel.py.

It loads a folder once divided (tensor parallelism) and once whole, compares both in every layout, and saves what it has
divided. The process of rank 0 writes what it found as JSON.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

import neobert_hf
from tests.helpers.models import packed_batch, ragged_batch


IDS, MASK = ragged_batch()
PACKED_IDS, PACKED = packed_batch()
LABELS = torch.where(torch.arange(IDS.numel()).view(IDS.shape) % 3 == 0, IDS, -100)
BATCHES = {
    "dense": {"input_ids": IDS},
    "padded": {"input_ids": IDS, "attention_mask": MASK},
    "packed": {"input_ids": PACKED_IDS, **PACKED},
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(flags: list[str]) -> None:
    """Flags: the folder, the name of the class, how many processes, and rules in place of some of the plan, as JSON."""
    folder, cls, processes, plan = Path(flags[0]), getattr(neobert_hf, flags[1]), int(flags[2]), json.loads(flags[3])
    found = {}
    try:
        config = DistributedConfig(tp_size=processes, tp_plan=plan or "auto")
        model = cls.from_pretrained(folder, distributed_config=config)
    except ValueError as error:
        found["error"] = f"{error}"
    else:
        found |= compare(model, cls.from_pretrained(folder))
        model.save_pretrained(folder / "divided")
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def compare(model, reference) -> dict:
    """Largest differences of outputs and gradients, and the shapes that this process holds."""
    outputs = {}
    for name, batch in BATCHES.items():
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                difference = (model(**batch)[0] - reference(**batch)[0]).abs().max()
            outputs[f"{name}, {'with' if gradients else 'without'} gradients"] = difference.item()
    labels = {"labels": LABELS} if "MaskedLM" in type(model).__name__ else {"labels": torch.tensor([0, 1, 0, 1])}
    for one in (model, reference):
        one(**BATCHES["padded"], **labels).loss.backward()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    gradients = {name: (whole(left.grad) - right.grad).abs().max().item() for (name, left), right in pairs}
    divided = {name: list(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {"outputs": outputs, "gradients": gradients, "divided": divided}
