"""Words and answers to pieces: with every kind of tokenizer the tag is at the word's first piece, the answer whole."""

import string
from itertools import product

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import pre_tokenizers
from transformers import RobertaTokenizer, XLMRobertaTokenizer

from neobert_hf.tasks.question_answering import QuestionAnswering, most_similar_sentence, squad_scores
from neobert_hf.tasks.token_classification import TokenClassification, tag_scores
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import asked_rows, task_of_rows


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def byte_level() -> RobertaTokenizer:
    """A word begins with the space before it, as in ModernBERT, and an emoji is four pieces."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġc", "Ġca", "Ġcat"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return RobertaTokenizer(vocab=vocab, merges=[("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t")])


def metaspace() -> XLMRobertaTokenizer:
    """`▁` stands for the space, sometimes as a piece of its own."""
    pieces = [*SPECIAL, "▁", "▁cat", "▁c", *string.ascii_lowercase, "é", "C", "."]
    return XLMRobertaTokenizer(vocab=[(piece, -len(piece) / 10 - 1) for piece in pieces])


TOKENIZERS = {"wordpiece": small_tokenizer, "byte_level": byte_level, "metaspace": metaspace}
WORDS = ["cat", "sat.", "é", "c", "cat", "xyz", "C"]


def tagging(rows: list[list[str]]) -> TokenClassification:
    """Every word of a row has another tag."""
    table = [{"tokens": row, "tags": [f"t{number}" for number in range(len(row))]} for row in rows]
    return task_of_rows("tags", train=table, validation=[{"tokens": ["another"], "tags": ["t0"]}])


def perfect_tags(encoded: Dataset) -> np.ndarray:
    """The numbers of the right tags at the first pieces of words."""
    best = np.full((len(encoded), 64), -100)
    for number, labels in enumerate(encoded["labels"]):
        best[number, : len(labels)] = labels
    return best


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [64, 8])
def test_each_word_is_tagged_once_a_window_and_found_again(name, length):
    tokenizer = TOKENIZERS[name]()
    task = tagging([WORDS, [*WORDS[::-1], "cat"]])
    rows = task.tables["train"]
    encoded = task.encode(rows, tokenizer, length)
    assert all(len(ids) <= length for ids in encoded["input_ids"]) and (length == 64) == (len(encoded) == 2)
    if length == 64:
        assert encoded["input_ids"][0][1:-1] == tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]
        assert [word for word in encoded["word"][0] if word >= 0] == list(range(len(WORDS)))
    assert task.predict(rows, encoded, perfect_tags(encoded)) == rows["tags"][:]


# Characters that have no piece, at the beginning of each word and behind each of its letters.
MARKS = {
    "right to left": ("\u200f", "\u05b8"),
    "NFD": ("", "\u0301"),
    "soft hyphen": ("\u00ad", "\u00ad"),
    "byte order mark": ("\ufeff", ""),
    "zero width space": ("\u200b", ""),
    "space": (" ", ""),
    "Hindi": ("\u200e", "\u094d"),
    "emoji": ("", "\ufe0f"),
}


def marked(word: str, name: str) -> str:
    before, behind = MARKS[name]
    return before + "".join(letter + behind for letter in word)


@pytest.mark.parametrize("length", [64, 8])
@pytest.mark.parametrize("name", MARKS)
def test_words_with_marks_have_the_pieces_of_words_without(name, length):
    plain = tagging([WORDS, [*WORDS[::-1], "cat"]])
    task = tagging([[marked(word, name) for word in row] for row in plain.tables["train"]["words"]])
    encoded, of_plain = (each.encode(each.tables["train"], small_tokenizer(), length) for each in (task, plain))
    assert encoded[:] == of_plain[:]


def test_words_with_marks_are_found_again_by_every_tokenizer(capsys):
    for mark, (name, tokenizer) in product(MARKS, TOKENIZERS.items()):
        task = tagging([[marked(word, mark) for word in WORDS]])
        rows = task.tables["train"]
        encoded = task.encode(rows, tokenizer(), 8)
        assert task.predict(rows, encoded, perfect_tags(encoded)) == rows["tags"][:], (mark, name)
    assert "no piece" not in capsys.readouterr().out


def test_of_two_windows_the_one_counts_where_a_word_is_further_from_the_ends():
    task = tagging([["a", "b", "c", "d", "e", "f", "g", "h"]])
    rows = task.tables["train"]
    encoded = task.encode(rows, small_tokenizer(), 8)
    found = np.full((2, 8), -100)
    assert encoded["word"][:] == [[-1, 0, 1, 2, 3, 4, 5, -1], [-1, 4, 5, 6, 7, -1]]
    # Words 4 and 5 are in both: 4 is third from the end and then second from the start, 5 second and third.
    found[0], found[1, :6] = [0, 0, 1, 2, 3, 4, 0, 0], [0, 0, 5, 6, 7, 0]
    assert task.predict(rows, encoded, found) == rows["tags"][:]


def test_words_without_a_piece_get_the_commonest_tag(capsys):
    table = [{"tokens": ["cat", "\u200b", "c"], "tags": ["A", "B", "B"]}]
    task = task_of_rows("tags", train=table, validation=[{"tokens": ["c"], "tags": ["A"]}])
    encoded = task.encode(task.tables["train"], small_tokenizer(), 64)
    assert task.predict(task.tables["train"], encoded, perfect_tags(encoded)) == [["A", "B", "B"]]
    assert "1 words have no piece of the tokenizer, such as '\\u200b' in train, row 0" in capsys.readouterr().out


def asking(**settings) -> QuestionAnswering:
    train, validation = (asked_rows(12, seed, none=0.3, length=20) for seed in (0, 1))
    return task_of_rows("answers", settings, train=train, validation=validation)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [64, 20])
def test_a_perfect_model_finds_every_answer_in_every_window(name, length):
    task = asking(stride=4)
    rows = task.tables["train"]
    encoded = task.encode(rows, TOKENIZERS[name](), length)
    assert (len(encoded) > 12) == (length == 20)
    start, end = np.full((2, len(encoded), length), -5.0)
    contexts = rows["context"]
    for number, window in enumerate(encoded):
        # No answer can begin or end with a space that is a token.
        spans = [span for span in zip(window["starts"], window["ends"]) if span[0] >= 0]
        assert spans and all(contexts[window["row"]][slice(*span)].strip() for span in spans)
        start[number, window["start_positions"]], end[number, window["end_positions"]] = 5, 5
    # A window without the answer says that there is none, and the answer of another one is worth more than that.
    found = task.metrics(rows, task.predict(rows, encoded, (start, end)))
    assert found["f1"] == found["exact_match"] == 1.0


@pytest.mark.parametrize("length", [64, 20])
@pytest.mark.parametrize("name", [name for name in MARKS if name != "space"])
def test_answers_with_marks_have_the_pieces_of_answers_without(name, length):
    """And what is found is the answer with its accents."""
    plain = asked_rows(12, length=20)
    rows = [with_marked_answer(row, name) for row in plain]
    held_out = asked_rows(4, seed=1)
    tasks = [task_of_rows("answers", {"stride": 4}, train=each, validation=held_out) for each in (rows, plain)]
    encoded, of_plain = (task.encode(task.tables["train"], small_tokenizer(), length) for task in tasks)
    for column in ("input_ids", "start_positions", "end_positions", "row"):
        assert encoded[column][:] == of_plain[column][:]
    start, end = np.full((2, len(encoded), length), -5.0)
    for number, window in enumerate(encoded):
        start[number, window["start_positions"]], end[number, window["end_positions"]] = 5, 5
    table = tasks[0].tables["train"]
    found = tasks[0].predict(table, encoded, (start, end))
    assert tasks[0].metrics(table, found) == {"f1": 1.0, "exact_match": 1.0}
    if MARKS[name][0] == "":
        assert found == [row["answers"][0]["text"] for row in rows]


def with_marked_answer(row: dict, name: str) -> dict:
    """In a text all of whose words have the marks."""
    words = [marked(word, name) for word in row["context"].split()]
    number = row["answers"][0]["answer_start"] // 2
    begin = len(" ".join([*words[:number], ""]))
    return row | {"context": " ".join(words), "answers": [{"text": words[number], "answer_start": begin}]}


def test_a_window_that_holds_a_part_of_an_answer_has_none():
    """Also if the answer ends with a character that has no piece."""
    row = {
        "question": "n ?",
        "context": "b " * 20 + "a c\u0301",
        "answers": [{"text": "a c\u0301", "answer_start": 40}],
    }
    task = task_of_rows("answers", {"stride": 1}, train=[row, *asked_rows(2)], validation=asked_rows(2, seed=1))
    encoded = task.encode(task.tables["train"].select([0]), small_tokenizer(), 16)
    whole = [bool(last) for last in encoded["end_positions"]]
    texts = [ids for ids in encoded["input_ids"]]
    both = [{small_tokenizer().vocab[letter] for letter in "ac"} <= set(ids) for ids in texts]
    assert whole == both and sum(whole) == 1


def test_answers_of_all_windows_are_ranked_together():
    task = asking(stride=4, max_answer_length=2)
    rows = task.tables["train"].select([0])
    encoded = task.encode(rows, small_tokenizer(), 20)
    assert len(encoded) == 2
    start, end = np.full((2, 2, 20), -5.0)
    inside = [number for number, place in enumerate(encoded["starts"][0]) if place >= 0]
    # An answer of two tokens in the first window, which is better than none there; none in the second one.
    start[0, inside[2]], end[0, inside[3]], start[1, 0], end[1, 0] = 4, 5, 5, 5
    # Too long an answer, and an end before its start.
    start[0, inside[1]], end[0, inside[0]] = 4.5, 5.5
    context = rows["context"][0].split()
    assert task.predict(rows, encoded, (start, end)) == [" ".join(context[2:4])]
    # None is better than every answer in all windows.
    start[:, 0] = end[:, 0] = 5
    assert task.predict(rows, encoded, (start, end)) == [""]
    # Where every training question has an answer, as in SQuAD v1, none is never said.
    task.none_allowed = False
    assert task.predict(rows, encoded, (start, end)) == [" ".join(context[2:4])]


def test_a_question_that_leaves_no_room_is_an_error():
    with pytest.raises(ValueError, match="train, row 0: a question of 2 tokens"):
        task = asking(stride=4)
        task.encode(task.tables["train"], small_tokenizer(), 8)


def test_metrics_and_the_baseline_by_hand():
    text = "Cats sleep. The dog of Ann eats meat every day! Nobody knows."
    assert most_similar_sentence("What does the dog eat, Ann?", text) == "The dog of Ann eats meat every day!"
    found = squad_scores(["The cat!", "dog house", "", "x"], [["a cat"], ["house", "big house"], [], ["y"]])
    assert found["exact_match"] == 0.5 and found["f1"] == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
    assert found["no_answer_f1"] == 1.0 and found["answer_f1"] == pytest.approx((1 + 2 / 3) / 3)
    scores = tag_scores([["B-PER", "O", "O", "B-LOC"]], [["B-PER", "I-PER", "O", "B-LOC"]], entities=True)
    assert scores == {"accuracy": 0.75, "f1": 0.5, "precision": 0.5, "recall": 0.5}
    # In BILOU, U is an entity of one word and L the last of several.
    right = [["U-PER", "U-PER", "O", "B-LOC", "L-LOC", "B-LOC", "L-LOC"]]
    wrong = [["B-PER", "L-PER", "O", "B-LOC", "I-LOC", "I-LOC", "L-LOC"]]
    assert tag_scores(wrong, right, entities=True)["f1"] == 0.0
    assert tag_scores(right, right, entities=True)["f1"] == 1.0
