"""Word vectors without a network, as a baseline: co-occurrences in the text that the models are pretrained on.

    python benchmarks/static_vectors.py --train_data runs/small_data/train --output_dir runs/static_vectors

Positive pointwise mutual information of tokens within a window, reduced by a singular value decomposition (Levy and
Goldberg, 2014). `output_dir` becomes a Sentence Transformers model that averages the vectors of a text's tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from scipy import sparse
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sklearn.utils.extmath import randomized_svd

from neobert_hf.common.files import atomic_folder
from neobert_hf.common.settings import parse_config
from neobert_hf.data.shards import load_shards, load_tokenizer


@dataclass
class StaticVectorArguments:
    train_data: str = field(metadata={"help": "folder that prepare_data.py wrote"})
    output_dir: str = field(metadata={"help": "where the model goes"})
    dimensions: int = field(default=192, metadata={"help": "numbers in a vector"})
    window: int = field(default=10, metadata={"help": "tokens to each side"})


def count_neighbours(documents: Dataset, vocab_size: int, window: int) -> sparse.csr_matrix:
    """How often two tokens occur within a window, (vocab_size, vocab_size)."""
    counts = sparse.csr_matrix((vocab_size, vocab_size), dtype=np.float64)
    for batch in documents.with_format("arrow").iter(5_000):
        rows = batch["input_ids"].combine_chunks()
        ids, ends = rows.flatten().to_numpy(), rows.offsets.to_numpy()
        document = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        for distance in range(1, window + 1):
            same = document[distance:] == document[:-distance]
            pairs = (ids[:-distance][same].astype(np.int64), ids[distance:][same].astype(np.int64))
            counts += sparse.csr_matrix((np.ones(same.sum()), pairs), shape=counts.shape)
    return counts + counts.T


def vectors(counts: sparse.csr_matrix, dimensions: int) -> np.ndarray:
    """Positive pointwise mutual information, reduced to this many dimensions."""
    counts = counts.tocoo()
    totals = np.asarray(counts.sum(axis=1)).ravel()
    information = np.log(counts.data * totals.sum() / (totals[counts.row] * totals[counts.col]))
    positive = sparse.csr_matrix((information.clip(0), (counts.row, counts.col)), shape=counts.shape)
    left, values, _ = randomized_svd(positive, dimensions, random_state=0)
    return (left * np.sqrt(values)).astype(np.float32)


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(StaticVectorArguments, args=args)
    tokenizer = load_tokenizer(settings.train_data)
    counts = count_neighbours(load_shards(settings.train_data), len(tokenizer), settings.window)
    module = StaticEmbedding(tokenizer.backend_tokenizer, vectors(counts, settings.dimensions))
    with atomic_folder(Path(settings.output_dir)) as partial:
        SentenceTransformer(modules=[module]).save(str(partial))


if __name__ == "__main__":
    main()
