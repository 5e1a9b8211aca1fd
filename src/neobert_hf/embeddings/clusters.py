"""Batches of similar rows: a first model groups each dataset into clusters, which are cut into batches.

A model learns to tell similar documents apart if they are in the same batch, and a context says something about a batch
only if the texts of the batch have something in common (https://arxiv.org/abs/2410.02525). No hard negatives are mined:
the other documents of a cluster take their place.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset, List, Value
from datasets.fingerprint import Hasher
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize
from transformers import set_seed

from neobert_hf.common.fingerprints import model_files_fingerprint
from neobert_hf.data.stored_rows import load_rows, store_rows
from neobert_hf.embeddings.descriptions import PairDataset
from neobert_hf.embeddings.inference import check_finite
from neobert_hf.embeddings.mining import name_for_prompts, prompts_of_helper
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.pairs import most_negatives
from neobert_hf.embeddings.recipe import Run
from neobert_hf.training.run_checkpoints import CheckpointError


# Columns that a clustered dataset has in addition to those of its pairs.
CLUSTER, VECTORS = "cluster", ("query_vector", "positive_vector")
# Size of the TF-IDF vectors after the SVD, which are used if there is no first model.
DIMENSIONS = 256


def add_clusters(run: Run, batch_sizes: dict[str, int]) -> None:
    """Give the rows of every training dataset a cluster and vectors, and keep them in `output_dir/clusters`.

    Args:
        batch_sizes: rows of a batch, by dataset. A cluster has the same number of rows on average.

    Raises:
        CheckpointError: if training has begun, and the clusters that it began with are missing.
        ResultError: if stored clusters are damaged.
    """
    folder, settings = Path(run.arguments.output_dir) / "clusters", run.settings
    first_model = model_files_fingerprint(settings.first_model) if settings.first_model else "TF-IDF"
    with run.arguments.main_process_first(desc="clustering"):
        for name, pairs in run.data.train.items():
            description = run.data.descriptions[name]
            prompts = (description.prompt, description.document_prompt)
            texts = [pairs["query"][:], pairs["positive"][:]]
            identity = [texts, prompts, first_model, batch_sizes[name], run.arguments.seed]
            if settings.first_model is not None:
                identity += name_for_prompts(settings.first_model, description)
            if most_negatives(pairs):
                # Negatives do not affect the clusters, but they are stored in the same file.
                identity.append(pairs["negatives"][:])
            identity = Hasher.hash(identity)
            file = folder / f"{identity}.parquet"
            if not file.exists():
                if run.checkpoint is not None:
                    raise CheckpointError(
                        f"The run in {folder.parent} began with the clusters in {file}, which is missing. Restore it, "
                        "or start anew with another `output_dir`."
                    )
                queries, positives = embed_pairs(pairs, description, run)
                clusters = find_clusters(queries, positives, batch_sizes[name], run.arguments.seed)
                store_rows(with_clusters(pairs, clusters, queries, positives), file)
            run.data.train[name] = load_rows(file)
    # Loading the first model may have drawn random numbers, on which a new head must not depend.
    set_seed(run.arguments.seed)


def with_clusters(pairs: Dataset, clusters: np.ndarray, queries: np.ndarray, positives: np.ndarray) -> Dataset:
    """The pairs with their clusters and vectors as columns."""
    pairs = pairs.add_column(CLUSTER, clusters, feature=Value("int32"))
    for name, vectors in zip(VECTORS, (queries, positives)):
        pairs = pairs.add_column(name, list(vectors), feature=List(Value("float32"), length=vectors.shape[1]))
    return pairs


def embed_pairs(pairs: Dataset, description: PairDataset, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors, float32, of all queries and of all documents: by the first model, or by TF-IDF and an SVD."""
    queries, positives = pairs["query"][:], pairs["positive"][:]
    settings = run.settings
    if settings.first_model is None:
        matrix = TfidfVectorizer(sublinear_tf=True, dtype=np.float32).fit_transform(queries + positives)
        dimensions = min(DIMENSIONS, min(matrix.shape) - 1)
        if dimensions > 0:
            matrix = TruncatedSVD(dimensions, random_state=run.arguments.seed).fit_transform(matrix)
        else:
            matrix = matrix.toarray()
        vectors = normalize(matrix).astype(np.float32)
        return vectors[: len(queries)], vectors[len(queries) :]
    model = load_trained_model(settings.first_model, settings.trust_remote_code)
    both = []
    for texts, prompt in zip((queries, positives), prompts_of_helper("first model", model, description)):
        vectors = model.encode(texts, prompt=prompt, normalize_embeddings=True, show_progress_bar=True)
        check_finite(vectors, texts)
        both.append(vectors.astype(np.float32))
    return both[0], both[1]


def find_clusters(queries: np.ndarray, positives: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The number of each row's cluster; clusters with neighbouring numbers are similar.

    Spherical k-means of query plus document, which minimises the paper's sum of both distances to the centroid
    (appendix G.1).

    Args:
        size: rows of a cluster on average.
    """
    rows = normalize(queries + positives)
    count = min(math.ceil(len(rows) / size), len(np.unique(rows, axis=0)))
    fitted = KMeans(count, n_init=1, random_state=seed).fit(rows)
    centres = normalize(fitted.cluster_centers_)
    order, left = [0], np.ones(len(centres), dtype=bool)
    while len(order) < len(centres):
        left[order[-1]] = False
        order.append(int(np.where(left, centres @ centres[order[-1]], -np.inf).argmax()))
    return np.argsort(order)[fitted.labels_].astype(np.int32)


class ClusterBatchSampler:
    """Batches of one cluster each as long as its rows last; the remaining rows of neighbouring clusters are combined.

    No text occurs twice in a batch. In an epoch each row occurs once, except for those at its end that fill no batch
    under this rule. They are different ones in each epoch. The order depends only on clusters, seed and epoch.

    Args:
        pairs: rows with their clusters.
        batch_size: rows.
    """

    def __init__(self, pairs: Dataset, batch_size: int, seed: int):
        numbers: dict[str, int] = {}
        columns = [pairs["query"][:], pairs["positive"][:]]
        self.texts = [tuple(numbers.setdefault(text, len(numbers)) for text in row) for row in zip(*columns)]
        clusters = np.asarray(pairs[CLUSTER][:])
        rows = np.argsort(clusters, kind="stable")
        self.clusters = [part.tolist() for part in np.split(rows, np.flatnonzero(np.diff(clusters[rows])) + 1)]
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
            whole, rest = self._fill(generator.sample(cluster, len(cluster)))
            batches += whole
            left += rest
        batches += self._fill(left)[0]
        generator.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        return len(self.texts) // self.batch_size

    def _fill(self, rows: list[int]) -> tuple[list[list[int]], list[int]]:
        """Full batches in which no two rows share a text, and the rows that are left over."""
        batches, waiting = [], deque(rows)
        while len(waiting) >= self.batch_size:
            batch, seen, later = [], set(), []
            while waiting and len(batch) < self.batch_size:
                row = waiting.popleft()
                if seen.isdisjoint(self.texts[row]):
                    batch.append(row)
                    seen.update(self.texts[row])
                else:
                    later.append(row)
            waiting.extendleft(reversed(later))
            if len(batch) < self.batch_size:
                waiting.extendleft(reversed(batch))
                break
            batches.append(batch)
        return batches, list(waiting)
