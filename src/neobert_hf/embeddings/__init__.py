"""Contrastive fine-tuning (paper, section 5.2.1) and embedding models at inference."""
