"""Attention backends: torch's own kernels, FlashAttention 3 and 4 if they are installed, and a plain implementation.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.flex_attention import flex_attention_forward as flex_attention_of_transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa_of_transformers
from transformers.modeling_flash_attention_utils import (
    FLASH_ATTENTION_COMPATIBILITY_MATRIX,
    FLASH_ATTN_KERNEL_FALLBACK,
    lazy_import_flash_attention,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_kernels_available, logging
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing


logger = logging.get_logger(__name__)

# Attention functions of servers. A server packs the texts of its requests into one row of tokens with positions. Its
# own attention function gets further arguments, such as where each text begins, as keywords that the model passes on.
SERVERS = ("vllm",)
# Transformers' own functions, which this file replaces.
BUILT_IN = {"sdpa": sdpa_of_transformers, "flex_attention": flex_attention_of_transformers}
# FlashAttention versions that are faster than torch's own, by the major compute capability of the GPU, fastest first.
FASTER_FLASH_ATTENTION = {9: ("flash_attention_3", "flash_attention_4"), 10: ("flash_attention_4",)}
# The backend that runs one of these if `sdpa` is configured.
FASTER = "faster_flash_attention"
# Its functions for whole rows and for documents, by dtype and head size. A dictionary, since graphs cannot call a
# cached function.
FASTER_KERNELS: dict[tuple[torch.dtype, int], tuple[Callable, Callable]] = {}


@dataclass
class AttentionBackend:
    """The attention backend of a forward pass.

    Args:
        name: as in `config._attn_implementation`.
        takes_documents: whether it supports documents that are concatenated in one row (varlen).
        in_one_kernel: whether it also computes them all in one kernel, from their offsets, so that their lengths may
            stay on the device.
    """

    name: str
    takes_documents: bool
    in_one_kernel: bool


def choose_attention(
    config, tokens: torch.Tensor, dtype: torch.dtype, dropout: float, weights: bool
) -> AttentionBackend:
    """The configured backend, a faster one of the same kind, or `eager` if only that can return what is requested.

    Args:
        dtype: of queries, keys and values.
        weights: whether attention weights are requested.

    Raises:
        ValueError: if weights are requested from a server's attention. `eager` would not know where the texts begin.
    """
    name, device = config._attn_implementation, tokens.device
    if name in SERVERS:
        if weights:
            raise ValueError(f"`output_attentions` is True, but attention {name!r} returns no weights: leave it out.")
        return AttentionBackend(name, takes_documents=True, in_one_kernel=True)
    if weights and name != "eager":
        if not is_tracing(tokens):
            logger.warning_once(f"`output_attentions=True`: `eager` attention is used instead of `{name}`.")
        name = "eager"
    if is_flash_attention_requested(requested_attention_implementation=name):
        return AttentionBackend(name, takes_documents=True, in_one_kernel=True)
    if name != "sdpa" or is_replaced(name):
        return AttentionBackend(name, takes_documents=False, in_one_kernel=False)
    kernel = has_varlen_kernel(device, dtype, config.head_dim, dropout)
    if kernel and not is_tracing(tokens) and find_faster_kernel(device, dtype, config.head_dim):
        name = FASTER
    return AttentionBackend(name, takes_documents=True, in_one_kernel=kernel)


def is_replaced(name: str) -> bool:
    """Whether another library has replaced Transformers' function with its own, as DeepSpeed's Ulysses does."""
    return ALL_ATTENTION_FUNCTIONS[name] is not BUILT_IN[name]


def dropout_in_use(block: nn.Module) -> float:
    """The dropout probability for hidden states and attention weights in a block, taken from its `nn.Dropout`.

    Tools such as TRL switch dropout off on these modules, and not in the config.
    """
    dropout = getattr(block, "dropout", None)
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def attention_function(name: str) -> Callable:
    if name == FASTER:
        return faster_attention_forward
    if name == "sdpa" and not is_replaced(name):
        return sdpa_attention_forward
    if name == "flex_attention" and not is_replaced(name):
        return flex_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)


@cache
def find_faster_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The name of the kernel in `FASTER_KERNELS` for such queries. It is loaded and compared with torch's at first use.

    An installed package (`flash-attn-3`, `flash-attn-4`) is preferred to the same kernel from the Hub (package
    `kernels`). If a faster kernel exists for the GPU but none is usable, a warning is logged once.
    """
    candidates = FASTER_FLASH_ATTENTION.get(torch.cuda.get_device_capability(device)[0], ())
    failures = []
    for name in candidates:
        installed = FLASH_ATTENTION_COMPATIBILITY_MATRIX[int(name[-1])]["general_availability_check"]()
        if not installed and not is_kernels_available():
            continue
        source = name if installed else FLASH_ATTN_KERNEL_FALLBACK[name]
        try:
            dense, varlen = lazy_import_flash_attention(source)[0][:2]
            _compare_with_torch(dense, varlen, device, dtype, head_dim)
        except Exception as error:  # A compiled extension or a download may raise anything; torch's kernel remains.
            failures.append(f"{source}: {error}")
            continue
        FASTER_KERNELS[dtype, head_dim] = dense, varlen
        return name
    if candidates:
        logger.warning_once(
            f"Attention runs torch's FlashAttention 2. {candidates[0]} is faster on this GPU, but is not "
            f"{'usable: ' + '; '.join(failures) if failures else 'installed: pip install neobert_hf[flash]'}."
        )
    return None


