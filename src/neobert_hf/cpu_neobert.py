"""The encoder block on a CPU: the same numbers as in the model file, in fewer passes over less memory.

Without gradients nobody needs what lies between two steps of a block, so that a step may write over the one before.
The model file decides per forward pass which blocks may do so (`blocks_to_compute_in_place`) and calls
`forward_in_place` for them; everything else runs as it is written there. Speeds in this file are those of the whole
published model on 2 CPU cores.

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

# Int8 values of a row of states are stored as uint8, which CPUs multiply with int8: 0 becomes this.
ZERO_POINT = 128
# What blocks that compute in place are made of, and how it computes. Somebody who replaces one of these functions, in
# the whole program, wants it to be called.
OWN_PARTS = {part: part.forward for part in (nn.Linear, NeoBERTRMSNorm, nn.Dropout)}
OWN_FUNCTIONS = {name: getattr(F, name) for name in ("linear", "silu", "rms_norm")}


def own_part(module_class: type[nn.Module]) -> type[nn.Module]:
    """Marks a class of the model file of which `forward_in_place` knows what it computes: the MLP."""
    OWN_PARTS[module_class] = module_class.forward
    return module_class


@dataclass
class Written:
    """What a weight was when it was packed, to tell whether somebody has written to it since.

    A version counts the writes that torch sees. Those to `.data` are not among them, so some numbers are kept, too.

    Args:
        numbers: a view of them in the weight.
        values: what they were.
    """

    version: int
    address: int
    numbers: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, weight: nn.Parameter, count: int = 16) -> "Written":
        flat = weight.detach().view(-1)
        # Of some `count` rows, in different columns. Each is a miss of the cache.
        numbers = flat[:: max(1, flat.numel() // count - 1)]
        return cls(weight._version, weight.data_ptr(), numbers, numbers.clone())

    def is_still(self, weight: nn.Parameter, same_numbers: bool = False) -> bool:
        """Whether nobody has written to the weight; `same_numbers` if the numbers are known to be what they were."""
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
    """A weight in int8, with a scale for each of its rows. States become int8 at each product, with one for each token.

    Tokens share no scale, so what a text gives does not depend on the batch that it is in. ONNX Runtime's and torch's
    own dynamic int8 take one scale for all tokens of a batch.

    Args:
        packed: int8, in the layout that oneDNN multiplies with.
        scales: float32 (rows).
        zero_points: of the rows: 0, int32 (rows).
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
        # Conversion cuts the fraction off, so a half more rounds.
        rounded = (rows / scales).add_(ZERO_POINT + 0.5).to(torch.uint8)
        weight = (self.packed, self.scales, self.zero_points)
        product = torch.ops.onednn.qlinear_pointwise.default(
            rounded, 1.0, ZERO_POINT, *weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if residual is None:
            return product.mul_(scales).unflatten(0, hidden_states.shape[:-1])
        return torch.addcmul(residual, product.view(residual.shape), scales.unflatten(0, hidden_states.shape[:-1]))


NUMBERS = ("numbers", "values")
# By parameter, and not in the modules: packed weights can be neither copied nor pickled nor saved.
PACKED_WEIGHTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def scales_of(rows: torch.Tensor, largest: int = 127) -> torch.Tensor:
    """What each row is divided by to lie in +- `largest`, (rows, 1). Of a row of zeros: some number that is not 0."""
    return rows.abs().amax(-1, keepdim=True).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)


