"""Add words to a WordPiece tokenizer and to the masked language model that uses it."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from neobert_hf.modeling_neobert import NeoBERTForMaskedLM


# The embedding of a word that occurs less often would learn little.
LEAST_COUNT = 5


def choose_words(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, number: int
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Choose the words that cost most pieces (occurrences times pieces), among those that begin with a letter.

    Args:
        number: how many words to choose.

    Returns:
        The ids of the pieces of each word; and the number of pieces of all texts, now (`pieces`) and `with_new_words`.

    Raises:
        ValueError: if the tokenizer is not WordPiece, or splits fewer words than that.
    """
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, models.WordPiece):
        raise ValueError(
            f"`new_words` is {number}, but the tokenizer is of the kind {type(backend.model).__name__}: words can be "
            "added to WordPiece only. Set it to 0."
        )
    counts = Counter()
    for text in texts:
        text = backend.normalizer.normalize_str(text) if backend.normalizer else text
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    pieces = {word: [piece.id for piece in backend.model.tokenize(word)] for word in counts}
    split = [word for word in counts if len(pieces[word]) > 1 and counts[word] >= LEAST_COUNT and word[0].isalpha()]
    if number > len(split):
        raise ValueError(
            f"`new_words` is {number:,}; it must be {len(split):,} or less, the number of words that occur "
            f"{LEAST_COUNT} times or more in the text and that the tokenizer splits."
        )
    chosen = sorted(split, key=lambda word: (-counts[word] * len(pieces[word]), word))[:number]
    total = sum(count * len(pieces[word]) for word, count in counts.items())
    saved = sum(counts[word] * (len(pieces[word]) - 1) for word in chosen)
    return {word: pieces[word] for word in chosen}, {"pieces": total, "with_new_words": total - saved}


@torch.no_grad()
def add_words(
    model: NeoBERTForMaskedLM, tokenizer: PreTrainedTokenizerFast, words: dict[str, list[int]], folder: Path
) -> None:
    """Save a model and its tokenizer with more words at the end of the vocabulary.

    A word's embedding is the mean of the embeddings of its pieces, and so are its row and bias of the decoder: at
    first, its logit is the mean of theirs. The model in memory is changed, too. Longer words that begin with a new word
    are split differently from then on.

    Args:
        words: the ids of the pieces of each word.
        folder: must exist.
    """
    first = max(tokenizer.get_vocab().values()) + 1
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    # As ordinary entries: added tokens would be searched for in the text before it is normalised.
    content["model"]["vocab"] |= {word: number for number, word in enumerate(words, first)}
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    # The model may have more rows than the tokenizer has entries.
    rows = max(model.config.vocab_size, first + len(words))
    model.resize_token_embeddings(rows, mean_resizing=False)
    for weight in (model.get_input_embeddings().weight, model.decoder.weight, model.decoder.bias):
        for number, pieces in enumerate(words.values(), first):
            weight[number] = weight[pieces].mean(0)
    model.save_pretrained(folder)
