"""The one place that loads tokenizers. A tokenizer that cannot encode its model's language is an error.

If a folder has no vocabulary, Transformers silently makes a tokenizer that has only special tokens. Every word then
becomes [UNK], and training or evaluation runs to its end with meaningless numbers.
"""

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.paths import check_model_exists


# Every tokenizer of Transformers has at least one file with one of these names.
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "merges.txt", "tekken.json")
# How many entries of a vocabulary are checked.
TRIED = 500
# Embedding matrices are padded to round numbers of rows: by 900 in mDeBERTa-v3, by one in 40 in DeepSeek's models.
MOST_UNUSED_ROWS, MOST_UNUSED_SHARE = 1_000, 1 / 20
# Entries such as [unused7], <extra_id_7> and <0x0A>, which stand for no text.
RESERVED = re.compile(r"\[.+\]|<.+>")
NAMED_TOKENS = ("cls_token", "sep_token", "pad_token", "mask_token", "unk_token", "bos_token", "eos_token")


def load_tokenizer(name_or_path: str | Path, vocab_size: int | None = None, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or a Hub id, and check it with `check_tokenizer`.

    A text that spells a special token, such as `[SEP]`, becomes that token, as in BERT and everywhere in this package:
    prompts that end with special tokens and the pipeline `fill-mask` need it, and so do clients that read only
    `tokenizer.json`, which cannot say otherwise.

    Args:
        vocab_size: the vocabulary size of the model that uses the tokenizer.
        options: of `AutoTokenizer.from_pretrained`, such as `trust_remote_code`.

    Raises:
        OSError: if there is no such folder or repository.
        ValueError: if the tokenizer cannot be loaded, has no vocabulary or does not fit the model.
    """
    check_model_exists(str(name_or_path), "model or tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    except OSError:
        raise
    except Exception as error:  # A damaged file may raise anything, and few of these errors name the file.
        raise ValueError(
            f"The tokenizer of {name_or_path} cannot be loaded ({error}). Save the tokenizer of its model into it."
        ) from error
    check_tokenizer(tokenizer, vocab_size, str(name_or_path))
    return tokenizer


def clear_truncation(tokenizer: Any) -> None:
    """Forget where the last call cut texts and how it padded, which `save_pretrained` would write to `tokenizer.json`.

    What is saved would depend on what was done last. The length of a model is in the other files.
    """
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        backend.no_truncation()
        backend.no_padding()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, where: str) -> None:
    """Refuse a tokenizer that turns ordinary words into [UNK], or that belongs to another model.

    No language is assumed: the words are entries of the vocabulary itself. A sound tokenizer can encode them, however
    small its vocabulary is and whatever it consists of: letters, amino acids, Chinese.

    Args:
        vocab_size: the vocabulary size of the model that uses the tokenizer; None if there is no model yet.
        where: the tokenizer's folder or name, for the message.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if vocab_size is not None:
        _check_size(tokenizer, vocab_size, where)
    words = _words(tokenizer)
    if not words:
        raise ValueError(
            f"The tokenizer of {where} has no words, only special tokens: its vocabulary (tokenizer.json, vocab.txt, "
            "...) is missing. Restore it, or give the tokenizer that the model was trained with."
        )
    unknown = _unread(tokenizer, words)
    if 4 * len(unknown) > len(words):
        raise ValueError(
            f"The tokenizer of {where} turns {len(unknown)} of {len(words)} words of its own vocabulary into "
            f"{tokenizer.unk_token or 'nothing'}, such as {unknown[0]!r}: its files do not belong together. Restore "
            "them."
        )
    # An uncased vocabulary without lower-casing: `do_lower_case` was lost. Short entries may not be words.
    lower = [word for word in words if len(word) > 2 and word.isalpha() and word.islower() and word not in unknown]
    unknown = _unread(tokenizer, [word.capitalize() for word in lower])
    if len(lower) >= 10 and 2 * len(unknown) > len(lower):
        raise ValueError(
            f"The tokenizer of {where} has a lower-cased vocabulary but does not lower-case texts: {unknown[0]!r} "
            f"becomes {tokenizer.unk_token}. Set `do_lower_case` to true in tokenizer_config.json, or restore its "
            "normaliser."
        )


def _check_size(tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str) -> None:
    # Gemma's tokenizer has special tokens for images, for which a text model has no embedding rows.
    unused = set(tokenizer.all_special_tokens) - {getattr(tokenizer, name) for name in NAMED_TOKENS}
    largest = max((number for token, number in tokenizer.get_vocab().items() if token not in unused), default=-1)
    if largest >= vocab_size or vocab_size - 1 - largest > max(MOST_UNUSED_ROWS, MOST_UNUSED_SHARE * vocab_size):
        raise ValueError(
            f"The tokenizer of {where} has ids up to {largest:,}, but `vocab_size` of the model is {vocab_size:,}: it "
            "is the tokenizer of another model, or a part of its vocabulary is missing."
        )


def _words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of ordinary entries, sampled evenly over the whole vocabulary."""
    vocab = tokenizer.get_vocab()
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    ordinary = [entry for entry in vocab if entry not in special and not RESERVED.fullmatch(entry)]
    # Continuation pieces of WordPiece may begin with characters that no word begins with, such as Hindi vowel signs.
    ordinary = [entry for entry in ordinary if not entry.startswith("##")] or ordinary
    entries = sorted(ordinary, key=vocab.get)
    texts = [tokenizer.convert_tokens_to_string([entry]) for entry in entries[:: len(entries) // TRIED + 1]]
    texts = [text.removeprefix("##").strip() for text in texts]
    # Leave out punctuation, and byte-level entries that are parts of a character.
    return [text for text in texts if "�" not in text and any(map(str.isalnum, text))]


def _unread(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> list[str]:
    """The words that become [UNK], or nothing."""
    if not words:
        return []
    ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    return [word for word, of_word in zip(words, ids) if not of_word or tokenizer.unk_token_id in of_word]


def tokens_read(model: PreTrainedModel, *limits: int | None) -> int | None:
    """The smallest of the given limits and of the model's own, where its positions begin after the padding id.

    They do in RoBERTa and its relatives (XLM-R, MPNet, Longformer): a table of 514 positions is for 512 tokens. Their
    published tokenizers store that limit, others may not.

    Args:
        model: the model whose table of positions is looked at.
        limits: limits from the settings, the tokenizer and the config; None for no limit.

    Returns:
        The limit in tokens; None if there is none.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    shifted = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    left = [table.num_embeddings - table.padding_idx - 1 for table in shifted]
    return min([limit for limit in (*limits, *left) if limit is not None], default=None)


def length_to_cut_at(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, wanted: int, pairs: bool = False
) -> int:
    """`wanted` tokens, or the limit of the model or its tokenizer if that is lower; a message is printed then.

    Args:
        pairs: whether inputs are pairs of texts.

    Raises:
        ValueError: if nothing of a text would be left between the special tokens.
    """
    special = tokenizer.num_special_tokens_to_add(pairs)
    if wanted < special + 1 + pairs:
        raise ValueError(
            f"`max_length` is {wanted}, and the special tokens of {'a pair' if pairs else 'a text'} take {special}: "
            "nothing of it would be left. Set a larger one."
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    length = tokens_read(model, wanted, tokenizer.model_max_length, positions)
    if length < wanted:
        print(f"Texts are cut at {length:,} tokens, the model's limit; `max_length` is {wanted:,}.", flush=True)
    return length