def _compare_with_torch(dense: Callable, varlen: Callable, device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise ValueError unless outputs and gradients match plain attention: versions of these kernels differ a lot."""
    generator, lengths = torch.Generator().manual_seed(0), [5, 19]
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        states = torch.randn(3, 24, 2, head_dim, generator=generator).to(device, dtype)
        offsets = torch.tensor([0, 5, 24], dtype=torch.int32).to(device)
        for documents in (None, lengths):
            inputs = [part.clone().requires_grad_() for part in states]
            got = _call_flash(dense, varlen, [part.unsqueeze(0) for part in inputs], offsets, documents and 19)
            expected_inputs = [part.float().requires_grad_() for part in states]
            heads = [part.transpose(0, 1).unsqueeze(0) for part in expected_inputs]
            expected = _attend_one_by_one(*heads, documents or [24])
            pairs = [(got.float(), expected)]
            pairs += zip(_gradients(got, inputs), _gradients(expected, expected_inputs))
            if not all(torch.allclose(left.float(), right, atol=0.05) for left, right in pairs):
                raise ValueError("its results differ from those of torch")


def _gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output.float().square().sum(), inputs)


def _call_flash(dense: Callable, varlen: Callable, states, offsets, longest: int | None, **options) -> torch.Tensor:
    """Attention of queries, keys and values (batch, length, heads, dim_head); over documents if `longest` is given."""
    if longest is None:
        output = dense(*states, **options)
    else:
        limits = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        states = [part[0] for part in states]
        output = varlen(*states, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **limits, **options)
    # Some versions also return the log-sum-exp of the softmax.
    output = output[0] if isinstance(output, tuple) else output
    return output if longest is None else output.unsqueeze(0)


def faster_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """FlashAttention 3 or 4 over whole rows or over concatenated documents, (batch, heads, length, dim_head)."""
    kernels = FASTER_KERNELS[query.dtype, query.shape[-1]]
    states = [part.transpose(1, 2) for part in (query, key, value)]
    longest = None if cu_seq_lens_q is None else max_length_q
    return _call_flash(*kernels, states, cu_seq_lens_q, longest, softmax_scale=scaling), None


def has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether torch's own FlashAttention supports such queries; it does not support dropout."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and dropout == 0.0
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention, which also returns its weights (batch, heads, length, length). The mask is added to scores."""
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout) if dropout else weights
    return (weights @ value).transpose(1, 2).contiguous(), weights


