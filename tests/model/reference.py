"""The small checkpoints in the layout of the published model whose outputs the original code was recorded with.

Their weights were drawn with seed 1, so the repository holds the configs and the recorded outputs only.
tests/data/reference/README.md says what is recorded.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.models import ROOT


REFERENCE = ROOT / "tests" / "data" / "reference"
VARIANTS = ("published", "layernorm_abs")
KINDS = ("masked_lm", "sequence_classification")


def reference_weights(variant: str, kind: str = "masked_lm") -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, in the order in which they were drawn."""
    config = json.loads((REFERENCE / variant / "config.json").read_text())
    width, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    published = variant == "published"
    parts = ("weight",) if published else ("weight", "bias")
    shapes = {"model.encoder.weight": (vocab, width)}
    if not published:
        shapes["model.positional_embedding.weight"] = (config["max_length"] + 1, width)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.transformer_encoder.{layer}"
        shapes |= {f"{block}.qkv.weight": (3 * width, width), f"{block}.wo.weight": (width, width)}
        if published:
            inner = 2 * wide // 3
            shapes |= {f"{block}.ffn.w12.weight": (2 * inner, width), f"{block}.ffn.w3.weight": (width, inner)}
        else:
            shapes |= {f"{block}.ffn.0.weight": (wide, width), f"{block}.ffn.2.weight": (width, wide)}
        shapes |= {f"{block}.{norm}.{part}": (width,) for norm in ("attention_norm", "ffn_norm") for part in parts}
    shapes |= {f"model.layer_norm.{part}": (width,) for part in parts}
    if kind == "masked_lm":
        shapes |= {"decoder.weight": (vocab, width), "decoder.bias": (vocab,)}
    else:
        shapes |= {"dense.weight": (width, width), "dense.bias": (width,)}
        shapes |= {"classifier.weight": (3, width), "classifier.bias": (3,)}
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.1 * noise if "norm" in name else 0.05 * noise for name, noise in drawn.items()}


def write_reference(folder: Path, variant: str, kind: str = "masked_lm") -> Path:
    """A checkpoint as the original code stored it: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    source = REFERENCE / variant / ("" if kind == "masked_lm" else kind)
    shutil.copy(source / "config.json", folder)
    save_file(reference_weights(variant, kind), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
