"""Batches of similar rows: a first model groups each dataset into clusters, which are cut into batches.

A model learns to tell similar documents apart if they are in the same batch, and a context says something about a batch
only if the texts of the batch have something in common (https://arxiv.org/abs/2410.02525). No hard negatives are mined:
the other documents of a cluster take their place.

The paper's first phase has 235 million pairs. So no step holds all texts or all vectors: rows are read in blocks, and
vectors lie in a file that is mapped into memory.
"""

import math
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset, Features, List, Value
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize
from tqdm import tqdm
from transformers import set_seed

from neobert_hf.common.files import remove
from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.data.stored_rows import rows_once, store_tables
from neobert_hf.embeddings.datasets import PairDataset
from neobert_hf.embeddings.inference import check_finite
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.prompts import prompts_of_helper
from neobert_hf.embeddings.recipe import Run


# Columns that a clustered dataset has in addition to those of its pairs.
CLUSTER, VECTORS = "cluster", ("query_vector", "positive_vector")
# Rows that are read at a time.
BLOCK = 10_000
# Without a first model, TF-IDF and an SVD give vectors of this size; they are fitted to at most so many rows.
DIMENSIONS, FITTED_ROWS = 256, 50_000
# k-means sees so many random batches, each of at least three rows for each cluster.
BATCHES, LEAST_ROWS, ROWS_OF_CLUSTER = 30, 10_000, 3

# Unit vectors of a list of queries and of a list of documents, float32.
Embed = Callable[[list[str], list[str]], tuple[np.ndarray, np.ndarray]]


def add_clusters(run: Run, batch_sizes: dict[str, int]) -> None:
    """Give the rows of every training dataset a cluster and vectors, and keep them in `output_dir/clusters`.

    Args:
        batch_sizes: rows of a batch, by dataset. A cluster has the same number of rows on average.

    Raises:
        FileNotFoundError: if training has begun, and the clusters that it began with are missing.
    """
    folder, settings = Path(run.arguments.output_dir) / "clusters", run.settings
    first_model = model_fingerprint(settings.first_model) if settings.first_model else "TF-IDF"
    with run.arguments.main_process_first(desc="clustering"):
        for name, pairs in run.data.train.items():
            description = run.data.descriptions[name]
            prompts = [name, description.prompt, description.document_prompt]
            identity = fingerprint(pairs, prompts, first_model, batch_sizes[name], run.arguments.seed)
            store = partial(store_clusters, pairs, description, batch_sizes[name], run)
            run.data.train[name] = rows_once(folder / f"{identity}.parquet", run.checkpoint is not None, store)
    # Loading the first model may have drawn random numbers, on which a new head must not depend.
    set_seed(run.arguments.seed)


def store_clusters(pairs: Dataset, description: PairDataset, size: int, run: Run, file: Path) -> None:
    """Embed and cluster the rows, and write them with their clusters and vectors into a Parquet file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Deleted afterwards: the Parquet file has the same vectors. Each machine of a run may write one, hence the number.
    scratch = file.with_name(f"{file.stem}.vectors.{os.getpid()}.partial")
    try:
        vectors = embed_pairs(pairs, choose_embedding(pairs, description, run), scratch)
        clusters = find_clusters(vectors, size, run.arguments.seed)
        added = {CLUSTER: Value("int32")} | dict.fromkeys(VECTORS, List(Value("float16"), length=vectors.shape[2]))
        schema = Features(pairs.features | added).arrow_schema
        store_tables(with_clusters(pairs, clusters, vectors), schema, file)
    finally:
        remove(scratch)


def with_clusters(pairs: Dataset, clusters: np.ndarray, vectors: np.ndarray) -> Iterator[pa.Table]:
    """The pairs with their clusters and vectors as columns, block by block."""
    start = 0
    for table in pairs.with_format("arrow").iter(BLOCK):
        block = slice(start, start + len(table))
        table = table.append_column(CLUSTER, pa.array(clusters[block]))
        for number, name in enumerate(VECTORS):
            values = pa.array(vectors[block, number].ravel())
            table = table.append_column(name, pa.FixedSizeListArray.from_arrays(values, vectors.shape[2]))
        yield table
        start += len(table)


def choose_embedding(pairs: Dataset, description: PairDataset, run: Run) -> Embed:
    """How the rows are embedded: by the first model, or else by TF-IDF and an SVD that are fitted to a part of them."""
    settings = run.settings
    if settings.first_model is None:
        return fit_tfidf(pairs, run.arguments.seed)
    model = load_trained_model(settings.first_model, "first_model", settings.trust_remote_code)
    prompts = prompts_of_helper("first model", model, description)

    def embed(*columns: list[str]) -> tuple[np.ndarray, np.ndarray]:
        both = []
        for texts, prompt in zip(columns, prompts):
            both.append(model.encode(texts, prompt=prompt, normalize_embeddings=True, show_progress_bar=False))
            check_finite(both[-1], texts)
        return tuple(both)

    return embed


def fit_tfidf(pairs: Dataset, seed: int) -> Embed:
    """TF-IDF and an SVD, fitted to the texts of at most `FITTED_ROWS` random rows."""
    rows = draw_rows(len(pairs), FITTED_ROWS, np.random.default_rng(seed))
    part = pairs.select(rows)
    tfidf = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    matrix = tfidf.fit_transform(part["query"][:] + part["positive"][:])
    dimensions = min(DIMENSIONS, min(matrix.shape) - 1)
    svd = TruncatedSVD(dimensions, random_state=seed).fit(matrix) if dimensions > 0 else None

    def embed(*columns: list[str]) -> tuple[np.ndarray, np.ndarray]:
        matrices = (tfidf.transform(texts) for texts in columns)
        return tuple(normalize(svd.transform(each) if svd else each.toarray()) for each in matrices)

    return embed


def embed_pairs(pairs: Dataset, embed: Embed, file: Path) -> np.ndarray:
    """Vectors of all queries and documents in a file that is mapped into memory: (rows, 2, size of a vector).

    They are float16, as in the reference code of CDE.
    """
    vectors, start = None, 0
    for block in tqdm(pairs.iter(BLOCK), "embedding", math.ceil(len(pairs) / BLOCK), unit=" blocks", leave=False):
        both = np.stack(embed(block["query"], block["positive"]), 1)
        if vectors is None:
            shape = (len(pairs), *both.shape[1:])
            vectors = np.lib.format.open_memmap(file, "w+", np.float16, shape)
        vectors[start : start + len(both)] = both
        start += len(both)
    return vectors


def find_clusters(vectors: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The number of each row's cluster; clusters with neighbouring numbers are similar.

    Spherical k-means of query plus document, which minimises the paper's sum of both distances to the centroid
    (appendix G.1). It learns from random batches of the rows (MiniBatchKMeans), since 235 million do not fit in memory.

    Args:
        vectors: (rows, 2, size of a vector); of queries and documents.
        size: rows of a cluster on average.
    """
    generator = np.random.default_rng(seed)
    count = math.ceil(len(vectors) / size)
    drawn = max(LEAST_ROWS, ROWS_OF_CLUSTER * count)
    first = points(vectors[draw_rows(len(vectors), drawn, generator)])
    # Equal rows cannot be told apart.
    count = min(count, len(np.unique(first, axis=0)))
    fitted = MiniBatchKMeans(count, batch_size=drawn, n_init=1, random_state=seed).partial_fit(first)
    for _ in tqdm(range(1, BATCHES), "clustering", unit=" batches", leave=False):
        fitted.partial_fit(points(vectors[draw_rows(len(vectors), drawn, generator)]))
    blocks = (points(vectors[start : start + BLOCK]) for start in range(0, len(vectors), BLOCK))
    clusters = np.concatenate([fitted.predict(block) for block in blocks])
    return chain_of(normalize(fitted.cluster_centers_))[clusters].astype(np.int32)


