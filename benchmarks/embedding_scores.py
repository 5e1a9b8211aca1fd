"""How good embeddings are on real text: two dictionaries to search, alone and together with BM25, and similar news.

FOLDOC explains computing terms: a query is a term, and its answer is the term's entry, which often contains the term.
WordNet explains words: a query is a sentence that uses a word, and its answer is the definition of the word, which
seldom shares a word with the sentence.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from neobert_hf.common.paths import check_exists
from neobert_hf.embeddings.models import build_encoder
from neobert_hf.modeling_neobert import LOADING_LOCK
from neobert_hf.search.keywords import bm25_search


DEVELOPMENT, TEST = 500, 1000
# Weight of BM25 in a search by vectors and words. Chosen on the development pairs, with one fine-tuned NeoBERT.
KEYWORD_WEIGHT = 0.5


@dataclass
class Retrieval:
    """Queries, and as many documents or more. The right document of a query is the one with the same number.

    Args:
        dataset: the name under which a model that was fine-tuned on such pairs keeps the prompt of queries. With
            `-document` appended, it is the name of the prompt of documents.
    """

    queries: list[str]
    documents: list[str]
    dataset: str

    @cached_property
    def bm25_scores(self) -> np.ndarray:
        """BM25, (queries, documents); 0 where they share no word."""
        search = bm25_search(self.documents)
        scores = np.zeros((len(self.queries), len(self.documents)))
        for query, row in zip(self.queries, scores):
            for number, score in search(query, len(self.documents)):
                row[number] = score
        return scores


@dataclass
class TestData:
    """What models are scored on; learning rates are chosen on `development`."""

    development: dict[str, Retrieval]
    test: dict[str, Retrieval]
    similarity: Dataset


def split_pairs(data: Path, output: Path, limit: int | None = None) -> TestData:
    """Hold out rows of the pairs. The rows left to train on are written to `output`, under the names of the sources.

    The pretraining text contains nearly all of WordNet's definitions. So only those that it does not contain are
    answers to queries, a third of them for development. The others are only searched, as wrong documents.

    Args:
        data: folder with pairs/, the test sets and text/train.parquet, which models were pretrained on.
        limit: rows to develop and to test on, for a trial.
    """
    check_exists(f"{data}/pairs", "data")
    development, test = limit or DEVELOPMENT, limit or TEST
    pairs = {file.name: Dataset.from_parquet(str(file)) for file in sorted((data / "pairs").glob("*.parquet"))}
    foldoc = pairs["foldoc.parquet"].shuffle(seed=0)
    foldoc_test = Dataset.from_parquet(str(data / "retrieval_foldoc_test.parquet"))
    foldoc_test = foldoc_test.select(range(min(test, len(foldoc_test))))

    # A definition is held out with all its rows, so that no model is fine-tuned on it.
    usage = pairs["wordnet_usage.parquet"].shuffle(seed=0)
    first_rows = {definition: row for row, definition in reversed(list(enumerate(usage["positive"])))}
    places = Dataset.from_parquet(str(data / "text/train.parquet"))["text"]
    unread = unread_texts(sorted(first_rows), places)
    asked = sorted(first_rows[definition] for definition in unread)[: development + test]
    others = sorted(set(first_rows.values()) - set(asked))[: development + test - len(asked)]
    to_develop, to_test = asked[: len(asked) // 3], asked[len(asked) // 3 :]
    spare = development - len(to_develop)

    output.mkdir(parents=True, exist_ok=True)
    # Some entries of FOLDOC occur under several terms.
    held = {*foldoc[:development]["positive"], *foldoc_test["document"]}
    _without(foldoc, held).to_parquet(output / "foldoc.parquet")
    held = set(usage.select([*asked, *others])["positive"])
    for name in ("wordnet.parquet", "wordnet_usage.parquet"):
        _without(pairs[name], held).to_parquet(output / name)

    def of_usage(asked: list[int], others: list[int]) -> Retrieval:
        rows = usage.select([*asked, *others])
        return Retrieval(rows["query"][: len(asked)], rows["positive"][:], "wordnet_usage")

    foldoc_development = foldoc.select(range(development))
    return TestData(
        development={
            "FOLDOC": Retrieval(foldoc_development["query"][:], foldoc_development["positive"][:], "foldoc"),
            "WordNet": of_usage(to_develop, others[:spare]),
        },
        test={
            "FOLDOC": Retrieval(foldoc_test["query"][:], foldoc_test["document"][:], "foldoc"),
            "WordNet": of_usage(to_test, others[spare:]),
        },
        similarity=Dataset.from_parquet(str(data / "sts_lee.parquet")),
    )


def _without(pairs: Dataset, held: set[str]) -> Dataset:
    return pairs.select([row for row, text in enumerate(pairs["positive"]) if text not in held])


def unread_texts(texts: list[str], places: Iterable[str]) -> list[str]:
    """The texts whose words do not occur in sequence in any of the `places`, ignoring case and punctuation."""
    numbers: dict[str, int] = {}

    def to_numbers(text: str) -> list[int]:
        return [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+", text.lower())]

    # Every place ends with a number that does not belong to a word.
    read = np.array([number for place in places for number in (*to_numbers(place), -1)])
    found = [np.array(to_numbers(text)) for text in texts]
    order = np.argsort(read, kind="stable")
    # Where in `order` the positions of each number begin. The last entry is the end of all.
    starts = np.searchsorted(read[order], np.arange(len(numbers) + 1))
    counts = np.diff(starts)

    def is_read(words: np.ndarray) -> bool:
        # Start from the positions of the rarest word, since there are the fewest of these.
        rarest = counts[words].argmin()
        starting = order[starts[words[rarest]] : starts[words[rarest] + 1]] - rarest
        starting = starting[(starting >= 0) & (starting + len(words) <= len(read))]
        return any((read[start : start + len(words)] == words).all() for start in starting)

    return [text for text, words in zip(texts, found) if not is_read(words)]


def ndcg_at_10(scores: np.ndarray) -> float:
    """nDCG@10 of (queries, documents), where the document with the query's number is the right one.

    If other documents have the same score, the right one counts as last: embeddings that are all alike find nothing.
    """
    if not np.isfinite(scores).all():
        raise ValueError("The scores of a retrieval are not all finite.")
    ranks = (scores >= scores.diagonal()[:, None]).sum(1) - 1
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def load_model(path: Path) -> SentenceTransformer:
    """An embedding model, or an encoder, which gets mean pooling."""
    is_encoder = not (path / "modules.json").exists()
    with LOADING_LOCK:  # Models, BERT among them, are scored in several threads at once.
        return build_encoder(str(path), 128) if is_encoder else SentenceTransformer(str(path), device="cpu")


def dense_scores(encoder: SentenceTransformer, data: Retrieval, **options: Any) -> np.ndarray:
    """Cosines, (queries, documents).

    Args:
        options: further arguments of `encode`, such as a context.
    """
    prompt, document_prompt = (encoder.prompts.get(name, "") for name in (data.dataset, f"{data.dataset}-document"))
    queries = encoder.encode(data.queries, prompt=prompt, normalize_embeddings=True, **options)
    return queries @ encoder.encode(data.documents, prompt=document_prompt, normalize_embeddings=True, **options).T


def hybrid(cosines: np.ndarray, keywords: np.ndarray) -> np.ndarray:
    """The sum of both, (queries, documents), as in `VectorIndex.search_hybrid`, but over all documents."""
    return cosines + KEYWORD_WEIGHT * keywords / np.maximum(keywords.max(1, keepdims=True), 1e-9)


def evaluate(encoder: SentenceTransformer, tests: TestData) -> dict[str, float]:
    """All scores of a model."""
    scores = {}
    for part, retrievals in (("development", tests.development), ("test", tests.test)):
        for name, data in retrievals.items():
            dense = dense_scores(encoder, data)
            scores[f"{part} {name}"] = ndcg_at_10(dense)
            if part == "test":
                scores[f"{part} {name} and words"] = ndcg_at_10(hybrid(dense, data.bm25_scores))
    pairs = tests.similarity
    evaluator = EmbeddingSimilarityEvaluator(pairs["sentence1"][:], pairs["sentence2"][:], pairs["score"][:])
    scores["similarity"] = float(evaluator(encoder)["spearman_cosine"])
    return scores


def bm25_alone(tests: TestData) -> dict[str, float]:
    return {f"test {name}": ndcg_at_10(data.bm25_scores) for name, data in tests.test.items()}
