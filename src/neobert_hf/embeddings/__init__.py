"""Embedding models and rerankers: their training on pairs, pairs from raw text, and the vectors of a corpus."""

from neobert_hf.common.exports import offer


RECIPES = {
    "embed": "corpus",
    "finetune_embeddings": "dense",
    "make_pairs": "text_pairs",
    "train_multi_vector_encoder": "multi_vector",
    "train_reranker": "reranker",
    "train_sparse_encoder": "sparse",
}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
