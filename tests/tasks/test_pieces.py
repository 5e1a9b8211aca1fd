"""Words and answers to pieces: with every kind of tokenizer the tag is at the word's first piece, the answer whole."""

from itertools import islice

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from neobert_hf.data.tables import read_rows
from neobert_hf.tasks.question_answering import QuestionAnswering, QuestionAnsweringSettings, answer_tokens
from neobert_hf.tasks.token_classification import TokenClassification, TokenClassificationSettings
from neobert_hf.training.metrics import AnswerMetric, TagMetric, entities_of
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import asked_rows, splits


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    names = {f"{name}_token": f"<{name}>" for name in ("cls", "sep", "pad", "unk")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B <sep>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<cls>", "<sep>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **names
    )


SPECIAL = ["<cls>", "<sep>", "<pad>", "<unk>"]


def byte_level() -> PreTrainedTokenizerFast:
    """As of RoBERTa and ModernBERT: a word begins with the space before it, and an emoji is four pieces."""
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġc", "Ġca", "Ġcat"]
    vocab = {name: number for number, name in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return wrap(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As of XLM-R: `▁` stands for the space, sometimes as a piece of its own."""
    pieces = [*SPECIAL, "▁", "▁cat", "▁c", *"abcdefghijklmnopqrstuvwxyz", "é", "C", "."]
    tokenizer = Tokenizer(models.Unigram([(piece, -len(piece) / 10.0 - 1) for piece in pieces], unk_id=3))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return wrap(tokenizer)


TOKENIZERS = {"wordpiece": small_tokenizer, "byte_level": byte_level, "metaspace": metaspace}
WORDS = ["cat", "sat.", "é", "c", "cat", "xyz", "C"]


def tagging(rows: list[list[str]]) -> TokenClassification:
    """Every word of a row has another tag, and both splits are the same."""
    table = [{"tokens": row, "tags": [f"t{number}" for number in range(len(row))]} for row in rows]
    tables = splits(train=table, validation=table)
    return TokenClassification(TokenClassificationSettings("model", "data"), tables)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [64, 8])
def test_each_word_is_tagged_once_a_window_and_found_again(name, length):
    tokenizer = TOKENIZERS[name]()
    task = tagging([WORDS, [*WORDS[::-1], "cat"]])
    encoded = task.encode(tokenizer, length)["train"]
    assert all(len(ids) <= length for ids in encoded["input_ids"]) and (length == 64) == (len(encoded) == 2)
    plain = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]
    if length == 64:
        assert encoded["input_ids"][0][1:-1] == plain
        assert [word for word in encoded["word"][0] if word >= 0] == list(range(len(WORDS)))
    # What a perfect model finds is what is right.
    perfect = np.full((len(encoded), length), -100.0)
    for number, labels in enumerate(encoded["labels"]):
        perfect[number, : len(labels)] = labels
    assert task.predictions("train", encoded, perfect) == task.references("train")


def test_of_two_windows_the_one_counts_where_a_word_is_further_from_the_ends():
    task = tagging([["a", "b", "c", "d", "e", "f", "g", "h"]])
    encoded = task.encode(small_tokenizer(), 8)["train"]
    windows, found = encoded["word"][:], np.full((len(encoded), 8), -100.0)
    assert windows == [[-1, 0, 1, 2, 3, 4, 5, -1], [-1, 4, 5, 6, 7, -1]]
    # Words 4 and 5 are in both: 4 is third from the end and then second from the start, 5 second and third.
    found[0], found[1, :6] = [0, 0, 1, 2, 3, 4, 0, 0], [0, 0, 5, 6, 7, 0]
    assert task.predictions("train", encoded, found) == task.references("train")


def test_first_pieces_by_hand():
    encoded = tagging([["cat", "sat", "😀", "cat"]]).encode(byte_level(), 64)["train"]
    # <cls> | c a t | Ġ | s a t | Ġ | four bytes | Ġcat | <sep>: a space alone is no part of a word.
    assert encoded["word"][0] == [-1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3, -1]


def test_words_without_a_piece_are_said_and_get_the_commonest_tag(capsys):
    table = [{"tokens": ["cat", "\u200b", "c"], "tags": ["A", "B", "B"]}]
    task = TokenClassification(TokenClassificationSettings("model", "data"), splits(train=table, validation=table))
    encoded = task.encode(small_tokenizer(), 64)["train"]
    assert r"train: 1 words have no piece in this tokenizer, such as '\u200b'" in capsys.readouterr().out
    labels = np.array([[label for label in encoded["labels"][0]]], dtype=float)
    assert task.predictions("train", encoded, labels) == [["A", "B", "B"]]


def test_no_tags_from_scores_that_are_not_finite():
    import torch

    logits = torch.tensor([[[0.0, 1.0], [float("nan"), 1.0]]])
    found = TokenClassification.reduce_logits(logits, None)
    assert found[0, 0] == 1 and found[0, 1].isnan()


def asking(**settings) -> QuestionAnswering:
    rows = asked_rows(12, none=0.3, length=20)
    tables = splits(train=rows, validation=rows)
    return QuestionAnswering(QuestionAnsweringSettings("model", "data", **settings), tables)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [64, 20])
def test_a_perfect_model_finds_every_answer_in_every_window(name, length):
    task = asking(stride=4)
    encoded = task.encode(TOKENIZERS[name](), length)["train"]
    assert (len(encoded) > 12) == (length == 20)
    start, end = np.full((2, len(encoded), length), -5.0)
    for number, window in enumerate(encoded):
        start[number, window["start_positions"]], end[number, window["end_positions"]] = 5, 5
    found = task.answers("train", encoded, (start, end))
    right = task.splits["train"]["texts"][:]
    # A window without the answer says that there is none, and the answer of another one is worth more than that.
    texts = [answers[0]["text"] for answers in found]
    values = AnswerMetric().compute(predictions=texts, references=right)
    assert values["f1"] == values["exact_match"] == 1.0


def test_answers_of_all_windows_are_ranked_together():
    task = asking(stride=4, max_answer_length=2, best_answers=3)
    encoded = task.encode(small_tokenizer(), 20)["train"].filter(lambda window: window["row"] == 0)
    assert len(encoded) == 2
    start, end = np.full((2, 2, 20), -5.0)
    inside = [number for number, place in enumerate(encoded["starts"][0]) if place >= 0]
    # An answer of two tokens in the first window, which is better than none there; none in the second one.
    start[0, inside[2]], end[0, inside[3]], start[1, 0], end[1, 0] = 4, 5, 5, 5
    # Too long an answer, and an end before its start.
    start[0, inside[0]], end[0, inside[1]] = 4.5, -4
    context = task.splits["train"]["context"][0].split()
    best = task.answers("train", encoded, (start, end))[0]
    assert best[0] == {"text": " ".join(context[2:4]), "score": 9.0} and best[-1] == {"text": "", "score": -10.0}
    # None is better than every answer in all windows.
    start[:, 0] = end[:, 0] = 5
    assert task.answers("train", encoded, (start, end))[0][0] == {"text": "", "score": 10.0}


def test_a_question_that_leaves_no_room_is_an_error():
    with pytest.raises(ValueError, match="a question of 2 tokens leaves no room for a text in windows of 8"):
        asking(stride=4).encode(small_tokenizer(), 8)


def test_tokens_of_an_answer_by_hand():
    starts, ends = [-1, -1, 0, 2, 5, -1], [-1, -1, 1, 4, 9, -1]
    assert answer_tokens(starts, ends, ["bc"], [2]) == (3, 3)
    assert answer_tokens(starts, ends, ["a bc"], [0]) == (2, 3)
    # Inside a token; beyond the window; none.
    assert answer_tokens(starts, ends, ["x"], [6]) == (4, 4)
    assert answer_tokens(starts, ends, ["long"], [7]) == (0, 0)
    assert answer_tokens(starts, ends, [], []) == (0, 0)


def test_metrics_by_hand():
    found = AnswerMetric().compute(
        predictions=["The cat!", "dog house", "", "x"], references=[["a cat"], ["house", "big house"], [], ["y"]]
    )
    assert found["exact_match"] == 0.5 and found["f1"] == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
    assert found["no_answer_f1"] == 1.0 and found["answer_f1"] == pytest.approx((1 + 2 / 3) / 3)
    right = [["B-PER", "I-PER", "O", "B-LOC"]]
    metric = TagMetric(entities=True).compute(predictions=[["B-PER", "O", "O", "B-LOC"]], references=right)
    assert metric == {"accuracy": 0.75, "f1": 0.5, "precision": 0.5, "recall": 0.5}
    assert entities_of(right, right) == [["LOC", "100.0", "100.0", "100.0", 1], ["PER", "100.0", "100.0", "100.0", 1]]


def test_entities_of_a_single_word_and_their_last_words_count_in_bilou():
    right = [["U-PER", "U-PER", "O", "B-LOC", "L-LOC", "B-LOC", "L-LOC"]]
    wrong = [["B-PER", "L-PER", "O", "B-LOC", "I-LOC", "I-LOC", "L-LOC"]]
    metric = TagMetric(entities=True)
    assert metric.compute(predictions=wrong, references=right)["f1"] == 0.0
    assert metric.compute(predictions=right, references=right)["f1"] == 1.0
    assert entities_of(wrong, right) == [["LOC", "0.0", "0.0", "0.0", 2], ["PER", "0.0", "0.0", "0.0", 2]]


def test_tags_of_brown(shared):
    """Real text: every word becomes a piece of a tokenizer of letters, and every tag comes back."""
    folder = shared / "data" / "pos_brown"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data")
    rows = list(islice(read_rows(str(folder / "validation.parquet")), 200))
    task = TokenClassification(TokenClassificationSettings("model", "data"), {"train": rows, "validation": rows})
    assert len(task.labels) == 12 and not task.entities
    encoded = task.encode(small_tokenizer(), 64)["train"]
    perfect = np.full((len(encoded), 64), -100.0)
    for number, labels in enumerate(encoded["labels"]):
        perfect[number, : len(labels)] = labels
    assert task.score("train", encoded, perfect)["accuracy"] == 1.0
