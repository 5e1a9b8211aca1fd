"""Passages: they fit into the model, cover the text and overlap at words."""

import random
from pydoc_data.topics import topics

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from neobert_hf.search.passages import split_passages
from tests.helpers.small_tokenizer import word_tokenizer


TEXT = " ".join(" ".join(topics.values()).split()[:3000])
TOKENIZER = word_tokenizer(" ".join(topics.values()).lower(), 600, max_length=64)


def tokens(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def cut_by_words(words: list[str], lengths: list[int], size: int, overlap: int) -> list[str]:
    """As many words as fit, each from the last word with `overlap` tokens before the end, so that one more fits."""
    passages, start = [], 0
    while sum(lengths[start:]) > size:
        end = max(end for end in range(start + 1, len(words) + 1) if sum(lengths[start:end]) <= size)
        passages.append(" ".join(words[start:end]))
        later = range(start + 1, end + 1)
        again = [word for word in later if sum(lengths[word:end]) >= overlap]
        start = max([*again, min(word for word in later if sum(lengths[word : end + 1]) <= size)])
    return [*passages, " ".join(words[start:])]


def test_passages_are_those_of_a_plain_loop():
    """Of words with one to eight tokens."""
    draw = random.Random(0)
    for _ in range(60):
        words = draw.choices("the value of a qq xyzq zqqqqqqx print 17 is".split(), k=draw.randint(1, 90))
        size, overlap = draw.randint(14, 60), draw.randint(0, 5)
        expected = cut_by_words(words, [tokens(word) for word in words], size, overlap)
        found = split_passages(" ".join(words), TOKENIZER, size, overlap)
        assert [passage.strip() for passage in found] == expected, (words, size, overlap)


def test_passages_of_tokenizers_like_robertas_fit():
    """Without the space before it, a word is more tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    passages = split_passages(TEXT, tokenizer, 12, 4)
    assert max(len(tokenizer(passage).input_ids) for passage in passages) == 12


def test_short_texts_stay_and_longer_words_are_cut():
    assert split_passages(" short text\n", TOKENIZER, 20, 5) == [" short text\n"]
    word = "".join(f"{i:02d}" for i in range(45))
    passages = split_passages(f"before {word} after", TOKENIZER, 20, 5)
    assert len(passages) > 2 and word in "".join(dict.fromkeys(split_passages(word, TOKENIZER, 20, 0)))


def test_characters_that_the_tokenizer_drops_stay_with_their_word():
    """Accents of NFD, marks of direction, soft hyphens and a BOM; no passage begins with one."""
    draw, marks = random.Random(0), "\u0301 \u200f \u00ad \u200b \ufe0f".split(" ")
    words = [f"{word}{draw.choice(marks)}" for word in TEXT.split()[:400]]
    text = "\ufeff" + " ".join(words)
    assert tokens(text) == tokens(" ".join(TEXT.split()[:400]))
    passages = split_passages(text, TOKENIZER, 20, 0)
    assert "".join(passages) == text and len(passages) > 20
    assert all(tokens(passage) <= 20 for passage in passages)
    assert not [passage for passage in passages[1:] if passage[0] in marks]


def test_a_character_of_several_words_is_not_cut():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "(": 2, "1": 3, ")": 4}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "a a a \u2474 " * 9
    for size in range(4, 12):
        passages = split_passages(text, tokenizer, size, 0)
        assert "".join(passages) == text
        assert max(len(tokenizer(passage).input_ids) for passage in passages) <= size
