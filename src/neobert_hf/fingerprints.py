"""What tells models apart. Names cannot: local ones have none, and a folder may be trained on."""

import torch
from torch import nn
from transformers import PreTrainedConfig


def add_weights(digest, model: nn.Module) -> None:
    """Add every tensor of a model, with its name and type, to a hash of `hashlib`."""
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def identifying_config(config: PreTrainedConfig) -> dict:
    """A config without where it lay and by what it was saved."""
    incidental = ("_name_or_path", "transformers_version")
    return {key: value for key, value in config.to_dict().items() if key not in incidental}
