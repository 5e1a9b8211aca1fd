"""Prepared folders of known documents, without a tokenizer."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from neobert_hf.data.shards import Manifest, write_shard


def write_folder(folder: Path, documents: Iterable[Sequence[int]], sizes: Sequence[int], vocab_size=100) -> Path:
    """A finished folder with so many documents in each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = map(np.array, documents)
    shards = [
        write_shard(f"{folder}/shard-{number:05}.arrow", islice(rows, size), vocab_size)
        for number, size in enumerate(sizes)
    ]
    Manifest("a.jsonl", {"max_length": 8}, vocab_size, shards, finished=True).save(folder)
    return folder