def points(vectors: np.ndarray) -> np.ndarray:
    """What is clustered: the unit vector of query plus document of each row."""
    return normalize(vectors.astype(np.float32).sum(1))


def draw_rows(rows: int, most: int, generator: np.random.Generator) -> np.ndarray:
    """Numbers of different rows in ascending order: `most` of them at random, or all if there are fewer."""
    return np.arange(rows) if rows <= most else np.sort(generator.choice(rows, most, replace=False, shuffle=False))


def chain_of(centres: np.ndarray) -> np.ndarray:
    """The place of each centre in a chain, in which the next one is always the most similar of those that are left."""
    order, left = [0], np.ones(len(centres), dtype=bool)
    while len(order) < len(centres):
        left[order[-1]] = False
        order.append(int(np.where(left, centres @ centres[order[-1]], -np.inf).argmax()))
    return np.argsort(order)


class ClusterBatchSampler:
    """Batches of one cluster each as long as its rows last; the remaining rows of neighbouring clusters are combined.

    No text occurs twice in a batch. In an epoch each row occurs once, except for those at its end that fill no batch
    under this rule. They are different ones in each epoch. The order depends only on clusters, seed and epoch.

    Args:
        pairs: rows with their clusters.
        batch_size: rows.
    """

    def __init__(self, pairs: Dataset, batch_size: int, seed: int):
        # Hashes of query and positive, which take less memory than the texts.
        self.texts = np.empty((len(pairs), 2), dtype=np.uint64)
        clusters, start = np.empty(len(pairs), dtype=np.int32), 0
        for block in pairs.iter(BLOCK):
            end = start + len(block[CLUSTER])
            for column, name in enumerate(("query", "positive")):
                self.texts[start:end, column] = [hash_of(text) for text in block[name]]
            clusters[start:end], start = block[CLUSTER], end
        rows = np.argsort(clusters, kind="stable")
        self.clusters = np.split(rows, np.flatnonzero(np.diff(clusters[rows])) + 1)
        self.batch_size = batch_size
        # Sentence Transformers and Accelerate read this attribute.
        self.drop_last = True
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = random.Random(f"{self.seed} {self.epoch}")
        start = generator.randrange(len(self.clusters))
        batches, left = [], []
        for cluster in self.clusters[start:] + self.clusters[:start]:
            whole, rest = self._fill(generator.sample(cluster.tolist(), len(cluster)))
            batches += whole
            left += rest
        batches += self._fill(left)[0]
        generator.shuffle(batches)
        yield from (batch.tolist() for batch in batches)

    def __len__(self) -> int:
        return len(self.texts) // self.batch_size

    def _fill(self, rows: list[int]) -> tuple[list[np.ndarray], list[int]]:
        """Full batches in which no two rows share a text, and the rows that are left over."""
        batches, waiting = [], deque(rows)
        while len(waiting) >= self.batch_size:
            batch, seen, later = [], set(), []
            while waiting and len(batch) < self.batch_size:
                row = waiting.popleft()
                texts = self.texts[row].tolist()
                if seen.isdisjoint(texts):
                    batch.append(row)
                    seen.update(texts)
                else:
                    later.append(row)
            waiting.extendleft(reversed(later))
            if len(batch) < self.batch_size:
                waiting.extendleft(reversed(batch))
                break
            batches.append(np.array(batch))
        return batches, list(waiting)


def hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
