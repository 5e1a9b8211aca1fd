"""Masked-language-model pretraining: settings, data, Trainer, optimizers, and the recipe."""

from neobert_hf.common.exports import offer


__all__ = ["pretrain"]
__getattr__ = offer(__name__, __all__)
