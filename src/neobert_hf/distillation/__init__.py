"""Distillation: a small student learns from what a teacher computed for texts."""

from neobert_hf.common.exports import offer


RECIPES = {"distil": "recipe"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
