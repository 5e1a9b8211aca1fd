"""Semantic search over one's own documents, in LanceDB or Weaviate."""

from neobert_hf.common.exports import offer


RECIPES = {"index": "recipe", "query": "recipe", "remove": "recipe", "retrieval_from_documents": "own_documents"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
