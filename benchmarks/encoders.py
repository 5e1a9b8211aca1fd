"""The encoders of benchmarks/throughput.py: published configurations, random weights, and the FLOPs they need."""

from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

import neobert_hf


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
BERT = {"vocab_size": 30522, "max_position_embeddings": 512}
ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
MODERN = {"vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128}


@dataclass(frozen=True)
class Encoder:
    """One architecture.

    Args:
        config_class: name of its configuration class, in Transformers or in this package.
        parameters: published number in millions, without the head for masked language modelling.
        longest: longest sequence that its learned positions allow; None if positions are rotary.
        values: values of its published configuration; all others are the class's defaults.
    """

    config_class: str
    parameters: int
    longest: int | None
    values: dict


# NomicBERT is nomic-embed-text-v1.5. The decoders of EuroBERT and NeoBERT have their own matrix; the others' are tied.
ENCODERS = {
    "NeoBERT": Encoder(
        "NeoBERTConfig", 222, None, BASE | {"vocab_size": 30522, "num_hidden_layers": 28, "max_length": 4096}
    ),
    "BERT-base": Encoder("BertConfig", 110, 512, BASE | BERT),
    "BERT-large": Encoder("BertConfig", 335, 512, LARGE | BERT),
    "RoBERTa-base": Encoder("RobertaConfig", 125, 512, BASE | ROBERTA),
    "RoBERTa-large": Encoder("RobertaConfig", 355, 512, LARGE | ROBERTA),
    "NomicBERT": Encoder(
        "NomicBertConfig",
        137,
        None,
        BASE
        | {
            "vocab_size": 30528,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "ModernBERT-base": Encoder(
        "ModernBertConfig", 149, None, BASE | MODERN | {"num_hidden_layers": 22, "intermediate_size": 1152}
    ),
    "ModernBERT-large": Encoder(
        "ModernBertConfig", 395, None, LARGE | MODERN | {"num_hidden_layers": 28, "intermediate_size": 2624}
    ),
    "EuroBERT-210m": Encoder(
        "EuroBertConfig",
        210,
        None,
        BASE
        | {
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
        },
    ),
}


def build_config(name: str, **changes) -> PretrainedConfig:
    """The published configuration with changes, such as fewer layers.

    Raises:
        ImportError: if the installed Transformers does not have the architecture.
    """
    encoder = ENCODERS[name]
    module = neobert_hf if encoder.config_class == "NeoBERTConfig" else transformers
    if not hasattr(module, encoder.config_class):
        raise ImportError(f"{name} is not available in transformers {transformers.__version__}")
    config = getattr(module, encoder.config_class)(**encoder.values | changes)
    if hasattr(config, "sparse_prediction"):
        config.sparse_prediction = True
    return config


def build_model(config: PretrainedConfig, attention: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model with random weights, which are made on the device. On `meta`, parameters have no values."""
    # The architectures' own initialisation takes minutes on a CPU: truncated normals draw every number one by one.
    with torch.device(device), no_init_weights():
        model = AutoModelForMaskedLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(name.endswith("weight"))
    return model


def count_parameters(config: PretrainedConfig) -> int:
    """Number of parameters, without the head for masked language modelling."""
    backbone = build_model(config, "eager", "meta", torch.float32).base_model
    return sum(parameter.numel() for parameter in backbone.parameters())


def attended_pairs(lengths: torch.Tensor, window: int | None) -> int:
    """Number of pairs of tokens that attend to each other; with a window, only pairs at most `window` tokens apart."""
    squared = lengths**2
    if window is None:
        return int(squared.sum())
    return int(torch.where(lengths > window, lengths * (2 * window + 1) - window * (window + 1), squared).sum())


def forward_flops(model: PreTrainedModel, lengths: torch.Tensor, predicted: int) -> float:
    """Multiplications and additions that a forward pass needs, even if the model computes more.

    They are 2 per weight of a linear layer and real token (in the head for masked language modelling: per weight and
    predicted token), and 4 * hidden_size per layer and pair of tokens that attend to each other. Padding, unlabelled
    rows of the decoder and pairs outside of a local window are not needed. Norms, activations, biases and look-ups are
    not counted.

    Args:
        model: the model with its head.
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
