"""Long documents as passages that a model reads whole."""

from transformers import PreTrainedTokenizerFast


def split_passages(text: str, tokenizer: PreTrainedTokenizerFast, size: int, overlap: int) -> list[str]:
    """Cut a text into passages of so many tokens, each beginning with the end of the one before.

    Cuts are between words (what the tokenizer takes for one), except within a word longer than a passage.

    Args:
        text: is returned unchanged if it fits.
        tokenizer: that of the model.
        size: tokens of a passage, without special tokens.
        overlap: tokens that two neighbours share, or a little more, to the beginning of a word.

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
    passages, start = [], 0
    while len(words) - start > size:
        end = _word_start(words, start + size, after=start)
        passages.append(text[offsets[start][0] : offsets[end - 1][1]])
        start = _word_start(words, end - overlap, after=start)
    return [*passages, text[offsets[start][0] :]] if passages else [text]


def _word_start(words: list[int | None], position: int, after: int) -> int:
    """The beginning of the word at a position; the position itself if that is not after the other one."""
    start = position
    while start > after and words[start] == words[start - 1]:
        start -= 1
    return start if start > after else max(position, after + 1)
