"""Extractive question answering as in SQuAD v1 and v2: long texts are cut into windows, the best answer of all wins."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, PreTrainedTokenizerBase

from neobert_hf.common.files import write_json
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.data import tables
from neobert_hf.data.tables import Reader, Row
from neobert_hf.tasks.plots import means_by_length
from neobert_hf.tasks.recipe import Task, TaskSettings
from neobert_hf.tasks.rows import Splits, checking
from neobert_hf.training.metrics import AnswerMetric, answer_scores


WORST = 10


@dataclass
class QuestionAnsweringSettings(TaskSettings):
    """How long texts are cut into windows, and which answers are allowed."""

    # As in BERT's code for SQuAD.
    max_length: int = field(default=384, metadata={"help": "tokens of a window, question included"})
    stride: int = field(default=128, metadata={"help": "tokens that two windows of a text have in common"})
    max_answer_length: int = field(default=30, metadata={"help": "most tokens of an answer"})
    best_answers: int = field(default=20, metadata={"help": "how many starts and ends are combined in each window"})
    null_threshold: float = field(
        default=0.0, metadata={"help": "give no answer if 'no answer' scores this much more than the best answer"}
    )

    def columns_read(self, rows: list[Row]) -> list[str]:
        return ["context"]

    def columns_compared(self, rows: list[Row]) -> list[str]:
        return ["context", "question"]


def read_squad(file: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read questions in SQuAD's format (`data`, `paragraphs`, `qas`), as a JSON array of rows, or as JSON lines."""
    try:
        content = json.loads("".join(tables.read_lines(file)))
    except (json.JSONDecodeError, RecursionError):
        content = None
    if not isinstance(content, dict) or "data" not in content:
        yield from tables.read_json(file, columns)
        return
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = [] if asked.get("is_impossible") else asked["answers"]
                    yield {
                        "id": str(asked["id"]),
                        "question": asked["question"],
                        "context": paragraph["context"],
                        "answers": [{name: answer[name] for name in ("text", "answer_start")} for answer in answers],
                    }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not in SQuAD's format: {error!r} is missing or has another type.") from error


READERS: Mapping[str, Reader] = {**tables.READERS, ".json": read_squad, ".jsonl": read_squad}


