"""Published encoders with random weights, and batches for them."""

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
# The decoder runs on the labelled tokens only.
SPARSE = {"sparse_prediction": True}
# Values of the published configurations that are not the class's defaults. NomicBERT is nomic-embed-text-v1.5.
ENCODERS = {
    "NeoBERT": (NeoBERTConfig, BASE | SPARSE | {"num_hidden_layers": 28}),
    "BERT-base": (BertConfig, BASE),
    "BERT-large": (BertConfig, LARGE),
    "NomicBERT": (NomicBertConfig, BASE | {"vocab_size": 30528, "max_position_embeddings": 8192}),
    "ModernBERT-base": (ModernBertConfig, BASE | SPARSE | {"num_hidden_layers": 22, "intermediate_size": 1152}),
    "EuroBERT-210m": (EuroBertConfig, BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}),
}


def build_model(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes
) -> PreTrainedModel:
    """The model for masked language modelling with random weights, which are made on the device.

    Args:
        changes: to the published configuration, such as fewer layers.
    """
    kind, values = ENCODERS[name]
    # The architectures' own initialisation takes minutes on a CPU: truncated normals draw every number one by one.
    with torch.device(device), no_init_weights():
        model = AutoModelForMaskedLM.from_config(kind(**values | changes), attn_implementation=attention, dtype=dtype)
    model.tie_weights()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(parameter_name.endswith("weight"))
    return model


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
