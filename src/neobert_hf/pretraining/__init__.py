"""Masked-language-model pretraining: settings, data, Trainer, optimizers, and the recipe."""

from neobert_hf.common.exports import offer


RECIPES = {"pretrain": "recipe"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
