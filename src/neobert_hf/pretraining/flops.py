"""Floating-point operations: what training needs and what a device can do; their ratio is the utilisation (MFU)."""

import torch

from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.modeling_neobert import swiglu_width


# Dense bf16 FLOP/s from data sheets. The first name that is part of the device's name applies.
DATASHEET_PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}


def training_flops(config: NeoBERTConfig, tokens: int, squared_lengths: int, labels: int) -> float:
    """Multiplications and additions of forward and backward pass.

    Three times those of the forward pass: 2 per weight of the blocks and token, 4 * hidden_size per layer and pair of
    tokens that attend to each other, and those of the decoder on the labelled tokens only.

    Args:
        tokens: real tokens, without padding.
        squared_lengths: the sum of the squared lengths of the documents, which is the number of pairs of tokens.
        labels: tokens that are predicted.
    """
    mlp = 3 * swiglu_width(config) if config.hidden_act == "swiglu" else 2 * config.intermediate_size
    weights = config.num_hidden_layers * config.hidden_size * (4 * config.hidden_size + mlp)
    attention = 4 * config.hidden_size * config.num_hidden_layers * squared_lengths
    return 3.0 * (2 * weights * tokens + attention + 2 * config.hidden_size * config.vocab_size * labels)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s in bfloat16 of a GPU, if its data sheet is known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in DATASHEET_PEAKS.items() if part in name), None)
