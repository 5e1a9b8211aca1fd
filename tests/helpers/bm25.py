"""BM25 by its definition, of words that stemming leaves alone."""

import math


def bm25(query: str, number: int, documents: list[str], k1: float = 1.2, b: float = 0.75) -> float:
    """The score of the document with this number; 0 if it shares no word with the query."""
    words = [document.split() for document in documents]
    mean = sum(map(len, words)) / len(words)
    total = 0.0
    for word in query.split():
        having, count = sum(word in some for some in words), words[number].count(word)
        rarity = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
        total += rarity * count * (k1 + 1) / (count + k1 * (1 - b + b * len(words[number]) / mean))
    return total
