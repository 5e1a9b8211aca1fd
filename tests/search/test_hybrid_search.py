"""Search by vectors and words, exact and approximate, against their definitions."""

import json
import math
import random

import numpy as np
import pytest


pytest.importorskip("lancedb")
from neobert_hf.search import (
    lancedb_index,  # noqa: E402
    vector_index,  # noqa: E402
)
from neobert_hf.search.keywords import bm25_shares, ndcg, ranks_of  # noqa: E402
from neobert_hf.search.lancedb_index import LanceDBIndex  # noqa: E402
from neobert_hf.search.passages import Passage  # noqa: E402
from neobert_hf.search.vector_index import VectorIndex  # noqa: E402
from tests.helpers.bm25 import bm25  # noqa: E402
from tests.search.conftest import unit_vectors  # noqa: E402


WORDS = "red fox jump dog blue high green bird sing song loud tall rock tree".split()
QUERY = "red bird song"


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """All different, and most of them without a word of the query."""
    generator = random.Random(0)
    return list(dict.fromkeys(" ".join(generator.choices(WORDS, k=generator.randint(2, 5))) for _ in range(60)))


def fill(index: VectorIndex, texts: list[str]) -> VectorIndex:
    index.create({"dimension": 8, "precision": None})
    passages = [Passage("source", str(number), 0, 1, "hash", text) for number, text in enumerate(texts)]
    index.write(passages, unit_vectors(len(texts)), [])
    index.commit()
    index.optimize()
    return index


def sums(documents: list[str], query: str, cosines: np.ndarray, weight: float) -> np.ndarray:
    keywords = np.array([bm25(query, number, documents) for number in range(len(documents))])
    return cosines + weight * keywords / max(keywords.max(), 1e-9)


@pytest.mark.parametrize(("weight", "count", "candidates"), [(0, 20, 200), (0.3, 20, 200), (5, 20, 200), (5, 2, 3)])
def test_the_score_is_the_cosine_and_the_share_of_the_words(documents, weight, count, candidates, opened, monkeypatch):
    """With 3 candidates, the best are found by their words only, far from the nearest vectors."""
    index, (vector,) = fill(opened(), documents), unit_vectors(1, seed=1)
    monkeypatch.setattr(vector_index, "CANDIDATES", candidates)
    expected = sums(documents, QUERY, unit_vectors(len(documents)) @ vector, weight)
    best = np.argsort(-expected)[:count]
    found = index.search_hybrid(QUERY, vector, count, weight)
    assert [hit.document for hit in found] == list(map(str, best))
    assert [hit.text for hit in found] == [documents[number] for number in best]
    # BM25 is float32 there.
    assert np.abs([hit.score for hit in found] - expected[best]).max() < 1e-5
    assert index.search_hybrid("zebra", vector, 7, 1.0) == index.search(vector, 7)


def test_many_passages_are_searched_approximately_if_that_finds_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lancedb_index, "EXACT_BELOW", 1000)
    index = fill(LanceDBIndex(tmp_path / "index"), ["text"] * 1500)
    stored = json.loads((tmp_path / "index" / "recall.json").read_text())
    assert stored["passages"] == 1500 and stored["recall_at_10"] >= 0.95
    assert "1,500" in capsys.readouterr().out
    assert "IvfPq" in [one.index_type for one in index.table.list_indices()]
    # It is not made again for a few more, and an index that finds too little is not used.
    index.optimize()
    assert not capsys.readouterr().out
    monkeypatch.setattr(LanceDBIndex, "_recall", lambda index: 0.5)
    index = fill(LanceDBIndex(tmp_path / "bad"), ["text"] * 1500)
    assert sorted(one.columns for one in index.table.list_indices()) == [["document"], ["text"]]


def test_ndcg_is_that_of_its_definition(documents):
    queries, right = [QUERY, "blue dog", "tall tree jump", "zebra"], np.array([3, 8, 21, 30])
    wanted = np.array([[bm25(query, number, documents) for number in range(len(documents))] for query in queries])
    found = bm25_shares(queries, documents)
    assert found == pytest.approx(wanted / wanted.max(1, keepdims=True).clip(1e-9), abs=1e-5)
    # Last among those that are equal, as all are for the last query, whose word no document has.
    ranks = [sum(row > row[number] - 1e-6) for row, number in zip(wanted, right)]
    gains = [1 / math.log2(1 + rank) if rank <= 20 else 0 for rank in ranks]
    assert ranks[3] == len(documents) and 0 < sum(gains) < 3
    assert ndcg(ranks_of(found, right), cutoff=20).mean() == pytest.approx(sum(gains) / 4)