def flex_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask, **kwargs
) -> tuple[torch.Tensor, None]:
    """FlexAttention as Transformers calls it. On a CPU, heads of fewer than 32 dimensions are padded with zeros.

    On CPUs without AVX512, torch 2.13.0 returns NaN or wrong states for some heads of 8 and 16 dimensions, in up to
    half of the calls (with 120 tokens, but not with 128). With 32 or more dimensions this was never seen. The zeros do
    not change any product.
    """
    size = query.shape[-1]
    if query.device.type == "cpu" and size < 32:
        query, key, value = (F.pad(states, (0, 32 - size)) for states in (query, key, value))
    attend = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    return attend(module, query, key, value, attention_mask, **kwargs)[0][..., :size], None


def sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    lengths: list[int] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Torch's own attention over whole rows, or over concatenated documents, (1, heads, tokens, dim_head).

    If the offsets are on the host, they come with `lengths`, and documents are computed one after the other. If they
    are on the device, FlashAttention computes all documents at once.
    """
    if cu_seq_lens_q is not None and cu_seq_lens_q.device.type == "cpu":
        if torch.compiler.is_compiling() and not dropout:
            # `lengths` must not be read here, or a graph would be compiled for each number of documents.
            return attend_to_documents(query, key, value, cu_seq_lens_q, scaling), None
        return _attend_one_by_one(query, key, value, lengths, dropout_p=dropout, scale=scaling), None
    if cu_seq_lens_q is not None:
        from torch.nn.attention.varlen import varlen_attn

        # Its default scale is the one needed, 1 / sqrt(dim_head). In torch 2.10 it has no argument for the scale.
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        output = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return output.unsqueeze(0), None
    output = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2), None


def _attend_one_by_one(query, key, value, lengths: list[int], **options) -> torch.Tensor:
    """Attention over one document after the other; returns (1, tokens, heads, dim_head)."""
    dtype, precision = query.dtype, nullcontext()
    if query.device.type == "cpu" and dtype == torch.bfloat16 and query.requires_grad:
        # In bfloat16, oneDNN compiles the products for every new length, which takes 17 ms each, and caches 1,024 of
        # them: training on documents of all lengths would never stop compiling. In float32 nothing is compiled.
        query, key, value = query.float(), key.float(), value.float()
        precision = torch.autocast("cpu", enabled=False)
    with precision:
        documents = zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2))
        outputs = [F.scaled_dot_product_attention(*states, **options) for states in documents]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1).to(dtype)


@torch.library.custom_op("neobert::attend_to_documents", mutates_args=())
def attend_to_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over one document after the other, as a single operation of a graph, for any number of documents.

    Args:
        cu_seq_lens: int (documents + 1,), on the host.
    """
    return _attend_one_by_one(query, key, value, cu_seq_lens.diff().tolist(), scale=scale)


@attend_to_documents.register_fake
def _(query, key, value, cu_seq_lens, scale):
    return query.new_empty(query.transpose(1, 2).shape)


@torch.library.custom_op("neobert::attend_to_documents_backward", mutates_args=())
def attend_to_documents_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values; the attention is recomputed."""
    lengths = cu_seq_lens.diff().tolist()
    # Inside a custom operation autograd records no graph; `vjp` builds its own.
    _, gradients = torch.func.vjp(lambda *states: _attend_one_by_one(*states, lengths, scale=scale), query, key, value)
    return tuple(part.contiguous() for part in gradients(gradient))


@attend_to_documents_backward.register_fake
def _(gradient, query, key, value, cu_seq_lens, scale):
    return tuple(part.new_empty(part.shape) for part in (query, key, value))


def _keep_for_backward(ctx, inputs: tuple, output: torch.Tensor) -> None:
    *states, ctx.scale = inputs
    ctx.save_for_backward(*states)


def _backward(ctx, gradient: torch.Tensor) -> tuple:
    return *attend_to_documents_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


attend_to_documents.register_autograd(_backward, setup_context=_keep_for_backward)
