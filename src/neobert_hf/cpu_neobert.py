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
        return torch.ops.mkldnn._linear_pointwise.default(hidden_states, self.packed, None, "none", [], "")

    def _refuse(self, *args, **kwargs) -> None:
        raise RuntimeError("This model was prepared for inference: load it again to train, copy or save it, or to prepare it otherwise.")

    _save_to_state_dict = _load_from_state_dict = __getstate__ = __deepcopy__ = _refuse


class Int8Linear(PackedLinear):
    """The same in int8, with a scale for each row of the weight and for each token (LLM.int8, arXiv 2208.07339).

    Since tokens share no scale, the output of a text does not depend on its batch. The dynamic int8 of ONNX Runtime and
    of torch uses one scale for all tokens of a batch.
    """

    def pack(self) -> None:
        scales = row_scales(self.weight.detach(), largest_int8_weight())
        rounded = (self.weight.detach() / scales).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.scales, self.zeros = scales.flatten(), torch.zeros(len(scales), dtype=torch.int32)
        self.weight = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.requires_grad:
            self._refuse()
        rows = hidden_states.flatten(0, -2)
        scales = row_scales(rows, 127)
        # States are stored as uint8 around 128, which CPUs multiply with int8; the conversion truncates, so 0.5 rounds.
        product = torch.ops.onednn.qlinear_pointwise.default(
            (rows / scales).add_(128.5).to(torch.uint8),
            *(1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return product.mul_(scales).unflatten(0, hidden_states.shape[:-1])


def row_scales(rows: torch.Tensor, largest: int) -> torch.Tensor:
    """The divisor that brings each row into +- `largest`, (rows, 1)."""
    return rows.abs().amax(-1, keepdim=True).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)


@cache
def largest_int8_weight() -> int:
    """127, or 63 on an x86 CPU without VNNI, which adds two products in 16 bits: 2 x 255 x 127 overflows them."""
    ones = torch.ones(4, 256)
    packed = torch.ops.onednn.qlinear_prepack((ones * 127).to(torch.int8), None)
    found = torch.ops.onednn.qlinear_pointwise.default(
        (ones * 255).to(torch.uint8),
        *(1.0, 128, packed, ones[:, 0] / 127, torch.zeros(4, dtype=torch.int32), None, 1.0, 0),
        *(torch.float32, "none", [], ""),
    )
    return 127 if abs(found[0, 0] - 127 * 256) < 256 else 63


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
            for layer in block.modules():
                if isinstance(layer, PackedLinear):
                    layer._refuse()
                if type(layer) is nn.Linear:
                    layer.__class__ = Int8Linear if int8 else PackedLinear
                    layer.pack()
    return model.eval().requires_grad_(False)
