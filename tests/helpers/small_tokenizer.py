"""A WordPiece tokenizer of single letters, for tests of files that need one but not a trained one."""

import string

from transformers import BertTokenizer


def small_tokenizer(entries: int = 100, **options) -> BertTokenizer:
    """Special tokens (padding 0, mask 4), letters and as many unused entries as make `entries`."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *string.digits, *string.punctuation]
    names += [f"##{letter}" for letter in string.ascii_lowercase]
    names += [f"[unused{index}]" for index in range(entries - len(names))]
    return BertTokenizer(vocab={name: index for index, name in enumerate(names)}, **options)


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "##s", "."]


def tiny_tokenizer() -> BertTokenizer:
    """Special tokens and a dozen words, for up to 64 tokens."""
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    return BertTokenizer(vocab=vocab, model_input_names=["input_ids", "attention_mask"], model_max_length=64)
