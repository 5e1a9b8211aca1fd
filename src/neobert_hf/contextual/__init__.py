"""Contextual document embeddings (CDE): a model, clusters of similar rows, and its training."""

from neobert_hf.common.exports import offer


__all__ = ["train_contextual"]
__getattr__ = offer(__name__, __all__)
