"""The encoder block on a CPU: the same results as in the model file, with fewer passes over less memory.

Without gradients, the intermediate results of a block are not needed later, so a step may overwrite those of the step
before. The model file decides in each forward pass which blocks may do so (`blocks_to_compute_in_place`) and calls
`forward_in_place` for them; all other blocks run as written there. Speeds in this file are those of the whole published
model on 2 CPU cores.

This file is also served from the Hub as remote code, so it imports nothing from the package but its siblings.
"""

import itertools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import logging

from .attention_neobert import dropout_in_use
from .gradients_neobert import NeoBERTRMSNorm, inverse_root_mean_square, split_and_rotate
from .rotary_neobert import rotate_in_place


logger = logging.get_logger(__name__)

# Int8 values of a row of states are stored as uint8, which CPUs can multiply with int8: 0 becomes this.
ZERO_POINT = 128
# The modules and functions that blocks computed in place may consist of. If one of them has been replaced in the whole
# program, the replacement must be called.
OWN_PARTS = {part: part.forward for part in (nn.Linear, NeoBERTRMSNorm, nn.Dropout)}
OWN_FUNCTIONS = {name: getattr(F, name) for name in ("linear", "silu", "rms_norm")}


def own_part(module_class: type[nn.Module]) -> type[nn.Module]:
    """Marks a class of the model file that `forward_in_place` can compute itself: the MLP."""
    OWN_PARTS[module_class] = module_class.forward
    return module_class


