"""Contextual document embeddings (CDE): a model, clusters of similar rows, and its training."""

from neobert_hf.common.exports import offer


RECIPES = {"train_contextual": "recipe"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
