"""Extractive question answering as in SQuAD v1 and v2: long texts are cut into windows, the best answer of all wins."""

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerBase

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.data import readers
from neobert_hf.data.readers import Reader
from neobert_hf.data.rows import Row, is_empty
from neobert_hf.tasks.pieces import first_with_piece, visible, windows_of_rows, with_marks
from neobert_hf.tasks.recipe import train_on_task
from neobert_hf.tasks.rows import Splits, parse_splits
from neobert_hf.tasks.task import OwnTask, TaskSettings
from neobert_hf.training.fine_tuning import FineTuningArguments


@dataclass
class QuestionAnsweringSettings(TaskSettings):
    """How long texts are cut into windows, and which answers are allowed."""

    # As in BERT's code for SQuAD.
    max_length: int = field(default=384, metadata={"help": "tokens of a window, question included"})
    stride: int = field(default=128, metadata={"help": "tokens that two windows of a text have in common"})
    max_answer_length: int = field(default=30, metadata={"help": "most tokens of an answer"})
    null_threshold: float = field(
        default=0.0, metadata={"help": "give no answer if 'no answer' scores this much more than the best answer"}
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.stride < self.max_length:
            raise ValueError(
                f"`stride` is {self.stride}, but windows of `max_length` {self.max_length} cannot share as much."
            )


def read_squad(file: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read questions in SQuAD's format (`data`, `paragraphs`, `qas`), as a JSON array of rows, or as JSON lines."""
    try:
        content = json.loads("".join(readers.read_lines(file)))
    except (json.JSONDecodeError, RecursionError):
        content = None
    if not isinstance(content, dict) or "data" not in content:
        yield from readers.read_json(file, columns)
        return
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    # In SQuAD v2 a question without an answer may have the answer of a similar one.
                    answers = [] if asked.get("is_impossible") else asked["answers"]
                    yield {"question": asked["question"], "context": paragraph["context"], "answers": answers}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not in SQuAD's format: {error!r} is missing or has another type") from error


READERS: Mapping[str, Reader] = {**readers.READERS, ".json": read_squad, ".jsonl": read_squad}


@recipe
def answer(settings: QuestionAnsweringSettings, arguments: FineTuningArguments) -> Result:
    """Fine-tune any encoder to find answers in texts, as in SQuAD v1 and v2.

    The data are SQuAD's own JSON, JSON lines, Parquet, a table, or a Hub dataset. Texts longer than a window are read
    in several overlapping windows. If some training questions have no answer, the model learns to say that there is
    none. For resuming and `output_dir` see `classify`; the report has exact match and F1.

    Returns:
        The model's folder; `scores` and those of the `baseline`, by split and metric.
    """
    return train_on_task("answer", QuestionAnswering, settings, arguments)


class QuestionAnswering(OwnTask):
    """See `Task`. The columns are `question`, `context`, and `texts` and `begins` of the right answers, if any."""

    kind = "question-answering"
    title = "Answers found in texts"
    auto_class = AutoModelForQuestionAnswering
    readers = READERS

    def __init__(self, settings: QuestionAnsweringSettings, splits: Splits):
        self.settings = settings
        for row in chain(*splits.values()):
            if missing := [name for name in ("question", "context", "answers") if name not in row.cells]:
                raise ValueError(
                    f"{row.place} has no column {missing[0]!r}; it has {', '.join(map(repr, row.cells))}. As in SQuAD, "
                    "questions are in `question`, texts in `context` and answers in `answers`, [] if there is none: "
                    "rename the columns, or add what is missing."
                )
        # Questions about the same text are held out together.
        share = settings.validation_share
        self.tables = parse_splits(splits, parse_question, share, ["context", "question"], ["context"])
        answered = np.array([bool(texts) for texts in self.tables["train"]["texts"][:]])
        if not answered.any():
            raise ValueError("No training question has an answer: there is nothing to learn.")
        self.none_allowed, self.mostly_none = not answered.all(), answered.mean() < 0.5
        self.baseline_name = "always no answer" if self.mostly_none else "the sentence most like the question"

    def purpose(self) -> str:
        none = ", or says that it has none" if self.none_allowed else ""
        return f"This model finds the part of a text that answers a question{none}."

    def example(self, name: str) -> list[str]:
        # Transformers has no pipeline for this.
        return [
            "from transformers import AutoModelForQuestionAnswering, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({name})",
            f"model = AutoModelForQuestionAnswering.from_pretrained({name})",
            'inputs = tokenizer("Who sleeps?", "The cat sleeps.", return_tensors="pt")',
            "found = model(**inputs)",
            "first, last = found.start_logits.argmax(), found.end_logits.argmax()",
            'tokenizer.decode(inputs["input_ids"][0, first : last + 1])',
        ]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
        """Windows of question and text, with the answer's first and last token; (0, 0) if a window has no answer."""
        tokenizer.padding_side = "right"
        stride = self.settings.stride
        # The longest question that leaves a window room for the text.
        room = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1

        def windows(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            questions = tokenizer(batch["question"], add_special_tokens=False)["input_ids"]
            for place, question in zip(batch["place"], questions):
                if len(question) > room:
                    raise ValueError(
                        f"{place}: a question of {len(question)} tokens leaves no room for a text in windows of "
                        f"{max_length} with {stride} in common: set a larger `max_length` or a smaller `stride`."
                    )
            encoded = tokenizer(
                batch["question"],
                batch["context"],
                truncation="only_second",
                max_length=max_length,
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            offsets, of_rows = encoded.pop("offset_mapping"), windows_of_rows(encoded)
            columns = {"start_positions": [], "end_positions": [], "starts": [], "ends": [], "row": []}
            for row, of_row in of_rows.items():
                context, begin, end = batch["context"][row], None, None
                if batch["texts"][row]:
                    place, text = batch["begins"][row][0], batch["texts"][row][0]
                    characters = range(place, place + len(text))
                    # It may begin and end with characters that have no piece.
                    begin = first_with_piece(encoded, of_row, characters, 1)
                    end = first_with_piece(encoded, of_row, reversed(characters), 1)
                for window in of_row:
                    first = last = None
                    if begin is not None:
                        first, last = (encoded.char_to_token(window, each, 1) for each in (begin, end))
                    whole = first is not None and last is not None
                    columns["start_positions"].append(first if whole else 0)
                    columns["end_positions"].append(last if whole else 0)
                    # No answer begins or ends with a token outside the text, or with a space that is a token.
                    spans = zip(offsets[window], encoded.sequence_ids(window))
                    spans = [span if part == 1 and context[slice(*span)].strip() else None for span, part in spans]
                    columns["starts"].append([-1 if span is None else span[0] for span in spans])
                    columns["ends"].append([-1 if span is None else with_marks(context, span[1]) for span in spans])
                    columns["row"].append(numbers[row])
            del encoded["overflow_to_sample_mapping"]
            return {**encoded, **columns}

        found = rows.map(windows, with_indices=True, batched=True, remove_columns=rows.column_names, desc="tokenizing")
        whole = {row for row, last in zip(found["row"][:], found["end_positions"][:]) if last}
        answered = [row for row, texts in enumerate(rows["texts"][:]) if texts]
        if cut := [row for row in answered if row not in whole]:
            print(
                f"{len(cut):,} of {len(answered):,} answers count as no answer, such as that of "
                f"{rows['place'][cut[0]]}: they are whole in no window. Raise `stride`."
            )
        return found

    def predict(self, rows: Dataset, inputs: Dataset, logits: tuple[np.ndarray, np.ndarray]) -> list[str]:
        """For each question, the best answer of all its windows. An empty text means no answer."""
        contexts = rows["context"][:]
        best = [("", -np.inf) for _ in contexts]
        nulls = np.full(len(contexts), np.inf)
        columns = (inputs[name][:] for name in ("row", "starts", "ends"))
        for row, starts, ends, start, end in zip(*columns, *logits):
            nulls[row] = min(nulls[row], start[0] + end[0])
            # Of each first and last token: whether both can be that, are in order and not too far apart.
            usable = np.array(starts) >= 0
            allowed = np.tril(np.triu(np.outer(usable, usable)), self.settings.max_answer_length - 1)
            scores = np.where(allowed, np.add.outer(start[: len(starts)], end[: len(ends)]), -np.inf)
            first, last = np.unravel_index(scores.argmax(), scores.shape)
            if scores[first, last] > best[row][1]:
                best[row] = (contexts[row][starts[first] : ends[last]].strip(), scores[first, last])
        limit = self.settings.null_threshold if self.none_allowed else np.inf
        return ["" if null - score > limit else text for (text, score), null in zip(best, nulls)]

    def baseline(self, rows: Dataset) -> list[str]:
        """No answer, or the sentence that has the most words of the question."""
        if self.mostly_none:
            return [""] * len(rows)
        return [most_similar_sentence(*pair) for pair in zip(rows["question"][:], rows["context"][:])]

    def metrics(self, rows: Dataset, found: list[str]) -> dict[str, float]:
        return squad_scores(found, rows["texts"][:])

    def errors(self, rows: Dataset, found: list[str], logits: Any) -> list[tuple[float, str, str, str]]:
        """What an answer lacks of an F1 of 1."""
        return [
            (1 - answer_scores(text, right)[1], right[0] if right else "none", text or "none", question)
            for question, right, text in zip(rows["question"][:], rows["texts"][:], found)
        ]


def parse_question(row: Row) -> dict[str, Any]:
    """The columns of a row, with its answers in one format, each checked against its text."""
    context, texts, begins = row.text("context"), [], []
    for text, begin in _answers(row):
        if not isinstance(text, str) or is_empty(text) or not isinstance(begin, int):
            raise ValueError(f"{row.place}: an answer is {text!r} at {begin!r}; it must be a text at a number.")
        if begin < 0 or context[begin : begin + len(text)] != text:
            place = context.find(text)
            found = f"it is at {place}" if place >= 0 else "the text does not hold it"
            raise ValueError(f"{row.place}: the answer {text!r:.60} should be at {begin}; {found}.")
        # No token begins with the spaces around an answer.
        texts.append(text.strip())
        begins.append(begin + len(text) - len(text.lstrip()))
    # Some questions of SQuAD begin with spaces, which would count as tokens for some tokenizers.
    return {"question": row.text("question").strip(), "context": context, "texts": texts, "begins": begins}


def _answers(row: Row) -> list[tuple[Any, Any]]:
    """Text and position of each answer: the row has a list of both, or as SQuAD on the Hub a list of each."""
    answers = row.cell("answers") or []
    try:
        if isinstance(answers, dict):
            # In Parquet, `{}` gets None for each key that it lacks.
            return list(zip(answers["text"] or [], answers["answer_start"] or [], strict=True))
        return [(answer["text"], answer["answer_start"]) for answer in answers]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{row.place}: `answers` is {answers!r:.80}; it must be as in SQuAD, a list such as "
            '[{"text": "cat", "answer_start": 4}] or {"text": ["cat"], "answer_start": [4]}, empty if there is none.'
        ) from error


def most_similar_sentence(question: str, context: str) -> str:
    """The sentence of a text that has the most words of the question."""
    words = set(normal_answer(question))
    sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+|\n+", context) if sentence.strip()]
    return max(sentences, key=lambda sentence: len(words & set(normal_answer(sentence))))


def normal_answer(text: str) -> list[str]:
    """The words of an answer as SQuAD compares them: lower case, without punctuation and articles.

    Two answers that look the same are the same.
    """
    text = "".join(letter for letter in visible(text).lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def answer_scores(found: str, right: list[str]) -> tuple[float, float]:
    """Exact match and F1 of an answer, each the best over the right answers; an empty list means "no answer"."""
    scores = [(0.0, 0.0)]
    for answer in right or [""]:
        words, expected = normal_answer(found), normal_answer(answer)
        common = sum((Counter(words) & Counter(expected)).values())
        f1 = 2 * common / (len(words) + len(expected)) if words and expected else float(words == expected)
        scores.append((float(words == expected), f1))
    return max(exact for exact, _ in scores), max(f1 for _, f1 in scores)


def squad_scores(found: list[str], right: list[list[str]]) -> dict[str, float]:
    """F1 and exact match of answers as in SQuAD v1 and v2; also F1 of the questions with and without an answer.

    References:
        https://arxiv.org/abs/1606.05250, section 6.1; https://arxiv.org/abs/1806.03822
    """
    scores = np.array([answer_scores(*pair) for pair in zip(found, right)])
    has = np.array([bool(texts) for texts in right])
    values = {"f1": scores[:, 1].mean(), "exact_match": scores[:, 0].mean()}
    if not has.all():
        values["no_answer_f1"] = scores[~has, 1].mean()
        if has.any():
            values["answer_f1"] = scores[has, 1].mean()
    return {name: float(value) for name, value in values.items()}
