"""Contextual document embeddings (CDE): a model, clusters of similar rows, and its training."""
