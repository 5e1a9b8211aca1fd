"""Cutting long documents into passages that are short enough for a model to read whole."""

from bisect import bisect_right

from transformers import PreTrainedTokenizerFast


def split_passages(text: str, tokenizer: PreTrainedTokenizerFast, size: int, overlap: int) -> list[str]:
    """Cut a text into passages of at most `size` tokens, each of which begins with the end of the one before.

    Cuts are between words, or what the tokenizer takes for words. Only a word longer than a passage is cut itself.

    Args:
        text: is returned as it is if it fits.
        tokenizer: of the model.
        size: tokens of a passage, without special tokens.
        overlap: tokens that neighbours share. They share a few more where the overlap would begin inside a word, and
            fewer where the next passage would be the same again.
    """
    if not 0 <= overlap < size:
        raise ValueError(
            f"`overlap` is {overlap} tokens; it must be 0 or more and below the size of a passage, {size} tokens "
            "(`passage_tokens` without special tokens and prompt)."
        )
    encoding = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False).encodings[0]
    words, offsets = encoding.word_ids, encoding.offsets
    word_starts = [token for token, word in enumerate(words) if token == 0 or word != words[token - 1]]

    # RoBERTa's tokenizer reads a word after a space as other tokens, perhaps fewer, than the same word alone. It leaves
    # the space out of the offsets, so a passage that began at the word could be longer than `size`.
    space_counts = (
        tokenizer(" a", add_special_tokens=False).input_ids != tokenizer("a", add_special_tokens=False).input_ids
    )

    def beginning(token: int) -> int:
        return offsets[token - 1][1] if token and space_counts else offsets[token][0]

    def word_starts_between(after: int, last: int) -> list[int]:
        return word_starts[bisect_right(word_starts, after) : bisect_right(word_starts, last)]

    passages, start = [], 0
    while len(words) - start > size:
        end = max(word_starts_between(start, start + size), default=start + size)
        passages.append(text[beginning(start) : offsets[end - 1][1]])
        # The next passage must begin later than this one, even if that makes the overlap shorter. It must also end
        # later: if the next word is so long that no passage with an overlap can hold it, there is no overlap.
        place = bisect_right(word_starts, end)
        following = word_starts[place] if place < len(word_starts) else len(words)
        candidates = [token for token in word_starts_between(start, end) if following - token <= size]
        far_enough_back = [token for token in candidates if token <= end - overlap]
        start = max(far_enough_back, default=min(candidates, default=end))
    return [*passages, text[beginning(start) :]] if passages else [text]