class QuestionAnswering(Task):
    """See `Task`. The columns are `question`, `context`, and `texts` and `starts` of the right answers, if any."""

    kind = "question-answering"
    auto_class = AutoModelForQuestionAnswering

    def __init__(self, settings: QuestionAnsweringSettings, splits: Splits, smoothing: float = 0.0):
        self.settings = settings
        if smoothing:
            raise ValueError(f"`label_smoothing_factor` is {smoothing}; answers cannot be smoothed: leave it out.")
        self.rows, self.splits = splits, DatasetDict()
        for split, rows in splits.items():
            with checking(split):
                self.splits[split] = Dataset.from_list([_with_answers(row) for row in rows])
        self.none_allowed = not all(self.splits["train"]["starts"][:])
        for split, table in self.splits.items():
            if not self.none_allowed and not all(table["starts"][:]):
                row = splits[split][table["starts"][:].index([])]
                with checking(split):
                    raise ValueError(
                        f"{row.place} has no answer, but every training question has one: add such training rows, or "
                        "leave these out."
                    )
        if not any(self.splits["train"]["starts"][:]):
            raise ValueError("No training question has an answer: there is nothing to learn.")

    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
        """Windows of question and text, with the answer's first and last token; (0, 0) if a window has no answer."""
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which characters a piece covers: use a fast tokenizer."
            )
        tokenizer.padding_side = "right"
        stride = self.settings.stride
        # The longest question that leaves a window room for the text.
        room = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1

        def windows(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            lengths = map(len, tokenizer(batch["question"], add_special_tokens=False)["input_ids"])
            for number, length in zip(numbers, lengths):
                if length > room:
                    raise ValueError(
                        f"Row {number:,}: a question of {length} tokens leaves no room for a text in windows of "
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
            rows = encoded.pop("overflow_to_sample_mapping")
            spans = encoded.pop("offset_mapping")
            columns = {"start_positions": [], "end_positions": [], "starts": [], "ends": [], "row": []}
            for window, row in enumerate(rows):
                of_text = [number == 1 for number in encoded.sequence_ids(window)]
                starts = [start if inside else -1 for (start, _), inside in zip(spans[window], of_text)]
                ends = [end if inside else -1 for (_, end), inside in zip(spans[window], of_text)]
                place = answer_tokens(starts, ends, batch["texts"][row][:1], batch["answer_starts"][row][:1])
                for name, value in zip(columns, (*place, starts, ends, numbers[row])):
                    columns[name].append(value)
            return {**encoded, **columns}

        table = self.splits.rename_column("starts", "answer_starts")
        names = table["train"].column_names
        encoded = table.map(windows, with_indices=True, batched=True, remove_columns=names, desc="tokenizing")
        for split, windows_of_split in encoded.items():
            self._say_what_cannot_be_found(split, windows_of_split)
        return encoded

    def _say_what_cannot_be_found(self, split: str, encoded: Dataset) -> None:
        whole, short = set(), set()
        columns = (encoded[name][:] for name in ("row", "start_positions", "end_positions"))
        for row, first, last in zip(*columns):
            whole |= {row} if last else set()
            short |= {row} if last and last - first < self.settings.max_answer_length else set()
        answered = {row for row, starts in enumerate(self.splits[split]["starts"][:]) if starts}
        cut, long = len(answered - whole), len(whole - short)
        if cut or long:
            print(
                f"{split}: of {len(answered):,} answers, {cut:,} are whole in no window and count as no answer (raise "
                f"`stride`), and {long:,} are longer than `max_answer_length` and cannot be found.",
                flush=True,
            )

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> DataCollatorWithPadding:
        return DataCollatorWithPadding(tokenizer)

    def answers(self, split: str, encoded: Dataset, logits: tuple[np.ndarray, np.ndarray]) -> list[list[dict]]:
        """For each question, the best answers of all its windows, best first. An empty text means no answer."""
        contexts = self.splits[split]["context"][:]
        found: list[dict[str, float]] = [{} for _ in contexts]
        nulls = np.full(len(contexts), np.inf)
        columns = (encoded[name][:] for name in ("row", "starts", "ends"))
        for row, starts, ends, start, end in zip(*columns, *logits):
            nulls[row] = min(nulls[row], start[0] + end[0])
            for first, last, score in self._best_spans(np.array(starts), start, end):
                text = contexts[row][starts[first] : ends[last]].strip()
                if text:
                    found[row][text] = max(score, found[row].get(text, -np.inf))
        ranked = []
        for texts, null in zip(found, nulls):
            best = sorted(texts.items(), key=lambda item: -item[1])[: self.settings.best_answers]
            answers = [{"text": text, "score": round(float(score), 4)} for text, score in best]
            none = {"text": "", "score": round(float(null), 4)}
            if not answers:
                answers = [none]
            elif self.none_allowed:
                first = null - answers[0]["score"] > self.settings.null_threshold
                answers = [none, *answers] if first else [*answers, none]
            ranked.append(answers)
        return ranked

    def _best_spans(self, starts: np.ndarray, start: np.ndarray, end: np.ndarray) -> list[tuple[int, int, float]]:
        """First token, last token and score of the most likely answers of a window."""
        number, (inside,) = self.settings.best_answers, np.nonzero(starts >= 0)
        firsts = inside[np.argsort(-start[inside], kind="stable")[:number]]
        lasts = inside[np.argsort(-end[inside], kind="stable")[:number]]
        return [
            (int(first), int(last), float(start[first] + end[last]))
            for first in firsts
            for last in lasts
            if first <= last < first + self.settings.max_answer_length
        ]

    def score(self, split: str, encoded: Dataset, logits: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
        found = [answers[0]["text"] for answers in self.answers(split, encoded, logits)]
        values = AnswerMetric().compute(predictions=found, references=self.splits[split]["texts"][:])
        return values | {"score": values["f1"]}

    def describe(self, split: str, encoded: Dataset, logits: Any, folder: Path) -> list[str]:
        ranked, rows = self.answers(split, encoded, logits), self.splits[split]
        numbers = [row.index for row in self.rows[split]]
        answers = [{"row": number, "best": best} for number, best in zip(numbers, ranked)]
        write_json(folder / f"answers_{split}.json", answers)
        wrong, scores = [], []
        for row, (best, right) in enumerate(zip(ranked, rows["texts"][:])):
            scores.append(answer_scores(best[0]["text"], right)[1])
            if scores[-1] == 0:
                wrong.append((-best[0]["score"], row, right[0] if right else "none", best[0]["text"] or "none"))
        plot_by_length(folder / f"f1_by_length_{split}.png", rows, scores)
        picture = [f"![F1 by the length of the text and of the answer](f1_by_length_{split}.png)", ""]
        if not wrong:
            return [*picture, "No answer is wholly wrong."]
        cells = []
        for _, row, right, found in sorted(wrong)[:WORST]:
            texts = (" ".join(text.split())[:80].replace("|", "\\|") for text in (rows[row]["question"], right, found))
            cells.append([numbers[row], *texts])
        lines = [
            *picture,
            f"The {len(cells)} most confident of {len(wrong):,} wholly wrong answers (all in answers_{split}.json):",
            "",
        ]
        return lines + markdown_table(["Row", "Question", "Right", "Found"], cells)


def plot_by_length(file: Path, rows: Dataset, scores: list[float]) -> None:
    """The F1 of questions with short and with long texts, and with short and with long answers."""
    percent, texts = 100 * np.array(scores), np.array([len(text.split()) for text in rows["context"][:]])
    answers = np.array([len(texts[0].split()) if texts else 0 for texts in rows["texts"][:]])
    lines = [
        Line(means_by_length(texts[chosen], percent[chosen]), label, {"marker": "o"})
        for label, chosen in (("with an answer", answers > 0), ("without one", answers == 0))
    ]
    by_answer = Line(means_by_length(answers[answers > 0], percent[answers > 0]), None, {"marker": "o"})
    axis = {"ylabel": "F1, percent", "ylim": (-3, 103)}
    panels = [
        Panel(lines, {"xlabel": "words of the text", **axis}, legend={"loc": "lower left"}),
        Panel([by_answer], {"xlabel": "words of the right answer", **axis}),
    ]
    plot_lines(file, panels)


def _with_answers(row: Row) -> dict[str, Any]:
    """A row with its answers in one format, each checked against its text."""
    question, context = row.text("question"), row.text("context")
    texts, starts = _texts_and_starts(row.cell("answers"), row.place)
    for text, start in zip(texts, starts):
        if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
            raise ValueError(f"{row.place}: an answer is {text!r} at {start!r}; it must be a text at a number.")
        if start < 0 or context[start : start + len(text)] != text:
            place = context.find(text)
            found = f"it is at {place}" if place >= 0 else "the text does not hold it"
            raise ValueError(f"{row.place}: the answer {text!r:.60} should be at {start}; {found}.")
    # Some questions of SQuAD begin with spaces, which would count as tokens for some tokenizers.
    return {"question": question.strip(), "context": context, "texts": texts, "starts": starts}


def _texts_and_starts(answers: Any, where: str) -> tuple[list, list]:
    """The answers of a row: either a list of texts with their positions, or a list of texts and a list of positions."""
    names = ("text", "answer_start")
    # In Parquet, `{}` gets None for each key that it lacks.
    if answers in (None, [], {}, dict.fromkeys(names)):
        return [], []
    if isinstance(answers, list) and all(
        isinstance(answer, dict) and set(names) <= answer.keys() for answer in answers
    ):
        return tuple([answer[name] for answer in answers] for name in names)
    if not isinstance(answers, dict) or not all(isinstance(answers.get(name), list) for name in names):
        raise ValueError(
            f"{where}: `answers` is {answers!r:.80}; it must be as in SQuAD, a list such as "
            '[{"text": "cat", "answer_start": 4}] or {"text": ["cat"], "answer_start": [4]}, empty if there is none.'
        )
    if len(answers["text"]) != len(answers["answer_start"]):
        raise ValueError(
            f"{where}: {len(answers['text'])} texts of answers and {len(answers['answer_start'])} positions; they "
            "must be equally many."
        )
    return answers["text"], answers["answer_start"]


def answer_tokens(starts: list[int], ends: list[int], texts: list[str], places: list[int]) -> tuple[int, int]:
    """The first and last token of an answer in a window; (0, 0) if there is none or the window cuts it.

    Args:
        starts, ends: the character range of each token; -1 for tokens that are not part of the text.
        texts, places: the answer and its first character, or nothing.
    """
    inside = [number for number, start in enumerate(starts) if start >= 0]
    if not texts or not inside:
        return 0, 0
    begin, end = places[0], places[0] + len(texts[0])
    of_answer = [number for number in inside if starts[number] < end and ends[number] > begin]
    if not of_answer or starts[inside[0]] > begin or ends[inside[-1]] < end:
        return 0, 0
    return of_answer[0], of_answer[-1]
