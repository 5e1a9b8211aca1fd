"""Semantic search over one's own documents, in LanceDB or Weaviate."""
