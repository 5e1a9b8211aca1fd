"""WordPiece tokenizers for tests of files that need one but not a trained one.

Training a tokenizer breaks ties differently in each process, which would make other tests each time.
"""

import re
import string
from collections import Counter

from transformers import BertTokenizer


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "##s", "."]


def _tokenizer(names: list[str], **options) -> BertTokenizer:
    vocab = {name: number for number, name in enumerate(names)}
    return BertTokenizer(vocab=vocab, model_input_names=["input_ids", "attention_mask"], **options)


def small_tokenizer(entries: int = 100, **options) -> BertTokenizer:
    """Special tokens (padding 0, mask 4), letters and as many unused entries as make `entries`."""
    names = [*SPECIAL, *string.ascii_lowercase, *string.digits, *string.punctuation]
    names += [f"##{letter}" for letter in string.ascii_lowercase]
    names += [f"[unused{index}]" for index in range(entries - len(names))]
    return _tokenizer(names, **options)


def tiny_tokenizer() -> BertTokenizer:
    """Special tokens and a dozen words, for up to 64 tokens."""
    return _tokenizer([*SPECIAL, *WORDS], model_max_length=64)


def word_tokenizer(text: str, entries: int, max_length: int) -> BertTokenizer:
    """Special tokens, the text's letters, and as many of its words as make `entries`, the commonest first."""
    letters = sorted(set(text) - set(string.whitespace))
    words = sorted(Counter(re.findall("[a-z]{2,}", text)).items(), key=lambda item: (-item[1], item[0]))
    names = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *(word for word, _ in words)]
    return _tokenizer(names[:entries], model_max_length=max_length)
