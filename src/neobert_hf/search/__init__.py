"""Semantic search over one's own documents, in LanceDB or Weaviate."""

from typing import Any

from neobert_hf.search.recipe import index, query, remove


__all__ = ["index", "query", "remove", "retrieval_from_documents"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: it evaluates, which needs the libraries of another extra than a search.
    if name == "retrieval_from_documents":
        from neobert_hf.search.own_documents import retrieval_from_documents

        return retrieval_from_documents
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
