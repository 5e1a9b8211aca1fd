"""Small runs of the recipes for one's own tasks: rows that a tiny model can learn, and their command lines."""

import csv
import json
import random
from pathlib import Path

from neobert_hf.data.rows import Row
from neobert_hf.tasks.classification import Classification, ClassificationSettings
from neobert_hf.tasks.question_answering import QuestionAnswering, QuestionAnsweringSettings
from neobert_hf.tasks.regression import Regression, RegressionSettings
from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.token_classification import TokenClassification, TokenClassificationSettings
from tests.helpers.examples import to_flags


TASKS = {
    "classes": (Classification, ClassificationSettings),
    "numbers": (Regression, RegressionSettings),
    "tags": (TokenClassification, TokenClassificationSettings),
    "answers": (QuestionAnswering, QuestionAnsweringSettings),
}


# Of every word the tag follows from its first letter.
TAGS = {"a": "B-PER", "b": "B-LOC", "c": "O", "d": "O"}
SMALL = {
    "max_length": 32,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "num_train_epochs": 2,
    "eval_steps": 10,
    "use_cpu": True,
}


def flags(output_dir: Path, model: Path, data: Path, **changes) -> list[str]:
    return to_flags({"output_dir": output_dir, "model": model, "data": data} | SMALL | changes)


def task_of_rows(kind: str, settings: dict | None = None, **tables: list[dict]):
    """A task on rows in memory, as if they came from files that are called like the splits."""
    task, settings_class = TASKS[kind]
    splits = {name: [Row(name, index, cells) for index, cells in enumerate(rows)] for name, rows in tables.items()}
    return task(settings_class("model", "data", **settings or {}), splits)


def task_of_file(kind: str, data: Path, **settings):
    """A task on what a user's file or folder holds."""
    task, settings_class = TASKS[kind]
    settings = settings_class("model", str(data), **settings)
    return task(settings, read_splits(settings, task.readers))


def text_rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    """The section is the word with which a text begins."""
    draw = random.Random(seed)
    sections = [draw.choice(["mail", "net"]) for _ in range(number)]
    return [
        {"id": str(row), "description": f"{section} {draw.choice('xyz')} {draw.choice('xyz')}", "section": section}
        for row, section in enumerate(sections)
    ]


def numbered_rows(number: int, seed: int = 0) -> list[dict]:
    """The price follows from the word with which a text begins."""
    prices = {"mail": 1000.5, "net": 3000.25}
    rows = text_rows(number, seed)
    return [{"text": f"{row['description']} {row['id']}", "price": prices[row["section"]]} for row in rows]


def write_csv(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0].keys(), delimiter="\t" if file.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return file


def tagged_rows(number: int, seed: int = 0, length: int = 5) -> list[dict[str, list[str]]]:
    draw = random.Random(seed)
    rows = [["".join(draw.choices("abcd", k=2)) for _ in range(length)] for _ in range(number)]
    return [{"tokens": words, "tags": [TAGS[word[0]] for word in words]} for words in rows]


def asked_rows(number: int, seed: int = 0, none: float = 0.0, length: int = 8) -> list[dict]:
    """The answer is the one digit among letters; a text without a digit has none."""
    draw = random.Random(seed)
    rows = []
    for row in range(number):
        words = draw.choices("abcdefghijklm", k=length)
        answers = []
        if draw.random() >= none:
            place = draw.randrange(length)
            words[place] = draw.choice("123456789")
            answers = [{"text": words[place], "answer_start": 2 * place}]
        rows.append({"id": str(row), "question": "n ?", "context": " ".join(words), "answers": answers})
    return rows


def write_squad(file: Path, rows: list[dict]) -> Path:
    """In the form of SQuAD's own files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = []
    for row in rows:
        asked = {name: row[name] for name in ("id", "question", "answers")}
        paragraphs.append({"context": row["context"], "qas": [asked | {"is_impossible": not row["answers"]}]})
    file.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return file


def write_json_lines(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
