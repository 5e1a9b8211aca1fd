"""Embedding models and rerankers: their training on pairs, pairs from raw text, and the vectors of a corpus."""

from neobert_hf.common.exports import offer


__all__ = [
    "embed",
    "finetune_embeddings",
    "make_pairs",
    "train_multi_vector_encoder",
    "train_reranker",
    "train_sparse_encoder",
]
__getattr__ = offer(__name__, __all__)
