"""Long documents as passages that a model reads whole."""

from bisect import bisect_right

from transformers import PreTrainedTokenizerFast


def split_passages(text: str, tokenizer: PreTrainedTokenizerFast, size: int, overlap: int) -> list[str]:
    """Cut a text into passages of at most so many tokens, each beginning with the end of the one before.

    Cuts are between words, or what the tokenizer takes for one. Only a word longer than a passage is cut itself.

    Args:
        text: is returned as it is if it fits.
        tokenizer: that of the model.
        size: tokens of a passage, without special tokens.
        overlap: tokens that neighbours share: so many, and those before them to the beginning of a word. Fewer where
            the same passage would come again.

    Raises:
        ValueError: if the overlap leaves no room.
    """
    if not 0 <= overlap < size:
        raise ValueError(
            f"The overlap of passages is {overlap} tokens; it must be 0 or more and below their size, {size} tokens "
            "without special tokens and prompt."
        )
    encoding = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False).encodings[0]
    words, offsets = encoding.word_ids, encoding.offsets
    beginnings = [place for place, word in enumerate(words) if place == 0 or word != words[place - 1]]

    def between(after: int, last: int) -> list[int]:
        return beginnings[bisect_right(beginnings, after) : bisect_right(beginnings, last)]

    passages, start = [], 0
    while len(words) - start > size:
        end = max(between(start, start + size), default=start + size)
        passages.append(text[offsets[start][0] : offsets[end - 1][1]])
        inside = between(start, end)
        start = max((place for place in inside if place <= end - overlap), default=min(inside, default=end))
    return [*passages, text[offsets[start][0] :]] if passages else [text]
