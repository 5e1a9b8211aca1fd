"""Masked-language-model pretraining: settings, data, Trainer, optimizers, and the recipe."""

from neobert_hf.pretraining.recipe import pretrain


__all__ = ["pretrain"]