def prepare_for_inference(model: nn.Module, int8: bool = False) -> nn.Module:
    """Lay the weights of the encoder blocks out once for oneDNN, or store them as int8: for a CPU, without gradients.

    Every product lays its weights out anew, which for one query takes as long as the product itself. An AMD EPYC
    computes packed products of long inputs in 0.83 of the time (1,024 tokens); on Intel Xeons these gain nothing.
    Packed weights are a second copy in memory. Given up with a warning where weights have changed: write to `.data`
    before, not after, since torch does not count such writes and those to few numbers stay unseen.

    Args:
        int8: multiply weights and states as int8 (LLM.int8's vector-wise scales, arXiv 2208.07339, section 3); a
            quarter more memory. The outputs are approximate then, more so without VNNI (see `largest_int8_weight`):
            measure what that costs.

    Returns:
        The model, so that calls can be chained.

    Raises:
        ValueError: if a weight is on no CPU, of another dtype than float32 or (without `int8`) bfloat16, or was loaded
            in inference mode; if a block holds something else than was built with SwiGLU and RMSNorm, such as adapters.
        RuntimeError: if this torch has no oneDNN, or the CPU has no instructions for bfloat16 weights or, with `int8`,
            adds products wrongly.
    """
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError("Packing weights needs a torch with oneDNN, which this one lacks; inference works without.")
    if int8:
        largest_int8_weight()
    packs_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    blocks = [block for module in model.modules() for block in getattr(module, "transformer_encoder", ())]
    for block in blocks:
        parts = [part for child in block.children() for part in child.modules() if not hasattr(part, "w12")]
        if other := [part for part in parts if type(part) not in OWN_PARTS]:
            kind = f"{type(other[0]).__module__}.{type(other[0]).__qualname__}"
            raise ValueError(
                f"A block holds a {kind}; packed weights are used by blocks of linear layers, RMSNorm and SwiGLU only. "
                "Merge adapters first (`merge_and_unload()` of PEFT), or leave this call out."
            )
    weights = [part.weight for block in blocks for part in block.modules() if type(part) is nn.Linear]
    allowed = (torch.float32,) if int8 else (torch.float32, torch.bfloat16)
    for weight in weights:
        if weight.device.type != "cpu" or weight.dtype not in allowed:
            raise ValueError(
                f"The weights are {weight.dtype} on {weight.device}; allowed on a CPU: "
                f"{' and '.join(map(str, allowed))}. Load the model with dtype=torch.float32, or leave this call out."
            )
        if weight.dtype == torch.bfloat16 and not packs_bfloat16:
            raise RuntimeError(
                "This CPU has no instructions for bfloat16 (AVX512 or AVX-NE-CONVERT), and computes it step by step: "
                "load the model with dtype=torch.float32."
            )
        if weight.is_inference():
            raise ValueError("The weights were made in torch.inference_mode(): load the model outside of it.")
    for weight in weights:
        PACKED_WEIGHTS[weight] = (Int8Weight if int8 else PackedWeight).of(weight)
    return model


@cache
def largest_int8_weight() -> int:
    """127, or 63 on an x86 CPU without VNNI: it adds two products in 16 bits, which 2 * 255 * 127 overflows.

    Of 256 ones times ones oneDNN with AVX2 makes 2 if weights go up to 127.

    Raises:
        RuntimeError: if sums are wrong with 63, too.
    """
    ones = torch.ones(4, 256)
    for largest in (127, 63):
        found = Int8Weight.of(nn.Parameter(ones), largest).multiply(ones, None)
        if (found - 256).abs().max() <= 1:
            return largest
    raise RuntimeError(
        f"This CPU gets sums of int8 products wrong: {found[0, 0]:.0f} in place of 256. Leave `int8` out, or load the "
        "model with dtype=torch.bfloat16 if the CPU is fast with it."
    )


class BlockWeights(NamedTuple):
    """What is packed of the four products of a block; None where nothing is."""

    qkv: PackedWeight | Int8Weight | None
    wo: PackedWeight | Int8Weight | None
    w12: PackedWeight | Int8Weight | None
    w3: PackedWeight | Int8Weight | None


def are_still(written: list[Written], weights: list[nn.Parameter]) -> list[bool]:
    """Whether nobody has written to each weight. Numbers are compared once for all; if they differ, one by one."""
    same = not written or torch.equal(*(torch.cat([getattr(one, name) for one in written]) for name in NUMBERS))
    return [one.is_still(weight, same) for one, weight in zip(written, weights)]


