"""Distillation: a small student learns from what a teacher computed for texts."""

from neobert_hf.common.exports import offer


__all__ = ["distil"]
__getattr__ = offer(__name__, __all__)
