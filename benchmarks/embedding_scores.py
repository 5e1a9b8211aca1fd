"""Test sets of real text for embeddings: two dictionaries to search, alone and together with BM25, and alike news.

FOLDOC explains computing terms: a query is a term, and its answer is the term's entry, which often contains the term.
WordNet explains words: a query is a sentence that uses a word, and its answer is the definition of the word, which
seldom shares a word with the sentence.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from datasets import Dataset
from lancedb.index import FTS
from lancedb.query import MatchQuery


# Definitions of WordNet that are searched, and those before them, which earlier experiments chose learning rates on.
TEST, DEVELOPMENT = 1000, 500
# Weight of BM25 in a search by vectors and words. Chosen on the development pairs, with one fine-tuned NeoBERT.
KEYWORD_WEIGHT = 0.5


@dataclass
class Retrieval:
    """Queries, and as many documents or more. The right document of a query is the one with the same number."""

    queries: list[str]
    documents: list[str]

    @cached_property
    def bm25_scores(self) -> np.ndarray:
        """BM25, (queries, documents); 0 where they share no word."""
        rows = pa.table({"number": range(len(self.documents)), "text": self.documents})
        table = lancedb.connect("memory://").create_table("documents", rows)
        # English stems, without stop words.
        table.create_index("text", config=FTS())
        scores = np.zeros((len(self.queries), len(self.documents)))
        for query, row in zip(self.queries, scores):
            found = table.search(MatchQuery(query, "text"), query_type="fts").select(["number", "_score"])
            for hit in found.limit(len(self.documents)).to_list():
                row[hit["number"]] = hit["_score"]
        return scores


def read_retrievals(data: Path) -> dict[str, Retrieval]:
    """The two dictionaries.

    The text in `data`, which models are trained on, holds nearly all of WordNet's definitions. So only those that it
    does not hold are answers to queries. The others are only searched, as wrong documents.
    """
    foldoc = Dataset.from_parquet(str(data / "retrieval_foldoc_test.parquet"))
    usage = Dataset.from_parquet(str(data / "pairs/wordnet_usage.parquet")).shuffle(seed=0)
    first_rows = {definition: row for row, definition in reversed(list(enumerate(usage["positive"])))}
    places = Dataset.from_parquet(str(data / "text/train.parquet"))["text"]
    asked = sorted(first_rows[definition] for definition in unread_texts(sorted(first_rows), places))
    asked = asked[: DEVELOPMENT + TEST]
    others = sorted(set(first_rows.values()) - set(asked))[: DEVELOPMENT + TEST - len(asked)]
    to_develop = len(asked) // 3
    rows = usage.select([*asked[to_develop:], *others[max(0, DEVELOPMENT - to_develop) :]])
    return {
        "FOLDOC": Retrieval(foldoc["query"][:], foldoc["document"][:]),
        "WordNet": Retrieval(rows["query"][: len(asked) - to_develop], rows["positive"][:]),
    }


def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def unread_texts(texts: list[str], places: Iterable[str]) -> list[str]:
    """The texts whose words do not occur in sequence in any of the `places`, ignoring case and punctuation."""
    texts_by_start: dict[tuple[str, ...], list[str]] = {}
    for text in texts:
        texts_by_start.setdefault(words_of(text)[:3], []).append(text)
    read = set()
    for words in map(words_of, places):
        for start, size in product(range(len(words)), (1, 2, 3)):
            for text in texts_by_start.get(words[start : start + size], ()):
                found = words_of(text)
                if words[start : start + len(found)] == found:
                    read.add(text)
    return [text for text in texts if text not in read]


def ndcg_at_10(scores: np.ndarray) -> float:
    """nDCG@10 of (queries, documents), where the document with the query's number is the right one.

    If other documents have the same score, the right one counts as last: embeddings that are all alike find nothing.
    """
    ranks = (scores >= scores.diagonal()[:, None]).sum(1) - 1
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def hybrid(cosines: np.ndarray, keywords: np.ndarray) -> np.ndarray:
    """The sum of both, (queries, documents), as in `VectorIndex.search_hybrid`, but over all documents."""
    return cosines + KEYWORD_WEIGHT * keywords / np.maximum(keywords.max(1, keepdims=True), 1e-9)
