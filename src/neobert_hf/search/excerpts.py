"""What is shown of a passage that was found: the whole sentences in it that are nearest to the query."""

import re
from textwrap import shorten

import numpy as np

from neobert_hf.search.encoder import PassageEncoder
from neobert_hf.search.vector_index import Hit


# A sentence ends with its mark if no small letter follows, as in "e.g. this", and before a blank line or a new item.
SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'’”)\]]*\s+(?![a-z])|(?<=[。！？])|\n\s*\n|\n(?=\s*[-*#>•|])")
# Neighbouring sentences are added up to so many characters; one that is longer than the second number is cut.
LENGTH, MOST = 240, 600


def find_excerpts(encoder: PassageEncoder, vector: np.ndarray, hits: list[Hit]) -> list[str]:
    """One excerpt for each hit: the sentence nearest to the vector of the query, with neighbours if it is short."""
    sentences = [whole_sentences(hit) for hit in hits]
    vectors = encoder.embed("document", [text for texts in sentences for text in texts]) if hits else []
    cosines, excerpts = iter(np.asarray(vectors) @ vector if hits else ()), []
    for texts in sentences:
        best = int(np.argmax([next(cosines) for _ in texts]))
        excerpts.append(shorten(" ".join(around(texts, best)), MOST, placeholder=" ..."))
    return excerpts


def whole_sentences(hit: Hit) -> list[str]:
    """The sentences of a passage. Those that its ends cut are left out, unless there is no other."""
    cuts = [0, *(found.end() for found in SENTENCE_END.finditer(hit.text)), len(hit.text)]
    texts = [hit.text[begin:end].strip() for begin, end in zip(cuts, cuts[1:])]
    texts = [text for text in texts if text] or [hit.text]
    if hit.number > 0 and len(texts) > 1:
        texts = texts[1:]
    if hit.number + 1 < hit.count and len(texts) > 1:
        texts = texts[:-1]
    return texts


def around(texts: list[str], best: int) -> list[str]:
    """The best of some sentences, with as many of those behind it, and then before it, as are short enough."""
    first, end = best, best + 1
    while end < len(texts) and sum(map(len, texts[first : end + 1])) <= LENGTH:
        end += 1
    while first > 0 and sum(map(len, texts[first - 1 : end])) <= LENGTH:
        first -= 1
    return texts[first:end]
