"""Pseudo-perplexity against length (paper, section 5.3)."""
