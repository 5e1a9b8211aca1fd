"""Batches of similar rows: a first model groups each dataset into clusters, which are cut into batches.

A model learns to tell similar documents apart if they are in the same batch, and a context says something about a batch
only if the texts of the batch have something in common (https://arxiv.org/abs/2410.02525). No hard negatives are mined:
the other documents of a cluster take their place.

The paper's first phase has 235 million pairs. So no step holds all texts or all vectors: rows are read in blocks, and
vectors lie in a file that `datasets` maps into memory.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets
from sklearn.cluster import MiniBatchKMeans
from sklearn.preprocessing import normalize
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from neobert_hf.common.files import remove, write_parquet
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.embeddings.datasets import PairDataset
from neobert_hf.embeddings.mining import prompts_of_helper
from neobert_hf.embeddings.models import check_finite, load_trained_model
from neobert_hf.embeddings.recipe import PairTraining


# Columns that a clustered dataset has in addition to those of its pairs.
CLUSTER, VECTORS = "cluster", ("query_vector", "positive_vector")
# Rows that are read at a time.
BLOCK = 10_000
# k-means sees so many random batches, each of at least three rows for each cluster.
BATCHES, LEAST_ROWS, ROWS_OF_CLUSTER = 30, 10_000, 3


def add_clusters(training: PairTraining) -> None:
    """Give the rows of every training dataset a cluster and vectors. They are stored once, in `output_dir/clusters`.

    A cluster has as many rows on average as a batch of the dataset.

    Raises:
        FileNotFoundError: if training has begun, and the clusters that it began with are missing.
    """
    first_model, seed = model_fingerprint(training.settings.first_model), training.arguments.seed
    for dataset in training.data.train.values():
        size = dataset.rows_of_batch(training.arguments.per_device_train_batch_size)
        make = partial(cluster_rows, training, dataset, size)
        training.replace_rows(dataset, "clusters", [first_model, size, seed], make)


def cluster_rows(training: PairTraining, dataset: PairDataset, size: int, file: Path) -> None:
    """Store the rows of a dataset with the columns `CLUSTER` and `VECTORS`. Until then, vectors lie beside `file`."""
    beside = file.with_suffix(".vectors.arrow")
    vectors = embed_pairs(training, dataset, beside)
    clusters = find_clusters(vectors, size, training.arguments.seed)
    write_parquet(file, concatenate_datasets([dataset.rows, vectors], axis=1).add_column(CLUSTER, clusters))
    remove(beside)


def embed_pairs(training: PairTraining, dataset: PairDataset, file: Path) -> Dataset:
    """The columns `VECTORS`: the first model's unit vectors of all queries and documents, in a file of this name.

    They are float16, as in the reference code of CDE. A run that was interrupted after this goes on with the file.
    """
    settings = training.settings
    model = load_trained_model(settings.first_model, "first_model", settings.trust_remote_code)
    prompts = prompts_of_helper("first model", model, dataset)

    def embed(block: dict[str, list[str]]) -> dict[str, np.ndarray]:
        found = {}
        for texts, name, prompt in zip((block["query"], block["positive"]), VECTORS, prompts):
            vectors = model.encode(texts, prompt=prompt, normalize_embeddings=True, show_progress_bar=False)
            check_finite(vectors, texts)
            found[name] = vectors.astype(np.float16)
        return found

    file.parent.mkdir(parents=True, exist_ok=True)
    vector = List(Value("float16"), length=model.get_embedding_dimension())
    return dataset.rows.map(
        embed,
        batched=True,
        batch_size=BLOCK,
        remove_columns=dataset.rows.column_names,
        features=Features(dict.fromkeys(VECTORS, vector)),
        cache_file_name=str(file),
        # Otherwise `datasets` would hash the model.
        new_fingerprint=file.stem,
        desc="embedding",
    )


def find_clusters(vectors: Dataset, size: int, seed: int) -> np.ndarray:
    """The number of each row's cluster, int32; clusters with neighbouring numbers are similar.

    Spherical k-means of query plus document, which minimises the paper's sum of both distances to the centroid
    (appendix G.1). It learns from random batches of the rows (MiniBatchKMeans), since 235 million do not fit in memory.

    Args:
        vectors: the columns `VECTORS`.
        size: rows of a cluster on average.
    """
    generator, vectors = np.random.default_rng(seed), vectors.with_format("numpy")
    count = math.ceil(len(vectors) / size)
    drawn = max(LEAST_ROWS, ROWS_OF_CLUSTER * count)

    def points(rows: dict[str, np.ndarray]) -> np.ndarray:
        return normalize(sum(rows[name] for name in VECTORS))

    def draw() -> np.ndarray:
        """The points of `drawn` random rows, or of all if there are fewer."""
        if len(vectors) <= drawn:
            return points(vectors[:])
        return points(vectors[np.sort(generator.choice(len(vectors), drawn, replace=False, shuffle=False))])

    first = draw()
    # Equal rows cannot be told apart.
    count = min(count, len(np.unique(first, axis=0)))
    fitted = MiniBatchKMeans(count, batch_size=drawn, n_init=1, random_state=seed).partial_fit(first)
    for _ in tqdm(range(1, BATCHES), "clustering", unit=" batches", leave=False):
        fitted.partial_fit(draw())
    clusters = np.concatenate([fitted.predict(points(block)) for block in vectors.iter(BLOCK)])
    return chain_of(normalize(fitted.cluster_centers_))[clusters].astype(np.int32)


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
                self.texts[start:end, column] = [xxh3_64_intdigest(text.encode()) for text in block[name]]
            clusters[start:end], start = block[CLUSTER], end
        rows = np.argsort(clusters, kind="stable")
        self.clusters = np.split(rows, np.flatnonzero(np.diff(clusters[rows])) + 1)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        # Sentence Transformers and Accelerate read this attribute.
        self.drop_last = True

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.texts) // self.batch_size

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
            if len(batch) < self.batch_size:
                return batches, [*batch, *later]
            waiting.extendleft(reversed(later))
            batches.append(np.array(batch))
        return batches, list(waiting)
