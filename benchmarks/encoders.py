"""Published encoders with random weights, their batches, and the time of a forward pass or a training step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

import neobert_hf


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LABELLED = 0.2

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
BERT = {"vocab_size": 30522, "max_position_embeddings": 512}
ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
MODERN = {"vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128}
ROTARY = {"max_position_embeddings": 8192}


@dataclass(frozen=True)
class Encoder:
    """One architecture.

    Args:
        config_class: name of its configuration class, in Transformers or in this package.
        parameters: published number in millions, without the head for masked language modelling.
        longest: longest sequence that its learned positions allow; infinite if positions are rotary.
        values: values of its published configuration; all others are the class's defaults.
    """

    config_class: str
    parameters: int
    longest: float
    values: dict


def rope(theta: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


NEOBERT = BASE | {"vocab_size": 30522, "num_hidden_layers": 28, "max_length": 4096}
MODERN_BASE = BASE | MODERN | {"num_hidden_layers": 22, "intermediate_size": 1152}
MODERN_LARGE = LARGE | MODERN | {"num_hidden_layers": 28, "intermediate_size": 2624}
# NomicBERT is nomic-embed-text-v1.5. The decoders of EuroBERT and NeoBERT have their own matrix; the others' are tied.
ENCODERS = {
    "NeoBERT": Encoder("NeoBERTConfig", 222, math.inf, NEOBERT),
    "BERT-base": Encoder("BertConfig", 110, 512, BASE | BERT),
    "BERT-large": Encoder("BertConfig", 335, 512, LARGE | BERT),
    "RoBERTa-base": Encoder("RobertaConfig", 125, 512, BASE | ROBERTA),
    "RoBERTa-large": Encoder("RobertaConfig", 355, 512, LARGE | ROBERTA),
    "NomicBERT": Encoder("NomicBertConfig", 137, math.inf, BASE | ROTARY | rope(1e3) | {"vocab_size": 30528}),
    "ModernBERT-base": Encoder("ModernBertConfig", 149, math.inf, MODERN_BASE),
    "ModernBERT-large": Encoder("ModernBertConfig", 395, math.inf, MODERN_LARGE),
    "EuroBERT-210m": Encoder("EuroBertConfig", 210, math.inf, BASE | ROTARY | rope(2.5e5) | {"vocab_size": 128256}),
}


def build_config(name: str, **changes) -> PretrainedConfig:
    """The published configuration with changes, such as fewer layers."""
    encoder = ENCODERS[name]
    module = neobert_hf if encoder.config_class == "NeoBERTConfig" else transformers
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


def ragged_lengths(batch: int, longest: int) -> torch.Tensor:
    """Lognormal lengths with a mean of about 35% of the longest; one row has the longest length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(batch).log_normal_(0.0, 0.6, generator=generator)
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
        real = real[real][None]
    elif not real.all():
        inputs["attention_mask"] = real.long()
    labels = inputs["input_ids"].masked_fill(~real | (torch.rand(real.shape) > LABELLED), -100)
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    return inputs | ({"max_length_q": longest, "max_length_k": longest} if packed else {}), labels.to(DEVICE)


class Bench:
    """A model in memory, and its forward pass (without the head) or training step with AdamW.

    A training step has float32 weights. Its products are in `dtype`, by autocast.
    """

    def __init__(self, config: PretrainedConfig, attention: str, dtype: torch.dtype, training: bool):
        self.dtype, self.training = dtype, training
        self.model = build_model(config, attention, DEVICE, torch.float32 if training else dtype).train(training)
        # What the model learns does not matter, but its weights must stay finite.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def step(self, inputs: dict, labels: torch.Tensor) -> None:
        if not self.training:
            with torch.inference_mode():
                self.model.base_model(**inputs)
            return
        with torch.autocast(DEVICE, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**inputs, labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, lengths: torch.Tensor, packed: bool, seconds: float) -> dict[str, float | None]:
        """Real tokens and needed operations per second, and GiB of the GPU's memory at its peak.

        Args:
            seconds: least time of the measurement, in repeated steps.
        """
        inputs, labels = make_batch(self.model.config, lengths, packed)
        self.step(inputs, labels)  # The first step chooses kernels.
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        duration = time_steps(lambda: self.step(inputs, labels), seconds)
        predicted = int((labels != -100).sum()) if self.training else 0
        flops = forward_flops(self.model, lengths, predicted) * (3 if self.training else 1)
        memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
        return {"tokens": int(lengths.sum()) / duration, "flops": flops / duration, "memory": memory}


def time_steps(step: Callable[[], None], at_least: float) -> float:
    """Seconds of a step. Repeated steps are queued without waiting for each one, as in real use."""

    def run(count: int) -> float:
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        if CUDA:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    once = run(1)
    return run(math.ceil(at_least / once)) if once < at_least else once


def product_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of matrix products (the fastest five in a row within a second), and their shape as text."""
    size = 8192 if device.type == "cuda" else 1024
    factors = torch.randn(2, size, size, device=device, dtype=dtype)
    fastest, start = math.inf, time.perf_counter()
    while (begin := time.perf_counter()) - start < 1:
        for _ in range(5):
            product = factors[0] @ factors[1]
        # `.item()` waits for the device.
        product[0, 0].item()
        fastest = min(fastest, (time.perf_counter() - begin) / 5)
    return 2 * size**3 / fastest, f"{size:,}-square {str(dtype).removeprefix('torch.')}"
