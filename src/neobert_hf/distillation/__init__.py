"""Distillation: a small NeoBERT learns what an embedding model computes for texts."""

from neobert_hf.distillation.recipe import distil


__all__ = ["distil"]
