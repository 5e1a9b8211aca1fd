"""How much a search by words (BM25) finds, alone and together with an embedding model."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.lancedb_index import LanceDBIndex
from neobert_hf.search.passages import Passage
from neobert_hf.search.vector_index import Hit


def ndcg_of_queries(
    encoder: PassageEncoder,
    queries: list[str],
    relevant: list[str],
    documents: list[str],
    keyword_weight: float,
    cutoff: int = 10,
) -> dict[str, np.ndarray]:
    """The nDCG of each query in three searches: by vectors alone, by vectors and words, and by words alone.

    Args:
        relevant: the one relevant document of each query, one of `documents`. Long documents are cut.
        documents: all that is searched, each once.
        keyword_weight: of the words in the search by both; see `VectorIndex.search_hybrid`.
        cutoff: a relevant document that is found below this rank counts as 0.

    Returns:
        `alone`, `with_words` and `words`, (queries,) each.
    """
    vectors = encoder.embed("query", queries)

    def ndcg(search: Callable[[str, np.ndarray], list[Hit]]) -> np.ndarray:
        gains = []
        for query, vector, right in zip(queries, vectors, relevant, strict=True):
            texts = [hit.text for hit in search(query, vector)]
            gains.append(1 / math.log2(2 + texts.index(right)) if right in texts else 0.0)
        return np.array(gains)

    with TemporaryDirectory() as folder:
        index = LanceDBIndex(Path(folder))
        index.create(encoder.identity)
        passages = [Passage("", str(number), 0, 1, "", text) for number, text in enumerate(documents)]
        index.write(passages, encoder.embed("document", documents), replaced=[])
        index.commit()
        index.optimize()
        return {
            "alone": ndcg(lambda query, vector: index.search(vector, cutoff)),
            "with_words": ndcg(partial(index.search_hybrid, limit=cutoff, keyword_weight=keyword_weight)),
            "words": ndcg(lambda query, vector: [hit for hit, _ in index.match(query, vector, cutoff)]),
        }