@dataclass
class Written:
    """The state of a weight when it was packed, to detect whether somebody has written to it since.

    `version` counts the writes that torch sees. It does not see writes to `.data`, so some numbers are kept as well.

    Args:
        numbers: a view of these numbers in the weight.
        values: their values at the time.
    """

    version: int
    address: int
    numbers: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, weight: nn.Parameter, count: int = 16) -> "Written":
        flat = weight.detach().view(-1)
        # About `count` numbers, from different rows and columns. Reading each is a cache miss.
        numbers = flat[:: max(1, flat.numel() // count - 1)]
        return cls(weight._version, weight.data_ptr(), numbers, numbers.clone())

    def is_still(self, weight: nn.Parameter, same_numbers: bool = False) -> bool:
        """Whether nobody has written to the weight; `same_numbers` says that the numbers are known to be unchanged."""
        same = self.version == weight._version and self.address == weight.data_ptr()
        return same and (same_numbers or torch.equal(self.numbers, self.values))


@dataclass
class PackedWeight:
    """A weight in the layout that oneDNN multiplies with."""

    written: Written
    packed: torch.Tensor

    @classmethod
    def of(cls, weight: nn.Parameter) -> "PackedWeight":
        return cls(Written.of(weight), torch.ops.mkldnn._reorder_linear_weight(weight.detach()))

    def multiply(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise.default(hidden_states, self.packed, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(hidden_states, residual, self.packed, None, "add")


@dataclass
class Int8Weight:
    """A weight in int8, with a scale per row. States are converted to int8 at each product, with a scale per token.

    Since tokens share no scale, the output of a text does not depend on its batch. The dynamic int8 of ONNX Runtime and
    of torch uses one scale for all tokens of a batch.

    Args:
        packed: int8, in the layout that oneDNN multiplies with.
        scales: the scale of each row, float32 (rows).
        zero_points: the zero point of each row, always 0, int32 (rows).
    """

    written: Written
    packed: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor

    @classmethod
    def of(cls, weight: nn.Parameter, largest: int | None = None) -> "Int8Weight":
        scales = scales_of(weight.detach(), largest or largest_int8_weight())
        rounded = (weight.detach() / scales).round().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        return cls(Written.of(weight), packed, scales.flatten(), torch.zeros(len(scales), dtype=torch.int32))

    def multiply(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows = hidden_states.flatten(0, -2)
        scales = scales_of(rows)
        # The conversion truncates, so 0.5 is added to round.
        rounded = (rows / scales).add_(ZERO_POINT + 0.5).to(torch.uint8)
        weight = (self.packed, self.scales, self.zero_points)
        product = torch.ops.onednn.qlinear_pointwise.default(
            rounded, 1.0, ZERO_POINT, *weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if residual is None:
            return product.mul_(scales).unflatten(0, hidden_states.shape[:-1])
        return torch.addcmul(residual, product.view(residual.shape), scales.unflatten(0, hidden_states.shape[:-1]))


NUMBERS = ("numbers", "values")
# Kept by parameter here, not in the modules, since packed weights cannot be copied, pickled or saved.
PACKED_WEIGHTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def scales_of(rows: torch.Tensor, largest: int = 127) -> torch.Tensor:
    """The divisor that brings each row into +- `largest`, (rows, 1). For a row of zeros, some number that is not 0."""
    return rows.abs().amax(-1, keepdim=True).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)


def prepare_for_inference(model: nn.Module, int8: bool = False) -> nn.Module:
    """Pack the weights of the encoder blocks for oneDNN once, or as int8, to speed up inference on a CPU.

    Packed weights are used only without gradients. Without packing in advance, every product packs its weights
    again, which for one query takes as long as the product itself. An AMD EPYC computes packed products of long
    inputs in 0.83 of the time (1,024 tokens); on Intel Xeons these gain nothing. Packed weights are a second copy
    in memory. If a weight has changed, its packed copy is no longer used, and a warning is logged. Write to `.data`
    before this call, not after it, since torch does not count such writes, and those to few numbers stay unnoticed.

    Args:
        int8: multiply weights and states as int8 (LLM.int8's vector-wise scales, arXiv 2208.07339, section 3); this
            takes a quarter more memory. The outputs are approximate then, more so without VNNI (see
            `largest_int8_weight`): measure the loss of quality.

    Returns:
        The model, so that calls can be chained.

    Raises:
        ValueError: if a weight is not on a CPU, has another dtype than float32 or (without `int8`) bfloat16, or was
            loaded in inference mode; if a block was not built with SwiGLU and RMSNorm, or has other parts such as
            adapters.
        RuntimeError: if this torch has no oneDNN, the CPU has no instructions for bfloat16 weights or, with `int8`, the
            CPU adds products wrongly.
    """
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError("Packing weights needs a torch with oneDNN, which this one lacks; leave this call out.")
    if int8:
        largest_int8_weight()
    packs_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    blocks = [block for module in model.modules() for block in getattr(module, "transformer_encoder", ())]
    for block in blocks:
        parts = [part for child in block.children() for part in child.modules() if not hasattr(part, "w12")]
        if other := [part for part in parts if type(part) not in OWN_PARTS]:
            kind = f"{type(other[0]).__module__}.{type(other[0]).__qualname__}"
            raise ValueError(
                f"A block holds a {kind}, but packed weights are used only by blocks of linear layers, RMSNorm and "
                "SwiGLU. Merge adapters first (`merge_and_unload()` of PEFT), or leave this call out."
            )
    weights = [part.weight for block in blocks for part in block.modules() if type(part) is nn.Linear]
    allowed = (torch.float32,) if int8 else (torch.float32, torch.bfloat16)
    for weight in weights:
        if weight.device.type != "cpu" or weight.dtype not in allowed:
            raise ValueError(
                f"The weights are {weight.dtype} on {weight.device}; they must be "
                f"{' or '.join(map(str, allowed))} on a CPU. Load the model with dtype=torch.float32, or leave this "
                "call out."
            )
        if weight.dtype == torch.bfloat16 and not packs_bfloat16:
            raise RuntimeError(
                "This CPU has no instructions for bfloat16 (AVX512 or AVX-NE-CONVERT), and can only emulate it slowly: "
                "load the model with dtype=torch.float32."
            )
        if weight.is_inference():
            raise ValueError("The weights were created in torch.inference_mode(): load the model outside of it.")
    for weight in weights:
        PACKED_WEIGHTS[weight] = (Int8Weight if int8 else PackedWeight).of(weight)
    return model


@cache
def largest_int8_weight() -> int:
    """The largest int8 weight: 127, or 63 on an x86 CPU without VNNI.

    Such a CPU adds two products in 16 bits, which 2 * 255 * 127 overflows. With weights up to 127, oneDNN with AVX2
    computes 2 for the sum of 256 products of ones.

    Raises:
        RuntimeError: if sums are wrong with 63 as well.
    """
    ones = torch.ones(4, 256)
    for largest in (127, 63):
        found = Int8Weight.of(nn.Parameter(ones), largest).multiply(ones, None)
        if (found - 256).abs().max() <= 1:
            return largest
    raise RuntimeError(
        f"This CPU computes sums of int8 products wrongly: {found[0, 0]:.0f} instead of 256. Leave `int8` out, or load "
        "the model with dtype=torch.bfloat16 if the CPU is fast with it."
    )


class BlockWeights(NamedTuple):
    """The packed weights of the four products of a block; None for those that are not packed."""

    qkv: PackedWeight | Int8Weight | None
    wo: PackedWeight | Int8Weight | None
    w12: PackedWeight | Int8Weight | None
    w3: PackedWeight | Int8Weight | None


def are_still(written: list[Written], weights: list[nn.Parameter]) -> list[bool]:
    """For each weight, whether nobody has written to it. All kept numbers are compared at once, and then one by one."""
    same = not written or torch.equal(*(torch.cat([getattr(one, name) for one in written]) for name in NUMBERS))
    return [one.is_still(weight, same) for one, weight in zip(written, weights)]


def packed_weights(weights: list[nn.Parameter]) -> list[PackedWeight | Int8Weight | None]:
    """The packed version of each weight, if there is one. It is dropped if somebody has written to the weight since."""
    if not len(PACKED_WEIGHTS):
        return [None for _ in weights]
    found = [PACKED_WEIGHTS.get(weight) for weight in weights]
    places = [place for place, one in enumerate(found) if one is not None]
    still = are_still([found[place].written for place in places], [weights[place] for place in places])
    for place, is_still in zip(places, still):
        if not is_still:
            # Another thread may have removed it already.
            PACKED_WEIGHTS.pop(weights[place], None)
            found[place] = None
            logger.warning_once("Weights have changed since `prepare_for_inference`: call it again for its speed.")
    return found


def linear(
    hidden_states: torch.Tensor,
    weight: nn.Parameter,
    packed: PackedWeight | Int8Weight | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.linear` with the packed weight, if there is one; the product is added to `residual`, if there is one."""
    if packed is not None:
        return packed.multiply(hidden_states, residual)
    product = F.linear(hidden_states, weight)
    return product if residual is None else product.add_(residual)


def is_followed() -> bool:
    """Whether every step must be executed visibly: for gradients, autocast, compilers, hooks or replaced functions."""
    global_hooks = nn.modules.module
    return bool(
        torch.is_grad_enabled()
        # Forward-mode derivatives, which `no_grad` does not switch off.
        or torch.autograd.forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or global_hooks._global_forward_hooks
        or global_hooks._global_forward_pre_hooks
        or any(part.forward is not forward for part, forward in OWN_PARTS.items())
        or any(getattr(F, name) is not function for name, function in OWN_FUNCTIONS.items())
    )


def blocks_to_compute_in_place(
    blocks: Iterable[nn.Module], hidden_states: torch.Tensor, block_class: type
) -> list[BlockWeights | None]:
    """Which blocks may be computed in place: unmodified ones, on a CPU, without gradients.

    The dtype must be float32, or bfloat16 with packed weights, since only these gain speed. Autocast, compilers,
    exporters and hooks on all modules must see every step. Hooks on the block itself see no difference and do not
    count.

    Args:
        hidden_states: the input of the first block.
        block_class: the block class of the model file; blocks of any other class run as they are.

    Returns:
        For each block, the weights that `forward_in_place` needs, or None if it must not be called.
    """
    dtypes = (torch.float32, torch.bfloat16)
    if hidden_states.device.type != "cpu" or hidden_states.dtype not in dtypes or is_followed():
        return [None for _ in blocks]
    own = [
        type(block) is block_class
        and not dropout_in_use(block)
        and all(is_as_built(part, OWN_PARTS) for child in block.children() for part in child.modules())
        for block in blocks
    ]
    layers = [
        layer
        for block, fast in zip(blocks, own)
        if fast
        for layer in (block.qkv, block.wo, block.ffn.w12, block.ffn.w3)
    ]
    packed = iter(packed_weights([layer.weight for layer in layers]))
    found = [BlockWeights(*itertools.islice(packed, 4)) if fast else None for fast in own]
    if hidden_states.dtype == torch.float32:
        return found
    return [one if one and all(one) else None for one in found]


def is_as_built(module: nn.Module, own_classes: Container[type]) -> bool:
    """Whether a module in a block is unmodified: no other class, hook, `forward`, bias or kind of tensor."""
    return (
        type(module) in own_classes
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        and all(
            tensor is None if name == "bias" else type(tensor) is nn.Parameter
            for name, tensor in module._parameters.items()
        )
    )


def is_looked_at(embedding: nn.Module) -> bool:
    """Whether the embedding has hooks or was replaced, so that other code may depend on the shape of its output."""
    hooks, everywhere = (embedding._backward_hooks, embedding._backward_pre_hooks), nn.modules.module
    hooks += (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)
    return any(hooks) or not is_as_built(embedding, (nn.Embedding,))


def forward_in_place(
    block: nn.Module, hidden_states: torch.Tensor, attend: Callable, packed: BlockWeights
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`NeoBERTEncoderBlock.forward`, for blocks that `blocks_to_compute_in_place` allows.

    With 8 x 128 tokens, each of these measures saves part of a layer's 55 ms: the norms and RoPE of this file (1.02
    times the model's speed each), SiLU in place (1.07), sums in place (1.01), freeing queries, keys and values before
    the MLP allocates memory (1.01), and not calling modules, whose code and data the matrix products have pushed out of
    the cache (1.01).

    Args:
        attend: the block's attention; it takes the fused projection and a function that splits and rotates it.
        packed: what `blocks_to_compute_in_place` returned for the block.
    """
    qkv = linear(rms_norm(hidden_states, block.attention_norm), block.qkv.weight, packed.qkv)
    attended, weights = attend(qkv, split=split_and_rotate_in_place)
    del qkv
    hidden_states = linear(attended, block.wo.weight, packed.wo, hidden_states)
    del attended
    gate, up = linear(rms_norm(hidden_states, block.ffn_norm), block.ffn.w12.weight, packed.w12).chunk(2, dim=-1)
    gate = F.silu(gate, inplace=True).mul_(up)
    if packed.w3 is not None:
        return packed.w3.multiply(gate, hidden_states), weights
    # `view`, not `flatten`, which might return a copy.
    hidden_states.view(-1, hidden_states.shape[-1]).addmm_(gate.flatten(0, 1), block.ffn.w3.weight.t())
    return hidden_states, weights


def rms_norm(hidden_states: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019); in float32, it takes fewer passes than torch's on a CPU."""
    if hidden_states.dtype != torch.float32:
        return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.eps)
    return (hidden_states * inverse_root_mean_square(hidden_states, norm.eps)).mul_(norm.weight)


def split_and_rotate_in_place(
    qkv: torch.Tensor, table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `split_and_rotate` of gradients_neobert.py, but overwrites its input if that is float32."""
    if table is None or qkv.dtype != torch.float32:
        return split_and_rotate(qkv, table)
    return *rotate_in_place(qkv[..., :2, :], table).unbind(-2), qkv[..., 2, :]
