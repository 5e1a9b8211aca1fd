"""From texts to ids: documents are cut where the tokenizer would cut them, without tokenising what is cut off."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tokenizers import Tokenizer


ENCODED_TOGETHER = 256
# A space or line break after a visible character; see `cut_text`.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")


def encode(texts: list[str], tokenizer_json: str, max_length: int, split: bool) -> Iterator[list[list[int]]]:
    """The documents made from each text: none, one, or with `split` one or several windows; special tokens included.

    Documents of fewer than 2 ordinary tokens are left out: with one masked, nothing would remain to predict it from.
    Text that spells a special token, such as `[MASK]`, becomes that token, as wherever this tokenizer is used.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    cut = not split and can_cut(json.loads(tokenizer_json))
    texts = iter(texts)
    while together := list(islice(texts, ENCODED_TOGETHER)):
        # Truncation tokenises the whole text first; for a book, nearly all of that work would be wasted.
        beginnings = [cut_text(text, 8 * max_length) for text in together] if cut else together
        for text, beginning, encoding in zip(together, beginnings, tokenizer.encode_batch_fast(beginnings)):
            if len(beginning) < len(text) and len(encoding.ids) < max_length:
                encoding = tokenizer.encode(text)
            windows = [encoding, *encoding.overflowing] if split else [encoding]
            yield [window.ids for window in windows if len(window.ids) >= 4]


def can_cut(tokenizer: dict[str, Any]) -> bool:
    """Whether `cut_text` is safe for a tokenizer, given as parsed `tokenizer.json`."""
    normalizer, pre_tokenizer = ((tokenizer[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer"))
    if any(not token["special"] or re.search(r"\s", token["content"]) for token in tokenizer["added_tokens"]):
        return False
    if pre_tokenizer == "ByteLevel":
        return normalizer is None and tokenizer["pre_tokenizer"]["use_regex"]
    return pre_tokenizer == "BertPreTokenizer" and normalizer in (None, "BertNormalizer")


def cut_text(text: str, characters: int) -> str:
    """A prefix of about this many characters, whose tokens are a prefix of the whole text's tokens if `can_cut`.

    The cut is before a space or line break that follows a visible character. No step of these tokenizers looks across
    such a place, so the words before it, and with them their tokens, are the same with and without the rest:

    - BertNormalizer drops, replaces, pads and lower-cases single characters. Its decomposition (NFD) reorders combining
      marks, but none across a space or line break, which has combining class 0 and takes part in no composition.
      Other white space (form feed, U+0085) would not be safe: BertNormalizer treats it as a control character and
      drops it.
    - BertPreTokenizer separates words at white space, and a space or line break is still there after normalisation.
    - ByteLevel matches its expression from left to right. White space occurs in a match only as its first character
      before a word (` ?`), or in a match of white space only. So the match that holds the visible character ends at
      the cut, with and without the rest. Earlier matches end before it, and their one lookahead, `\\s+(?!\\S)`, sees
      at most that visible character.
    - The models (WordPiece, BPE) see one such word at a time. Added tokens are searched for in the whole text, but
      there are only special ones without white space inside, so the cut is not in one of them.
    """
    cut = SAFE_CUT.search(text, characters)
    return text[: cut.start()] if cut else text
