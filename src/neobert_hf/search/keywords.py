"""How well a search by words (BM25) finds the right text of each query."""

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import FTS
from lancedb.query import MatchQuery


def bm25_shares(queries: list[str], documents: list[str]) -> np.ndarray:
    """BM25 of each document, as a share of the query's highest: (queries, documents); 0 without a common word."""
    rows = pa.table({"number": range(len(documents)), "text": documents})
    table = lancedb.connect("memory://").create_table("documents", rows)
    # As in the index: English stems, without stop words.
    table.create_index("text", config=FTS())
    shares = np.zeros((len(queries), len(documents)), dtype=np.float32)
    for query, row in zip(queries, shares):
        search = table.search(MatchQuery(query, "text"), query_type="fts").select(["number", "_score"])
        found = search.limit(len(documents)).to_arrow()
        row[found["number"].to_numpy()] = found["_score"].to_numpy()
    return shares / shares.max(1, keepdims=True).clip(1e-9)


def ranks_of(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The rank of the right document of each query, from 1; last among equal ones.

    Args:
        scores: (queries, documents).
        right: the number of each query's right document.
    """
    return (scores >= np.take_along_axis(scores, right[:, None], 1)).sum(1)


def ndcg(ranks: np.ndarray, cutoff: int = 10) -> np.ndarray:
    """The nDCG of each query, whose one right document has this rank."""
    return np.where(ranks <= cutoff, 1 / np.log2(ranks + 1), 0.0)
