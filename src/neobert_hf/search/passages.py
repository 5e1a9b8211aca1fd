"""Passages: parts of a document that are short enough for a model to read whole."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast


@dataclass
class Passage:
    """A part of a document as it is stored.

    Args:
        source: the collection of documents that the document belongs to. Ids are unique within it.
        document: the id of the document.
        number: position of the passage in the document, from 0.
        count: how many passages the document has.
        hash: of the whole document's text.
        text: of the passage.
    """

    source: str
    document: str
    number: int
    count: int
    hash: str
    text: str


def split_passages(text: str, tokenizer: PreTrainedTokenizerFast, size: int, overlap: int) -> list[str]:
    """Cut a text into passages of at most `size` tokens, each of which begins with the end of the one before.

    Cuts are between words, or what the tokenizer takes for words. Only a word longer than a passage is cut itself.

    Args:
        text: is returned as it is if it fits.
        size: tokens of a passage, without special tokens.
        overlap: tokens that neighbours share. They share a few more where the overlap would begin inside a word, and
            fewer where the next word would not fit.
    """
    if not 0 <= overlap < size:
        raise ValueError(
            f"`overlap` is {overlap} tokens; it must be 0 or more and below the size of a passage, {size} tokens "
            "(`passage_tokens` without special tokens and prompt)."
        )
    encoding = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False).encodings[0]
    # Each access makes a new list of all tokens.
    words, offsets = encoding.word_ids, encoding.offsets
    if len(words) <= size:
        return [text]
    cuts = []  # The tokens at which a passage may begin or end.
    for token, word in enumerate(words):
        # One character, such as "⑴", may be several words for the tokenizer.
        if token == 0 or token - cuts[-1] == size:
            cuts.append(token)
        elif word != words[token - 1] and offsets[token][0] >= offsets[token - 1][1]:
            cuts.append(token)
    cuts.append(len(words))
    # A passage begins with the space before its first word, which RoBERTa's tokenizer reads as a part of the word.
    places = [0, *(_end(text, offsets[cut - 1][1], offsets[cut][0]) for cut in cuts[1:-1]), len(text)]

    passages, first, last = [], 0, 0
    while last < len(cuts) - 1:
        last = bisect_right(cuts, cuts[first] + size) - 1
        passages.append(text[places[first] : places[last]])
        if last < len(cuts) - 1:
            # The next one begins later than this one, and holds the next word.
            with_overlap = bisect_right(cuts, cuts[last] - overlap) - 1
            first = max(first + 1, with_overlap, bisect_left(cuts, cuts[last + 1] - size))
    return passages


def _end(text: str, end: int, following: int) -> int:
    """Where a word ends: behind its last token, and what the tokenizer drops before the next space, such as accents."""
    while end < following and not text[end].isspace():
        end += 1
    return end
