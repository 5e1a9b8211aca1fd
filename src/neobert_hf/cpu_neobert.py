"""Linear layers that are packed for inference on a CPU, in float32, bfloat16 or int8.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

from functools import cache

import torch
from torch import nn


class PackedLinear(nn.Linear):
    """A linear layer whose weight lies in the layout that oneDNN multiplies with.

    An ordinary product lays its weight out again in every call, which for one query takes as long as the product. The
    packed copy replaces the weight: a layer like this can be neither trained, copied, saved nor loaded into, so there
    is no second copy that could grow old.
    """

    def pack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        self.weight = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.requires_grad:
            self._refuse()
        return torch.ops.mkldnn._linear_pointwise.default(hidden_states, self.packed, self.bias, "none", [], "")

    def _refuse(self, *args, **kwargs) -> None:
        raise RuntimeError(
            "This model was prepared for inference: load it again to train, copy, save or prepare it in another way."
        )

    _save_to_state_dict = _load_from_state_dict = __getstate__ = __deepcopy__ = _refuse


class Int8Linear(PackedLinear):
    """The same in int8, with a scale for each row of the weight and for each token (LLM.int8, arXiv 2208.07339).

    Since tokens share no scale, the output of a text does not depend on its batch. The dynamic int8 of ONNX Runtime and
    of torch uses one scale for all tokens of a batch.
    """

    def pack(self) -> None:
        weight = self.weight.detach().float()
        scales = row_scales(weight, largest_int8_weight())
        self.packed = torch.ops.onednn.qlinear_prepack((weight / scales).round().to(torch.int8), None)
        self.scales, self.weight = scales.flatten(), None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.requires_grad:
            self._refuse()
        rows = hidden_states.flatten(0, -2).float()
        scales = row_scales(rows, 127)
        # Stored as uint8 around 128, which CPUs multiply with int8; the conversion cuts decimals off, so 0.5 rounds.
        # By way of int16, torch converts three times as fast.
        rows = (rows / scales).add_(128.5).to(torch.int16).to(torch.uint8)
        product = int8_product(rows, self.packed, self.scales).mul_(scales)
        if self.bias is not None:
            product += self.bias
        return product.unflatten(0, hidden_states.shape[:-1]).to(hidden_states.dtype)


def int8_product(rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 product of uint8 rows around 128 and packed int8 weights with a scale for each of their rows."""
    no_zero_points, no_bias = torch.zeros(len(scales), dtype=torch.int32), None
    return torch.ops.onednn.qlinear_pointwise.default(
        *(rows, 1.0, 128),
        *(packed, scales, no_zero_points, no_bias),
        *(1.0, 0, torch.float32),
        *("none", [], ""),
    )


def row_scales(rows: torch.Tensor, largest: int) -> torch.Tensor:
    """The divisor that brings each row into +- `largest`, (rows, 1)."""
    greatest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
    return greatest.div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)


@cache
def largest_int8_weight() -> int:
    """127, or 63 on an x86 CPU without VNNI, which adds two products in 16 bits: 2 x 255 x 127 overflows them."""
    ones = torch.ones(64, 256)
    packed = torch.ops.onednn.qlinear_prepack((ones * 127).to(torch.int8), None)
    sums = int8_product((ones * 255).to(torch.uint8), packed, torch.full((64,), 1 / 127))
    return 127 if ((sums - 127 * 256).abs() < 256).all() else 63


def pack_linear_layers(module: nn.Module, kind: type[PackedLinear] = PackedLinear) -> None:
    """Pack all linear layers of a module, in place."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer._refuse()
        if type(layer) is nn.Linear:
            layer.__class__ = kind
            layer.pack()


def prepare_for_inference(model: nn.Module, int8: bool = False) -> nn.Module:
    """Pack the weights of the encoder blocks, to speed up inference on a CPU. Changes the model, in place.

    Args:
        int8: multiply weights and states as int8. The outputs are then approximate: measure what that costs.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        RuntimeError: later, if such a model is trained, copied or saved.
    """
    for module in list(model.modules()):
        for block in getattr(module, "transformer_encoder", ()):
            pack_linear_layers(block, Int8Linear if int8 else PackedLinear)
    return model.eval().requires_grad_(False)
