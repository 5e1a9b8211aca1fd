"""Stand-ins for a GPU's driver and kernels, for test_gpu_dry_run.py: CUDA is there, and its tensors lie on the CPU.

All other code of the benchmarks and of the model is the one that a GPU runs, at tiny size, with blocks compiled without
code generation. A card of `MEMORY` tokens runs out of it.
"""

from contextlib import contextmanager, nullcontext
from functools import cache, partial

import gpu
import gpu_probe
import throughput
import torch
import torch.nn.attention.varlen
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from neobert_hf import attention_neobert
from tests.benchmarks.test_throughput import shrink_encoders


MEMORY = 64
real_compile, real_sdpa_kernel, real_make_batch = torch.compile, gpu_probe.sdpa_kernel, throughput.make_batch
real_sdpa_attention = attention_neobert.sdpa_attention_forward


class Graph:
    """Recorded kernels: here nothing is recorded, and nothing runs again."""

    def replay(self) -> None:
        pass


@contextmanager
def recording(graph: Graph):
    assert not torch.is_grad_enabled()
    yield


class Profile(torch.profiler.profile):
    """What takes time on the CPU, as if it were the device."""

    def __init__(self, activities: list):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU])

    def key_averages(self):
        events = super().key_averages()
        for event in events:
            event.self_device_time_total = event.self_cpu_time_total
        return events


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """(batch, length, heads, dim_head)."""
    states = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*states, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """(tokens, heads, dim_head), as one step of a graph."""
    states = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return attention_neobert.attend_to_documents(*states, cu_seqlens_q, softmax_scale or q.shape[-1] ** -0.5)[0]


def sdpa_attention_forward(module, query, key, value, attention_mask, cu_seq_lens_q=None, **options):
    """Offsets that lie on the CPU go to torch's varlen kernel, as those of a GPU do."""
    if cu_seq_lens_q is None:
        return real_sdpa_attention(module, query, key, value, attention_mask, **options)
    documents = (states[0].transpose(0, 1) for states in (query, key, value))
    longest = options["max_length_q"]
    varlen = torch.nn.attention.varlen.varlen_attn
    return varlen(*documents, cu_seq_lens_q, cu_seq_lens_q, longest, longest).unsqueeze(0), None


def limited_make_batch(config, lengths: torch.Tensor, packed: bool) -> tuple:
    if len(lengths) * int(lengths.max()) > MEMORY:
        raise torch.OutOfMemoryError(f"a card of {MEMORY} tokens")
    return real_make_batch(config, lengths, packed)


def stand_in_for_the_driver() -> None:
    torch.cuda.get_device_name = lambda *device: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda: None)
    torch.cuda.max_memory_allocated = lambda: 2**20
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, recording
    torch.profiler.profile = Profile


def stand_in_for_kernels(version: int) -> None:
    """Those of torch, and the FlashAttention of this version; 0 is none, as on an image without its packages."""
    torch.compile = partial(real_compile, backend="eager")
    gpu_probe.sdpa_kernel = lambda way: nullcontext() if way is SDPBackend.CUDNN_ATTENTION else real_sdpa_kernel(way)
    torch.nn.attention.varlen.varlen_attn = flash_attn_varlen_func
    real_check = attention_neobert.has_varlen_kernel

    def has_varlen_kernel(device, *arguments) -> bool:
        return real_check(torch.device("cuda"), *arguments)

    attention_neobert.has_varlen_kernel = has_varlen_kernel
    attention_neobert.sdpa_attention_forward = sdpa_attention_forward
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash_utils._pad_input, flash_utils._unpad_input)
    flash_utils._lazy_imports = lambda *args, **kwargs: functions
    gpu.transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *args, **kwargs: True
    for number, found in flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX.items():
        found["general_availability_check"] = lambda number=number: number == version


def make_everything_tiny() -> None:
    shrink_encoders()
    throughput.CHECKPOINTING_LENGTH = 8
    throughput.make_batch = limited_make_batch
    throughput.product_flops = cache(throughput.product_flops)
    gpu.Sizes = partial(gpu_probe.Sizes, tokens=64, copied=2**16, few=(16,), layers=1, seconds=0.0)
    gpu.ThroughputArguments = partial(throughput.ThroughputArguments, seconds=0.0)


def main(version: int) -> None:
    """Run gpu.py with FlashAttention of this version installed; forward.py must have said before that CUDA is there."""
    stand_in_for_the_driver()
    stand_in_for_kernels(version)
    make_everything_tiny()
    gpu.main()
