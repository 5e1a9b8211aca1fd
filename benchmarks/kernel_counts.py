"""Kernels and bytes of one layer's forward pass on a GPU, counted without a GPU: how much is not matrix products.

    python benchmarks/kernel_counts.py

The model takes the code path of a GPU on tensors without data, in bfloat16. Every operation that is not a view counts
as one kernel that reads its inputs and writes its outputs once; attention is one kernel. The counts of two models of
different depth are subtracted, so that what happens once per pass does not count. Compiled blocks fuse element-wise
operations.
"""

from collections import defaultdict

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neobert_hf import NeoBERTConfig, NeoBERTModel, attention_neobert


TOKENS = {"8 x 512": (8, 512), "4 x 4,096": (4, 4096)}
DOCUMENTS = 16


class KernelCount(TorchDispatchMode):
    """Kernels and bytes by operation, in `kernels` and `moved`."""

    def __init__(self):
        super().__init__()
        self.kernels, self.moved = defaultdict(int), defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        # Views return an alias, and in-place operations write to it.
        is_view = any(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        if not is_view and not name.startswith(("empty", "_assert", "detach", "is_", "_unsafe_view")):
            self.kernels[name] += 1
            self.moved[name] += sum(size_in_memory(leaf) for leaf in tree_leaves((args, kwargs, out)))
        return out


def size_in_memory(leaf) -> int:
    """Bytes in memory; those of an expanded tensor count once."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    numbers = 1
    for size, stride in zip(leaf.shape, leaf.stride()):
        numbers *= size if stride else 1
    return numbers * leaf.element_size()


def count(layers: int, rows: int, length: int, packed: bool) -> KernelCount:
    """Run this many layers of the published width, on whole rows, or on the same tokens packed into one row."""
    config = NeoBERTConfig(num_hidden_layers=layers, max_length=length)
    with torch.device("meta"), torch.no_grad():
        model = NeoBERTModel._from_config(config, dtype=torch.bfloat16).eval()
        # There are no values to check.
        model.check_values = False
        inputs = {"input_ids": torch.empty((1, rows * length) if packed else (rows, length), dtype=torch.long)}
        if packed:
            inputs["cu_seq_lens_q"] = torch.empty(DOCUMENTS + 1, dtype=torch.int32)
            inputs["max_length_q"] = length
        with KernelCount() as counted:
            model(**inputs)
    return counted


def attend_to_rows(query, key, value, mask=None, dropout_p=0.0, scale=None):
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]


def per_layer(rows: int, length: int, packed: bool) -> dict[str, tuple[int, float]]:
    """Kernels of a layer and their bytes a token, by operation."""
    shallow, deep = (count(layers, rows, length, packed) for layers in (1, 3))
    table = {}
    for name, kernels in deep.kernels.items():
        if kernels > shallow.kernels[name]:
            moved = (deep.moved[name] - shallow.moved[name]) / (2 * rows * length)
            table[name] = (kernels - shallow.kernels[name]) // 2, moved
    return table


def main() -> None:
    attention_neobert.has_varlen_kernel = lambda *arguments: True
    attention_neobert.find_faster_kernel = lambda *arguments: None
    F.scaled_dot_product_attention = attend_to_rows
    # A GPU has one kernel for a norm, which moves as much as a copy (`clone`). Without data, torch would decompose it.
    F.rms_norm = lambda states, *arguments: states.clone()
    # It does not know the device `meta` of the tensors.
    torch.is_autocast_enabled = lambda *arguments: False
    for title, (rows, length) in TOKENS.items():
        for packed in (False, True):
            table = per_layer(rows, length, packed)
            kernels, moved = (sum(column) for column in zip(*table.values()))
            layout = "packed" if packed else "whole rows"
            print(f"\n{title} tokens, {layout}: {kernels} kernels, {moved / 1e3:.1f} kB a token")
            for name, (number, size) in sorted(table.items(), key=lambda item: -item[1][1]):
                print(f"  {name:32} {number:3} {size / 1e3:7.1f} kB")


if __name__ == "__main__":
    main()
