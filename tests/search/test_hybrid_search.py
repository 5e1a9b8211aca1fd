"""Search by vectors and words at once, against the sum of both by their definitions."""

import math
import random

import numpy as np
import pytest


pytest.importorskip("lancedb")
from neobert_hf.search import index as search_index  # noqa: E402
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder  # noqa: E402
from neobert_hf.search.index import Passage, VectorIndexError  # noqa: E402
from neobert_hf.search.keywords import hybrid_ndcg  # noqa: E402
from neobert_hf.search.lancedb_index import LanceDBIndex  # noqa: E402
from tests.helpers.bm25 import bm25  # noqa: E402
from tests.helpers.search_encoder import save_search_encoder  # noqa: E402


WORDS = "red fox jump dog blue high green bird sing song loud tall rock tree".split()
QUERY = "red bird song"


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """All different, and most of them without a word of the query."""
    generator = random.Random(0)
    return list(dict.fromkeys(" ".join(generator.choices(WORDS, k=generator.randint(2, 5))) for _ in range(60)))


def vectors(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def passages(documents: list[str]) -> list[Passage]:
    return [Passage("source", str(number), 0, 1, "hash", text) for number, text in enumerate(documents)]


@pytest.fixture
def index(documents, tmp_path) -> LanceDBIndex:
    made = LanceDBIndex(tmp_path / "index")
    made.create({"dimension": 8})
    made.add(passages(documents), vectors(len(documents)))
    made.optimize()
    return made


def sums(documents: list[str], query: str, cosines: np.ndarray, weight: float) -> np.ndarray:
    keywords = np.array([bm25(query, number, documents) for number in range(len(documents))])
    return cosines + weight * keywords / max(keywords.max(), 1e-9)


@pytest.mark.parametrize("weight", [0, 0.3, 5])
def test_the_score_is_the_cosine_and_the_share_of_the_words(index, documents, weight):
    (vector,) = vectors(1, seed=1)
    expected = sums(documents, QUERY, vectors(len(documents)) @ vector, weight)
    best = np.argsort(-expected)[:20]
    found = index.search_hybrid(QUERY, vector, 20, weight)
    assert [hit.document for hit in found] == list(map(str, best))
    assert [hit.text for hit in found] == [documents[number] for number in best]
    # BM25 is float32 there.
    assert np.abs([hit.score for hit in found] - expected[best]).max() < 1e-5


def test_what_words_find_far_from_the_nearest_vectors_has_its_whole_score(index, documents, monkeypatch):
    monkeypatch.setattr(search_index, "CANDIDATES", 3)
    (vector,) = vectors(1, seed=1)
    cosines = vectors(len(documents)) @ vector
    expected = sums(documents, QUERY, cosines, 5)
    best = np.argsort(-expected)[:3]
    assert not set(best) & set(np.argsort(-cosines)[:3])
    found = index.search_hybrid(QUERY, vector, 3, 5)
    assert [hit.document for hit in found] == list(map(str, best))
    assert np.abs([hit.score for hit in found] - expected[best]).max() < 1e-5


def test_a_query_without_a_known_word_is_searched_by_its_vector(index):
    (vector,) = vectors(1, seed=1)
    assert index.search_hybrid("zebra", vector, 7, 1.0) == index.search(vector, 7)


def test_an_index_without_words_is_an_error_until_it_is_tidied_up(index):
    (vector,) = vectors(1, seed=1)
    index.table.drop_index(index.table.list_indices()[0].name)
    with pytest.raises(VectorIndexError, match="cannot be searched by words yet: run `semantic_search.py index` again"):
        index.search_hybrid(QUERY, vector, 3, 1.0)
    assert len(index.search_hybrid(QUERY, vector, 3, 0.0)) == 3
    index.optimize()
    index.add([Passage("source", "new", 0, 1, "hash", "zebra")], vectors(1, seed=2))
    index.optimize()
    assert index.search_hybrid("zebra", vector, 1, 5.0)[0].document == "new"


def test_documents_are_replaced_in_one_version(index, documents):
    """Those of other sources stay, and so do others of this one; of a document that is shorter now nothing is left."""
    index.add([Passage("other", "3", 0, 1, "hash", "kept")], vectors(1))
    long = [Passage("source", "3", number, 3, "long", f"part {number}") for number in range(3)]
    index.replace(["3"], long, vectors(3, seed=3))
    reader = LanceDBIndex(index.folder)
    before, version = len(documents) + 3, index.table.version
    assert index.table.count_rows() == reader.table.count_rows() == before
    index.replace(["3", "5"], [*long[:1], Passage("source", "5", 0, 1, "new", "five")], vectors(2, seed=4))
    assert index.table.version == version + 1
    # An index that was opened before sees it as well.
    for opened in (index, reader):
        rows = {
            (row["source"], row["document"], row["number"]): row["text"] for row in opened.table.to_arrow().to_pylist()
        }
        assert len(rows) == opened.table.count_rows() == before - 2
        assert rows["source", "3", 0] == "part 0" and rows["source", "5", 0] == "five"
        assert rows["other", "3", 0] == "kept" and rows["source", "4", 0] == documents[4]
        (vector,) = vectors(1, seed=4)
        assert opened.search(vector, 1)[0].score == pytest.approx(1, abs=1e-5)


def test_scores_of_words_that_are_not_exact_yet_are_said_to_be_that(index, caplog):
    (vector,) = vectors(1, seed=1)
    index.search_hybrid(QUERY, vector, 3, 1.0)
    assert not caplog.text
    index.add([Passage("source", "new", 0, 1, "hash", "red bird")], vectors(1, seed=2))
    index.search_hybrid(QUERY, vector, 3, 1.0)
    assert (
        "1 passages were written to" in caplog.text
        and "is not exact. Let `semantic_search.py index` finish" in caplog.text
    )


def test_ndcg_is_that_of_its_definition(documents, tmp_path):
    queries = [QUERY, "blue dog", "tall tree jump", "zebra"]
    relevant = [3, 8, 21, 30]
    encoder = PassageEncoder(EmbeddingSettings(save_search_encoder(tmp_path / "encoder")), device="cpu")
    cosines = encoder.embed("query", queries) @ encoder.embed("document", documents).T
    gains = []
    for query, right, row in zip(queries, relevant, cosines):
        expected = sums(documents, query, row, 0.5)
        rank = 1 + (expected > expected[right]).sum()
        gains.append(1 / math.log2(1 + rank) if rank <= 20 else 0)
    assert 0 < np.mean(gains) < 1
    found = hybrid_ndcg(encoder, queries, [documents[number] for number in relevant], documents, [0.5, 8], cutoff=20)
    assert found[0.5] == pytest.approx(np.mean(gains)) and found[8] != found[0.5]
