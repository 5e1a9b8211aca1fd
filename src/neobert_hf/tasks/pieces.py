"""Where characters of a text and pieces of its tokenizer meet.

Some characters have no piece: white space, and with most tokenizers of BERT's kind also accents that are characters of
their own (NFD text as macOS writes it, Hebrew points), marks of direction, soft hyphens and variation selectors.
"""

import unicodedata
from collections.abc import Iterable, Sequence

from transformers import BatchEncoding


def first_with_piece(
    encoded: BatchEncoding, windows: Sequence[int], characters: Iterable[int], sequence: int = 0
) -> int | None:
    """The first of some characters that has a piece in one of the windows of its text; None if there is no such one.

    Args:
        windows: the numbers of all windows of the text, so that a character without a piece is one that was dropped.
        characters: their positions in the text.
        sequence: 1 for the second text of a pair.
    """
    for character in characters:
        if any(encoded.char_to_token(window, character, sequence) is not None for window in windows):
            return character
    return None


def windows_of_rows(encoded: BatchEncoding) -> dict[int, list[int]]:
    """The numbers of the windows of each text of a batch."""
    windows: dict[int, list[int]] = {}
    for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
        windows.setdefault(row, []).append(window)
    return windows


def with_marks(text: str, end: int) -> int:
    """The end of a part of a text, behind the marks that belong to its last character, which may have no piece."""
    while end < len(text) and unicodedata.category(text[end])[0] == "M":
        end += 1
    return end


def visible(text: str) -> str:
    """A text as it is seen: without characters that have no width, and with accents and letters as one character."""
    seen = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return unicodedata.normalize("NFC", seen)
