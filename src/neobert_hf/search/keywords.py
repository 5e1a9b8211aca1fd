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


def ndcg_with_words(
    encoder: PassageEncoder,
    queries: list[str],
    relevant: list[str],
    documents: list[str],
    keyword_weights: list[float],
    cutoff: int = 10,
) -> tuple[float, dict[float, float]]:
    """The mean nDCG of a search by words, and of `VectorIndex.search_hybrid`. Long documents are cut.

    Args:
        relevant: the one relevant document of each query, one of `documents`.
        documents: all that is searched, each once.
        keyword_weights: those to try in a hybrid search.
        cutoff: a relevant document that is found below this rank counts as 0.

    Returns:
        The mean nDCG of BM25 alone, and that of a hybrid search by keyword weight.
    """
    vectors = encoder.embed("query", queries)

    def ndcg(search: Callable[[str, np.ndarray], list[Hit]]) -> float:
        gains = []
        for query, vector, right in zip(queries, vectors, relevant, strict=True):
            texts = [hit.text for hit in search(query, vector)]
            gains.append(1 / math.log2(2 + texts.index(right)) if right in texts else 0.0)
        return sum(gains) / len(gains)

    with TemporaryDirectory() as folder:
        index = LanceDBIndex(Path(folder))
        index.create(encoder.identity)
        passages = [Passage("", str(number), 0, 1, "", text) for number, text in enumerate(documents)]
        index.write(passages, encoder.embed("document", documents), replaced=[])
        index.commit()
        index.optimize()
        by_words = ndcg(lambda query, vector: [hit for hit, _ in index.match(query, vector, cutoff)])
        by_weight = {
            weight: ndcg(partial(index.search_hybrid, limit=cutoff, keyword_weight=weight))
            for weight in keyword_weights
        }
    return by_words, by_weight