def packed_weights(weights: list[nn.Parameter]) -> list[PackedWeight | Int8Weight | None]:
    """What is packed of each weight, and given up if somebody has written to the weight since."""
    if not len(PACKED_WEIGHTS):
        return [None for _ in weights]
    found = [PACKED_WEIGHTS.get(weight) for weight in weights]
    places = [place for place, one in enumerate(found) if one is not None]
    still = are_still([found[place].written for place in places], [weights[place] for place in places])
    for place, is_still in zip(places, still):
        if not is_still:
            # Another thread may have noticed it, too.
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
    """`F.linear`, with the packed weight if there is one, and added to `residual` if there is one."""
    if packed is not None:
        return packed.multiply(hidden_states, residual)
    product = F.linear(hidden_states, weight)
    return product if residual is None else product.add_(residual)


def is_followed() -> bool:
    """Whether somebody has to see every step: gradients, autocast, compilers, hooks, other functions."""
    global_hooks = nn.modules.module
    return bool(
        torch.is_grad_enabled()
        # Derivatives in forward mode, which `no_grad` does not switch off.
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
    """Whether the inside of each block is nobody's business but ours: on a CPU, without gradients, as written.

    In float32, or in bfloat16 where weights are packed: only then is there something to gain. Autocast, compilers,
    exporters and hooks on all modules have to see every step. Hooks on the block itself see no difference, and do not
    count.

    Args:
        hidden_states: what the first block is given.
        block_class: the model file's; blocks of any other class run as they are.

    Returns:
        For each block what `forward_in_place` needs, or None if it may not be called.
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
    """Whether nobody has put another class, hook, `forward`, bias or kind of tensor inside a block."""
    return (
        type(module) in own_classes
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        and all(
            tensor is None if name == "bias" else type(tensor) is nn.Parameter
            for name, tensor in module._parameters.items()
        )
    )


def is_looked_at(embedding: nn.Module) -> bool:
    """Whether the embedding has hooks or is not torch's own any more: somebody may look at the shape of its output."""
    hooks, everywhere = (embedding._backward_hooks, embedding._backward_pre_hooks), nn.modules.module
    hooks += (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)
    return any(hooks) or not is_as_built(embedding, (nn.Embedding,))


def forward_in_place(
    block: nn.Module, hidden_states: torch.Tensor, attend: Callable, packed: BlockWeights
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`NeoBERTEncoderBlock.forward`, for blocks of which `blocks_to_compute_in_place` says that it may.

    With 8 x 128 tokens each habit saves a part of a layer's 55 ms: the norms and RoPE of this file (1.02 times the
    model's speed each), SiLU in place (1.07), sums in place (1.01), queries, keys and values freed before the MLP takes
    memory (1.01), and no calls of modules, whose code and data the matrix products have pushed out of the cache (1.01).

    Args:
        attend: the block's attention, of the fused projection and a function that takes it apart, with its rotation.
        packed: what `blocks_to_compute_in_place` gave for the block.
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
    # `view` and not `flatten`, which might write into a copy.
    hidden_states.view(-1, hidden_states.shape[-1]).addmm_(gate.flatten(0, 1), block.ffn.w3.weight.t())
    return hidden_states, weights


def rms_norm(hidden_states: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019), in fewer passes than torch's on a CPU if it is float32."""
    if hidden_states.dtype != torch.float32:
        return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.eps)
    return (hidden_states * inverse_root_mean_square(hidden_states, norm.eps)).mul_(norm.weight)


def split_and_rotate_in_place(
    qkv: torch.Tensor, table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_and_rotate` of gradients_neobert.py, which overwrites float32."""
    if table is None or qkv.dtype != torch.float32:
        return split_and_rotate(qkv, table)
    return *rotate_in_place(qkv[..., :2, :], table).unbind(-2), qkv[..., 2, :]
