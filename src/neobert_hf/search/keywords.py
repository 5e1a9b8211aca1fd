"""Search by words (BM25), to compare an embedding model with: full-text search of LanceDB, in memory."""

import math

import lancedb
import pyarrow as pa
from lancedb.index import FTS
from lancedb.query import MatchQuery


def bm25_ndcg(queries: list[str], relevant: list[str], documents: list[str], cutoff: int = 10) -> float:
    """The mean nDCG of BM25 over queries with one relevant document each, with English stems and without stop words.

    Args:
        relevant: the document of each query, one of `documents`.
        documents: all that is searched, each once.
        cutoff: a relevant document that is found later than this counts 0.
    """
    table = lancedb.connect("memory://").create_table("documents", pa.table({"text": documents}))
    table.create_index("text", config=FTS())
    gains = 0.0
    for query, right in zip(queries, relevant, strict=True):
        search = table.search(MatchQuery(query, "text"), query_type="fts").select(["text", "_score"])
        found = [row["text"] for row in search.limit(cutoff).to_list()]
        gains += 1 / math.log2(2 + found.index(right)) if right in found else 0.0
    return gains / len(queries)
