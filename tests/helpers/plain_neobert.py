"""NeoBERT written from the paper in plain PyTorch, one document at a time: what every backend and layout must equal.

It shares no code with the package and takes the other road wherever there are two: complex rotation, softmax written
out, no batch.
"""

import math

import torch
from torch.nn import functional as F


def plain_hidden_states(
    state: dict[str, torch.Tensor], config, ids: torch.Tensor, positions=None, prefix=None, rope=None
) -> torch.Tensor:
    """Final hidden states (length, hidden_size) of one document, from the tensors of a `NeoBERTModel`.

    With a `prefix`, vectors (prefix, hidden_size) at position 0 before the document, of the document only. `rope` is
    the frequencies (head_dim / 2) and the attention factor of a RoPE that is not the default.
    """
    heads, width = config.num_attention_heads, config.head_dim
    positions = torch.arange(len(ids)) if positions is None else positions
    x = state["encoder.weight"][ids]
    before = 0 if prefix is None else len(prefix)
    if before:
        x = torch.cat((prefix, x))
        positions = torch.cat((torch.zeros(before, dtype=torch.long), positions))
    length = len(x)
    if config.rope:
        exponents = torch.arange(0, width, 2).double() / width
        frequencies, scale = rope or (config.rope_parameters["rope_theta"] ** -exponents, 1.0)
        angles = torch.outer(positions.double(), frequencies.double())
        turns = torch.polar(torch.full_like(angles, scale), angles)
    else:
        x = x + state["positional_embedding.weight"][positions + 1]
    for layer in range(config.num_hidden_layers):
        block = {k.split(".", 2)[2]: v for k, v in state.items() if k.startswith(f"transformer_encoder.{layer}.")}
        h = norm(x, block, "attention_norm", config)
        q, k, v = (h @ block["qkv.weight"].T).view(length, heads, 3 * width).split(width, dim=-1)
        if config.rope:
            q, k = rotate(q, turns), rotate(k, turns)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(width)
        attention = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(length, -1)
        x = x + attention @ block["wo.weight"].T
        h = norm(x, block, "ffn_norm", config)
        if config.hidden_act == "swiglu":
            gate, up = (h @ block["ffn.w12.weight"].T).chunk(2, -1)
            x = x + (gate * torch.sigmoid(gate) * up) @ block["ffn.w3.weight"].T
        else:
            x = x + F.gelu(h @ block["ffn.0.weight"].T) @ block["ffn.2.weight"].T
    return norm(x, state, "layer_norm", config)[before:]


def plain_documents(state: dict[str, torch.Tensor], config, ids: torch.Tensor, documents, rope=None) -> torch.Tensor:
    """The states of the documents of `batch_of`, each computed alone, one after the other: (tokens, hidden_size)."""
    found = []
    for row, columns in documents:
        # A token masked out in the middle keeps its place under RoPE; absolute positions count real tokens (original).
        positions = columns - columns[0] if config.rope else None
        found.append(plain_hidden_states(state, config, ids[row, columns], positions, rope=rope))
    return torch.cat(found)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)


def norm(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str, config) -> torch.Tensor:
    if config.rms_norm:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * tensors[f"{name}.weight"]
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], config.norm_eps)
