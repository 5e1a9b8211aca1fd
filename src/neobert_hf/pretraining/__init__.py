"""Masked-language-model pretraining, from text to model (paper, sections 3.2 and 3.3)."""
