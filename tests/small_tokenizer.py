"""A WordPiece tokenizer of single letters, for tests of files that need one but not a trained one."""

import string

from transformers import BertTokenizer


def small_tokenizer(entries: int) -> BertTokenizer:
    """Special tokens (padding 0, mask 4), letters and as many unused entries as make `entries`."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *string.digits, *string.punctuation]
    names += [f"##{letter}" for letter in string.ascii_lowercase]
    names += [f"[unused{index}]" for index in range(entries - len(names))]
    return BertTokenizer(vocab={name: index for index, name in enumerate(names)})
