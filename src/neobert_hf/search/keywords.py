"""Search by words (BM25), alone and together with an embedding model, to compare the model with both."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import lancedb
import pyarrow as pa
from lancedb.index import FTS
from lancedb.query import MatchQuery

from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.lancedb_index import LanceDBIndex
from neobert_hf.search.passages import Passage


def bm25_search(documents: list[str]) -> Callable[[str, int], list[tuple[int, float]]]:
    """Index texts in memory by their words: English stems, without stop words.

    Returns:
        A function of a query and a limit, which returns the numbers of the documents that share words with the query,
        best first, and their BM25 (https://doi.org/10.1561/1500000019).
    """
    rows = pa.table({"number": range(len(documents)), "text": documents})
    table = lancedb.connect("memory://").create_table("documents", rows)
    table.create_index("text", config=FTS())

    def search(query: str, limit: int) -> list[tuple[int, float]]:
        found = table.search(MatchQuery(query, "text"), query_type="fts").select(["number", "_score"]).limit(limit)
        return [(row["number"], row["_score"]) for row in found.to_list()]

    return search


def bm25_ndcg(queries: list[str], relevant: list[str], documents: list[str], cutoff: int = 10) -> float:
    """The mean nDCG of `bm25_search` over queries with one relevant document each.

    Args:
        relevant: the document of each query, one of `documents`.
        documents: all that is searched, each once.
        cutoff: a relevant document that is found below this rank counts as 0.
    """
    search = bm25_search(documents)
    found = ([documents[number] for number, _ in search(query, cutoff)] for query in queries)
    return _mean_ndcg(found, relevant)


def hybrid_ndcg(
    encoder: PassageEncoder,
    queries: list[str],
    relevant: list[str],
    documents: list[str],
    keyword_weights: list[float],
    cutoff: int = 10,
) -> dict[float, float]:
    """The mean nDCG of `VectorIndex.search_hybrid`, by keyword weight; see `bm25_ndcg`. Long documents are cut."""
    with TemporaryDirectory() as folder:
        index = LanceDBIndex(Path(folder))
        index.create(encoder.identity)
        passages = [Passage("", str(number), 0, 1, "", text) for number, text in enumerate(documents)]
        index.write(passages, encoder.embed("document", documents), replaced=[])
        index.commit()
        index.optimize()
        vectors = encoder.embed("query", queries)

        def found(weight: float) -> Iterable[list[str]]:
            for query, vector in zip(queries, vectors, strict=True):
                yield [hit.text for hit in index.search_hybrid(query, vector, cutoff, weight)]

        return {weight: _mean_ndcg(found(weight), relevant) for weight in keyword_weights}


def _mean_ndcg(found: Iterable[list[str]], relevant: list[str]) -> float:
    """The mean nDCG of the texts that each query found, best first, where only one text is relevant."""
    gains = (
        1 / math.log2(2 + texts.index(right)) if right in texts else 0.0
        for texts, right in zip(found, relevant, strict=True)
    )
    return sum(gains) / len(relevant)
