"""A WordPiece tokenizer of the letters and the commonest words of a text."""

import re
import string
from collections import Counter

from transformers import BertTokenizer


def word_tokenizer(text: str, entries: int, max_length: int) -> BertTokenizer:
    """Special tokens, the text's letters, and as many of its words as make `entries`.

    Training a tokenizer breaks ties differently in each process, which would make other tests each time.
    """
    letters = sorted(set(text) - set(string.whitespace))
    words = sorted(Counter(re.findall("[a-z]{2,}", text)).items(), key=lambda item: (-item[1], item[0]))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *letters, *(f"##{letter}" for letter in letters), *(word for word, _ in words)]
    vocab = {name: number for number, name in enumerate(names[:entries])}
    model_inputs = ["input_ids", "attention_mask"]
    return BertTokenizer(vocab=vocab, model_max_length=max_length, model_input_names=model_inputs)
