"""How long the parts of a forward pass take on this machine, one number at a time. benchmarks/gpu.py stores them.

Each number is measured by a function without arguments. It returns the seconds of one call, and its FLOPs or the bytes
that it has to read and write, from which the report computes a rate. Matrix products and attention have the published
sizes, in bfloat16 on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from encoders import build_config, build_model, forward_flops
from forward import CUDA, DEVICE, DTYPE
from throughput import PAPER_LENGTHS, time_steps
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from neobert_hf.attention_neobert import FASTER_KERNELS, find_faster_kernel
from neobert_hf.gradients_neobert import swiglu
from neobert_hf.modeling_neobert import swiglu_width
from neobert_hf.rotary_neobert import rotary_table, rotate


LONGEST = 32_768
KERNELS_SHOWN = 14


@dataclass(frozen=True)
class Sizes:
    """How large the probes are. The defaults exceed the caches of a GPU; on a CPU everything is tiny.

    Args:
        tokens: tokens of a batch.
        lengths: lengths of the sequences that the batch is cut into.
        copied: bytes of the tensor that is copied.
        few: tokens of the small batches.
        layers: layers of the model that runs the small batches.
        seconds: minimum seconds of a measurement, in repeated calls.
    """

    tokens: int = 65_536 if CUDA else 128
    lengths: tuple[int, ...] = (*PAPER_LENGTHS, LONGEST) if CUDA else (16, 64)
    copied: int = 2**31 if CUDA else 2**16
    few: tuple[int, ...] = (32, 512, 2048) if CUDA else (16,)
    layers: int = 28 if CUDA else 1
    seconds: float = 0.2 if CUDA else 0.0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def time_call(call: Callable[[], None], sizes: Sizes, **work: float) -> dict:
    """Seconds of a call and the work that it does. A first call, which chooses kernels and compiles, is not timed."""
    call()
    return {"seconds": time_steps(call, sizes.seconds)} | work


def probes(sizes: Sizes) -> dict[str, Callable[[], dict]]:
    """The functions that measure each number, by name, the most valuable first. None of them is called here."""
    config = build_config("NeoBERT")
    width, inner = config.hidden_size, swiglu_width(config)
    shapes = {"qkv": (width, 3 * width), "wo": (width, width), "w12": (width, 2 * inner), "w3": (inner, width)}
    shapes["decoder"] = (width, config.vocab_size)
    found = {"copy": partial(copy, sizes)}
    found |= {f"product {name}": partial(product, sizes, *shape) for name, shape in shapes.items()}
    for length in sizes.lengths:
        for name, attend in attention_kernels(config.head_dim).items():
            found[f"attention {name} {length}"] = partial(attention, sizes, config, attend, length, False)
    for name in ("rotation", "swiglu", "norm"):
        for compiled in (False, True):
            found[named(name, compiled)] = partial(elementwise, sizes, config, name, compiled)
    for length in sizes.lengths:
        for name, attend in attention_kernels(config.head_dim).items():
            key = f"attention with gradients {name} {length}"
            found[key] = partial(attention, sizes, config, attend, length, True)
    return found


def small_batches(sizes: Sizes) -> dict[str, Callable[[], dict]]:
    """Forward passes of small batches, to see if CUDA graphs help where kernels take less time than launching them."""
    ways = [(compiled, graph) for compiled in (False, True) for graph in (False, True) if CUDA or not graph]
    return {
        named(f"forward of {tokens:,} tokens", compiled) + (", CUDA graph" if graph else ""): partial(
            small_batch, sizes, tokens, compiled, graph
        )
        for compiled, graph in ways
        for tokens in sizes.few
    }


def profiles(sizes: Sizes) -> dict[str, Callable[[], dict]]:
    """Where the time of one block goes, by kernel, in the forward pass and in training."""
    return {
        f"profile of a block, {mode}{', compiled' if compiled else ''}": partial(profile, sizes, mode, compiled)
        for compiled in (False, True)
        for mode in ("forward", "training")
    }


def named(name: str, compiled: bool) -> str:
    return f"{name}, compiled" if compiled else name


def copy(sizes: Sizes) -> dict:
    """Copy a tensor that is many times larger than the cache on the device; bytes are those read plus those written."""
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return time_call(lambda: target.copy_(source), sizes, bytes=2 * sizes.copied)


@torch.inference_mode()
def product(sizes: Sizes, inputs: int, outputs: int) -> dict:
    x, weight = random(sizes.tokens, inputs), random(outputs, inputs)
    return time_call(lambda: F.linear(x, weight), sizes, flops=2 * sizes.tokens * inputs * outputs)


def attention_kernels(head_dim: int) -> dict[str, Callable]:
    """Attention kernels of this machine by name. Inputs: queries, keys, values (batch, length, heads, dim_head)."""
    found = {"as torch chooses": dense}
    if CUDA:
        found["cuDNN"] = partial(dense, backend=SDPBackend.CUDNN_ATTENTION)
        found["flash"] = partial(dense, backend=SDPBackend.FLASH_ATTENTION)
        found["varlen"] = varlen
        # The kernel that the model uses, from an installed package or from the Hub.
        if name := find_faster_kernel(torch.device(DEVICE), DTYPE, head_dim):
            found[f"FlashAttention {name[-1]}"] = partial(faster, FASTER_KERNELS[DTYPE, head_dim][0])
    return found


def dense(query, key, value, backend: SDPBackend | None = None) -> torch.Tensor:
    states = [x.transpose(1, 2) for x in (query, key, value)]
    if backend is None:
        return F.scaled_dot_product_attention(*states)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*states)


def varlen(query, key, value) -> torch.Tensor:
    """torch's own FlashAttention in its variable-length form, which padded and packed batches use."""
    from torch.nn.attention.varlen import varlen_attn

    rows, length = query.shape[:2]
    offsets = torch.arange(0, (rows + 1) * length, length, device=query.device, dtype=torch.int32)
    return varlen_attn(*(x.flatten(0, 1) for x in (query, key, value)), offsets, offsets, length, length)


