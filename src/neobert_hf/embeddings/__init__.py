"""Embedding models and rerankers: their training on pairs, pairs from raw text, and the vectors of a corpus."""

from importlib import import_module


# Each recipe and its module, which is imported when the recipe is asked for: inference needs less than training.
RECIPES = {
    "embed": "corpus",
    "finetune_embeddings": "dense",
    "make_pairs": "text_pairs",
    "train_multi_vector_encoder": "multi_vector",
    "train_reranker": "reranker",
    "train_sparse_encoder": "sparse",
}
__all__ = list(RECIPES)


def __getattr__(name: str):
    if name not in RECIPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{RECIPES[name]}"), name)
