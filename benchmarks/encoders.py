"""Published encoders with random weights, batches for them, and the operations that they need."""

import math
import time

import torch
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    EuroBertConfig,
    ModernBertConfig,
    NomicBertConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from neobert_hf import NeoBERTConfig


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
# Values of the published configurations that are not the class's defaults. NomicBERT is nomic-embed-text-v1.5.
ENCODERS = {
    "NeoBERT": (NeoBERTConfig, BASE | {"num_hidden_layers": 28}),
    "BERT-base": (BertConfig, BASE),
    "BERT-large": (BertConfig, LARGE),
    "NomicBERT": (NomicBertConfig, BASE | {"vocab_size": 30528, "max_position_embeddings": 8192}),
    "ModernBERT-base": (ModernBertConfig, BASE | {"num_hidden_layers": 22, "intermediate_size": 1152}),
    "EuroBERT-210m": (EuroBertConfig, BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}),
}


def build_config(name: str, **changes) -> PretrainedConfig:
    """The published configuration with changes, such as fewer layers. Decoders run on the labelled tokens only."""
    kind, values = ENCODERS[name]
    config = kind(**values | changes)
    if hasattr(config, "sparse_prediction"):
        config.sparse_prediction = True
    return config


def build_model(
    config: PretrainedConfig, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """The model with random weights, which are made on the device. On `meta`, parameters have no values."""
    # The architectures' own initialisation takes minutes on a CPU: truncated normals draw every number one by one.
    with torch.device(device), no_init_weights():
        model = AutoModelForMaskedLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(name.endswith("weight"))
    return model


def attended_pairs(lengths: torch.Tensor, window: int | None) -> int:
    """Number of pairs of tokens that attend to each other; with a window, only pairs at most `window` tokens apart."""
    squared = lengths**2
    if window is None:
        return int(squared.sum())
    return int(torch.where(lengths > window, lengths * (2 * window + 1) - window * (window + 1), squared).sum())


def forward_flops(model: PreTrainedModel, lengths: torch.Tensor, predicted: int = 0) -> float:
    """Multiplications and additions that a forward pass needs, even if the model computes more.

    They are 2 per weight of a linear layer and real token (in the head for masked language modelling: per weight and
    predicted token), and 4 * hidden_size per layer and pair of tokens that attend to each other. Padding, unlabelled
    rows of the decoder and pairs outside of a local window are not needed. Norms, activations, biases and look-ups are
    not counted.

    Args:
        model: the model with its head, or its backbone alone.
        lengths: lengths of the sequences, without padding.
        predicted: number of tokens for which the head is needed.
    """
    config, backbone = model.config, model.base_model
    inner = sum(layer.weight.numel() for layer in backbone.modules() if isinstance(layer, nn.Linear))
    head = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear)) - inner
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    pairs = sum(attended_pairs(lengths, windows[kind]) for kind in kinds)
    return 2.0 * (inner * int(lengths.sum()) + head * predicted) + 4.0 * config.hidden_size * pairs


def ragged_lengths(rows: int, longest: int) -> torch.Tensor:
    """Lognormal lengths with a mean of about 35% of the longest; one row has the longest length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(rows).log_normal_(0.0, 0.6, generator=generator)
    lengths = (lengths / lengths.mean() * 0.35 * longest).round().clamp(3, longest).long()
    lengths[0] = longest
    return lengths


def make_batch(config: PretrainedConfig, lengths: torch.Tensor, packed: bool = False) -> tuple[dict, torch.Tensor]:
    """Arguments of a model with random ids, and labels for a fifth of the ids.

    Args:
        packed: put the texts one after the other in one row. Otherwise each has a row, with padding under a mask.
    """
    rows, longest = len(lengths), int(lengths.max())
    real = torch.arange(longest) < lengths[:, None]
    inputs = {"input_ids": torch.randint(5, config.vocab_size, (rows, longest))}
    if packed:
        positions = torch.arange(longest).expand(rows, -1)[real]
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        inputs = {"input_ids": inputs["input_ids"][real][None], "position_ids": positions[None]}
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
        real = real[real][None]
    elif not real.all():
        inputs["attention_mask"] = real.long()
    return inputs, inputs["input_ids"].masked_fill(~real | (torch.rand(real.shape) > 0.2), -100)


def product_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of large square matrix products: the fastest five in a row within a second."""
    size = 8192 if device == "cuda" else 1024
    factors = torch.randn(2, size, size, device=device, dtype=dtype)
    fastest, start = math.inf, time.perf_counter()
    while (begin := time.perf_counter()) - start < 1:
        for _ in range(5):
            product = factors[0] @ factors[1]
        # `.item()` waits for the device.
        product[0, 0].item()
        fastest = min(fastest, (time.perf_counter() - begin) / 5)
    return 2 * size**3 / fastest