def faster(kernel: Callable, query, key, value) -> torch.Tensor:
    """Run a kernel of FlashAttention. Some versions also return the log-sum-exp of the softmax."""
    output = kernel(query, key, value)
    return output[0] if isinstance(output, tuple) else output


def attention(sizes: Sizes, config, attend: Callable, length: int, gradients: bool) -> dict:
    """One layer's attention. With gradients, the backward pass is added, which needs 2.5 times the forward FLOPs."""
    rows = max(1, sizes.tokens // length)
    states = [random(rows, length, config.num_attention_heads, config.head_dim) for _ in range(3)]
    flops = 4 * rows * length**2 * config.hidden_size
    if not gradients:
        with torch.inference_mode():
            return time_call(lambda: attend(*states), sizes, flops=flops)
    for x in states:
        x.requires_grad_()
    wanted = torch.randn_like(attend(*states))
    return time_call(lambda: torch.autograd.grad(attend(*states), states, wanted), sizes, flops=3.5 * flops)


@torch.inference_mode()
def elementwise(sizes: Sizes, config, name: str, compiled: bool) -> dict:
    """An operation between the matrix products of a layer; bytes are inputs read once and outputs written once."""
    width, inner = config.hidden_size, swiglu_width(config)
    length = min(sizes.lengths)
    if name == "rotation":
        function, heads = rotate, config.num_attention_heads
        projected = random(1, sizes.tokens, heads, 3, config.head_dim)[..., :2, :]
        positions = torch.arange(sizes.tokens, device=DEVICE)[None] % length
        inputs, moved = (projected, rotary_table(config, positions, length)), 2 * projected.numel()
    elif name == "swiglu":
        function, inputs, moved = swiglu, (random(sizes.tokens, 2 * inner),), 3 * sizes.tokens * inner
    else:
        inputs, moved = (random(sizes.tokens, width), random(width)), 2 * sizes.tokens * width

        def function(states, weight):
            return F.rms_norm(states, (width,), weight, config.norm_eps)

    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, dynamic=True)
    return time_call(lambda: function(*inputs), sizes, bytes=moved * inputs[0].element_size())


@torch.inference_mode()
def small_batch(sizes: Sizes, tokens: int, compiled: bool, graph: bool) -> dict:
    """A forward pass of one sequence. With `graph`, its kernels are recorded once and launched together."""
    config = build_config("NeoBERT", num_hidden_layers=sizes.layers)
    model = build_model(config, "sdpa", DEVICE, DTYPE).base_model.eval()
    # While a graph is recorded, no values may be copied to the host, which the check of the inputs would do.
    model.check_values = False
    ids = torch.randint(5, config.vocab_size, (1, tokens), device=DEVICE)
    flops = forward_flops(model, torch.tensor([tokens]), 0)
    if compiled:
        torch.compiler.reset()
        model.compile(dynamic=True)
    if not graph:
        return time_call(lambda: model(ids), sizes, flops=flops)
    for _ in range(3):  # Kernels must be chosen and compiled before the recording.
        model(ids)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        model(ids)
    return time_call(recorded.replay, sizes, flops=flops)


def profile(sizes: Sizes, mode: str, compiled: bool) -> dict:
    """The kernels of a model with one block that take the most time, and how often each is called.

    Raises:
        RuntimeError: if the profiler cannot see kernels on this machine.
    """
    training = mode == "training"
    dtype = torch.float32 if training else DTYPE
    model = build_model(build_config("NeoBERT", num_hidden_layers=1), "sdpa", DEVICE, dtype).base_model.train(training)
    length = sorted(sizes.lengths)[len(sizes.lengths) // 2]
    ids = torch.randint(5, model.config.vocab_size, (max(1, sizes.tokens // length), length), device=DEVICE)
    if compiled:
        torch.compiler.reset()
        model.compile(dynamic=True)

    def step() -> None:
        with torch.set_grad_enabled(training), torch.autocast(DEVICE, DTYPE, enabled=CUDA and training):
            states = model(ids).last_hidden_state
        if training:
            states.float().mean().backward()

    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CUDA if CUDA else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        if CUDA:
            torch.cuda.synchronize()
    time_of = "self_device_time_total" if CUDA else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, time_of))
    kernels = [
        {"name": event.key[:100], "calls": event.count, "microseconds": round(getattr(event, time_of), 1)}
        for event in events[:KERNELS_SHOWN]
    ]
    total = sum(getattr(event, time_of) for event in events) / 1e6
    if not total:
        raise RuntimeError("the profiler saw no kernel.")
    return {"seconds": total, "batch": f"{ids.shape[0]} x {length}", "kernels": kernels}
