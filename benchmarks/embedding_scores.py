"""How good embeddings are on real text: two dictionaries to search, alone and together with BM25, and alike news.

FOLDOC explains computing terms: a term asks for its entry, which often holds the term. WordNet explains words: a
sentence that uses a word asks for the word's definition, which seldom shares a word with it.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from neobert_hf.common.atomic_writes import write_json
from neobert_hf.embeddings.models import build_encoder


DEVELOPMENT, TEST = 500, 1000
# Of reciprocal rank fusion: Cormack et al., 2009.
FUSION_CONSTANT = 60


@dataclass
class Retrieval:
    """Queries, and documents of which the one with the query's number is right.

    Args:
        dataset: under whose name a model that was fine-tuned on such pairs keeps the prompt of its queries.
    """

    queries: list[str]
    documents: list[str]
    dataset: str

    @cached_property
    def bm25_scores(self) -> np.ndarray:
        """BM25 (https://doi.org/10.1561/1500000019) of words without English stop words, (queries, documents)."""
        retriever = bm25s.BM25()
        retriever.index(bm25s.tokenize(self.documents, stopwords="en", show_progress=False), show_progress=False)
        tokens = bm25s.tokenize(self.queries, stopwords="en", show_progress=False)
        found, values = retriever.retrieve(tokens, k=len(self.documents), show_progress=False)
        scores = np.zeros_like(values)
        np.put_along_axis(scores, found, values, 1)
        return scores


@dataclass
class TestData:
    """What models are scored on; `development` chooses learning rates."""

    development: dict[str, Retrieval]
    test: dict[str, Retrieval]
    similarity: Dataset


def split_pairs(data: Path, output: Path, limit: int | None = None) -> TestData:
    """Hold rows of the pairs out. What is left to train on is written to `output`, under the names of the sources.

    Args:
        limit: rows to develop and to test on, for a trial.
    """
    development, test = limit or DEVELOPMENT, limit or TEST
    pairs = {file.name: Dataset.from_parquet(str(file)) for file in sorted((data / "pairs").glob("*.parquet"))}
    foldoc = pairs["foldoc.parquet"].shuffle(seed=0)
    usage = pairs["wordnet_usage.parquet"].shuffle(seed=0)
    # A definition is held out with all its rows, so that no model has seen it.
    first_rows = {definition: row for row, definition in reversed(list(enumerate(usage["positive"])))}
    held_rows = sorted(first_rows.values())[: development + test]
    held = usage.select(held_rows)
    held_definitions = set(held["positive"])
    output.mkdir(parents=True, exist_ok=True)
    foldoc.select(range(development, len(foldoc))).to_parquet(output / "foldoc.parquet")
    for name in ("wordnet.parquet", "wordnet_usage.parquet"):
        kept = [row for row, text in enumerate(pairs[name]["positive"]) if text not in held_definitions]
        pairs[name].select(kept).to_parquet(output / name)

    def of_rows(rows: Dataset, document: str, dataset: str) -> Retrieval:
        return Retrieval(rows["query"][:], rows[document][:], dataset)

    foldoc_test = Dataset.from_parquet(str(data / "retrieval_foldoc_test.parquet"))
    foldoc_test = foldoc_test.select(range(min(test, len(foldoc_test))))
    return TestData(
        development={
            "FOLDOC": of_rows(foldoc.select(range(development)), "positive", "foldoc"),
            "WordNet": of_rows(held.select(range(development)), "positive", "wordnet_usage"),
        },
        test={
            "FOLDOC": of_rows(foldoc_test, "document", "foldoc"),
            "WordNet": of_rows(held.select(range(development, development + test)), "positive", "wordnet_usage"),
        },
        similarity=Dataset.from_parquet(str(data / "sts_lee.parquet")),
    )


def ndcg_at_10(scores: np.ndarray) -> float:
    """nDCG@10 of (queries, documents), where the document with the query's number is the right one.

    Where others have the same score the right one comes last: embeddings that are all alike find nothing.
    """
    if not np.isfinite(scores).all():
        raise ValueError("The scores of a retrieval are not all finite.")
    ranks = (scores >= scores.diagonal()[:, None]).sum(1) - 1
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def load_model(path: Path) -> SentenceTransformer:
    """An embedding model, or an encoder, which gets mean pooling."""
    is_encoder = not (path / "modules.json").exists()
    return build_encoder(str(path), 128) if is_encoder else SentenceTransformer(str(path), device="cpu")


def dense_scores(encoder: SentenceTransformer, data: Retrieval, **options: Any) -> np.ndarray:
    """Cosines, (queries, documents).

    Args:
        options: further arguments of `encode`, such as a context.
    """
    prompt = encoder.prompts.get(data.dataset, "")
    queries = encoder.encode(data.queries, prompt=prompt, normalize_embeddings=True, **options)
    return queries @ encoder.encode(data.documents, prompt="", normalize_embeddings=True, **options).T


def fuse(*scores: np.ndarray) -> np.ndarray:
    """Reciprocal rank fusion of several (queries, documents)."""
    ranks = [(-one).argsort(1, kind="stable").argsort(1) for one in scores]
    return sum(1 / (FUSION_CONSTANT + rank) for rank in ranks)


def evaluate(encoder: SentenceTransformer, tests: TestData, file: Path) -> dict[str, float]:
    """All scores of a model, which are kept in a file."""
    if file.exists():
        return json.loads(file.read_text())
    scores = {}
    for part, retrievals in (("development", tests.development), ("test", tests.test)):
        for name, data in retrievals.items():
            dense = dense_scores(encoder, data)
            scores[f"{part} {name}"] = ndcg_at_10(dense)
            if part == "test":
                scores[f"{part} {name} with BM25"] = ndcg_at_10(fuse(dense, data.bm25_scores))
    pairs = tests.similarity
    evaluator = EmbeddingSimilarityEvaluator(pairs["sentence1"][:], pairs["sentence2"][:], pairs["score"][:])
    scores["similarity"] = float(evaluator(encoder)["spearman_cosine"])
    write_json(file, scores)
    return scores


def bm25_alone(tests: TestData) -> dict[str, float]:
    return {f"test {name}": ndcg_at_10(data.bm25_scores) for name, data in tests.test.items()}
