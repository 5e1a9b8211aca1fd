"""Vectors in fewer bytes: a bit of each number, by which a search finds candidates, and what orders these.

| `precision` | bytes of a vector of 384 numbers | candidates are found by | and ordered by |
| --- | --- | --- | --- |
| unset | 1,536 | | the cosine |
| `int8` | 432 | the bits in which they differ from the query's | the cosine of one byte a number with the query |
| `binary` | 48 | the same | the cosine of the bits, as 1 and -1, with the query, which keeps its numbers |
"""

import numpy as np
from sentence_transformers.util import quantize_embeddings


# So many times as many candidates are ordered as are returned.
OVERSAMPLE = 10


def bits_of(vectors: np.ndarray) -> np.ndarray:
    """The signs of vectors, eight in a byte."""
    return quantize_embeddings(vectors, "ubinary")


def bytes_of(vectors: np.ndarray) -> np.ndarray:
    """The numbers of each vector (rows) as shares of its largest one, from -127 to 127.

    A cosine does not depend on a vector's length. So no ranges need to be learned from all vectors, which those of
    documents that come later might exceed.
    """
    return np.round(127 * vectors / np.abs(vectors).max(axis=-1, keepdims=True)).astype(np.int8)


def vectors_of(stored: np.ndarray, dimension: int) -> np.ndarray:
    """The vectors of length 1 that stand for bits or bytes (rows), in float32."""
    if stored.dtype == np.uint8:
        stored = 2.0 * np.unpackbits(stored, axis=-1, count=dimension) - 1
    vectors = stored.astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
