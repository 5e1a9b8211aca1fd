"""Semantic search over one's own documents, in LanceDB or Weaviate."""

from neobert_hf.common.exports import offer


__all__ = ["index", "query", "remove", "retrieval_from_documents"]
__getattr__ = offer(__name__, __all__)
