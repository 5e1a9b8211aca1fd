"""What reports say of single rows, and what their pictures show: from scores that are made up, so from no training."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from neobert_hf.tasks.classification import Classification, ClassificationSettings
from neobert_hf.tasks.plots import plot_confusion
from neobert_hf.tasks.question_answering import QuestionAnswering, QuestionAnsweringSettings
from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.token_classification import TokenClassification, TokenClassificationSettings
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import asked_rows, splits, tagged_rows, write_csv


def both_splits(rows: list[dict]) -> dict:
    return splits(train=rows, validation=rows)


def classes(rows: list[dict], **settings) -> Classification:
    return Classification(ClassificationSettings("model", "data", **settings), both_splits(rows))


def table_below(lines: list[str], title: str) -> list[list[str]]:
    """The cells of the table under a line, without its head."""
    rows = lines[lines.index(title) + 4 :]
    return [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in rows]


# How sure of the wrong class the model is of each row; the last one is right.
MARGINS = [3, 9, 1, 7, 12, 5, 2, 11, 4, 8, 6, 10, 13, -2]


def test_the_ten_worst_errors_are_the_worst_in_their_order(tmp_path):
    rows = [{"text": f"row\n{number} a|b {'x' * 200}", "label": "yn"[number % 2]} for number in range(len(MARGINS))]
    task = classes(rows)
    logits = np.zeros((len(rows), 2))
    # The labels are n and y; of an even row y is right.
    for number, margin in enumerate(MARGINS):
        logits[number, number % 2] = margin
    found = table_below(task.describe("validation", None, logits, tmp_path), "The 10 worst errors:")
    order = sorted(range(13), key=lambda number: -MARGINS[number])[:10]
    assert [int(cells[0]) for cells in found] == order and order[:3] == [12, 4, 7]
    assert found[0] == ["12", "y", "n", f"{math.log1p(math.exp(13)):.2f}", f"row 12 a\\|b {'x' * 200}"[:161]]
    assert found[2][:4] == ["7", "n", "y", f"{math.log1p(math.exp(11)):.2f}"]


def test_rows_are_numbered_as_in_the_file(tmp_path):
    """However many of them are held out."""
    settings = ClassificationSettings("model", str(tmp_path / "rows.csv"), validation_share=0.25)
    rows = [{"text": f"text {number}", "label": "yn"[number % 2]} for number in range(40)]
    task = Classification(settings, read_splits_of(settings, rows))
    held_out = task.splits["validation"]["text"][:]
    logits = np.array([[1.0, -1.0] if int(text.split()[1]) % 2 == 0 else [-1.0, 1.0] for text in held_out])
    found = table_below(task.describe("validation", None, logits, tmp_path), "The 10 worst errors:")
    assert [f"text {cells[0]}" for cells in found] == held_out == [cells[4] for cells in found]
    for wrong, message in (({"label": ""}, "row 39: 'label' is ''"), ({"text": " "}, "row 39: 'text' is ' '")):
        with pytest.raises(ValueError, match=f"rows.csv, {message}"):
            Classification(settings, read_splits_of(settings, [*rows[:-1], rows[-1] | wrong]))
    with pytest.raises(ValueError, match="rows.csv, row 39: 'label' is 'oops'"):
        numbers = [row | {"label": f"{number}.5"} for number, row in enumerate(rows)]
        settings.problem = "regression"
        Classification(settings, read_splits_of(settings, [*numbers[:-1], rows[-1] | {"label": "oops"}]))


def read_splits_of(settings: ClassificationSettings, rows: list[dict]) -> dict:
    write_csv(Path(settings.data), rows)
    return read_splits(settings)


def test_errors_of_numbers_and_of_several_classes(tmp_path):
    task = classes([{"text": f"t{number}", "label": number + 0.5} for number in range(3)])
    lines = task.describe("validation", None, np.array([[1.5], [1.5], [5.5]]), tmp_path)
    assert table_below(lines, "The 2 worst errors:") == [
        ["2", "2.5", "5.5", "3.00", "t2"],
        ["0", "0.5", "1.5", "1.00", "t0"],
    ]
    task = classes([{"text": f"t{number}", "label": names} for number, names in enumerate((["a"], ["a", "b"], ["b"]))])
    lines = task.describe("validation", None, np.array([[1.0, 2.0], [-4.0, -3.0], [-1.0, 1.0]]), tmp_path)
    assert table_below(lines, "The 2 worst errors:") == [
        ["1", "a, b", "none", "4.00", "t1"],
        ["0", "a", "a, b", "2.00", "t0"],
    ]
    right = task.describe("validation", None, np.array([[1.0, -2.0], [4.0, 3.0], [-1.0, 1.0]]), tmp_path)
    assert right[-1] == "No row is wrong."


def test_macro_f1_chooses_the_step_of_weighted_classes_also_of_several_a_row():
    """Micro F1 did once."""
    rows = [{"text": f"t{number}", "label": ["a", "b"] if number == 0 else ["a"]} for number in range(4)]
    logits = np.array([[1.0, -1.0]] * 4)
    for weights, metric in ((True, "macro_f1"), (False, "micro_f1")):
        found = classes(rows, class_weights=weights).score("validation", None, logits)
        assert found["score"] == found[metric] == next(iter(found.values()))
        assert found["macro_f1"] < found["micro_f1"]


@pytest.mark.parametrize("number", [1, 3])
def test_no_score_where_no_correlation_is_defined(number):
    """Equal labels gave NaN once, which is no JSON, and a single row 0."""
    rows = [{"text": f"t{row}", "label": row + 0.5} for row in range(3)]
    tables = splits(train=rows, validation=rows, test=rows[:1] * number)
    task = Classification(ClassificationSettings("model", "data"), tables)
    assert task.score("test", None, np.arange(number)[:, None]) == {}


def test_columns_are_not_read_row_by_row(tmp_path, monkeypatch):
    """It took eighty times as long."""

    def no_row(column):
        raise AssertionError("A column was read row by row.")

    monkeypatch.setattr("datasets.arrow_dataset.Column.__iter__", no_row)
    task = classes([{"text": f"t{number}", "label": "yn"[number % 2]} for number in range(4)])
    task.describe("validation", None, np.zeros((4, 2)), tmp_path)
    task = TokenClassification(TokenClassificationSettings("model", "data"), both_splits(tagged_rows(8)))
    encoded = task.encode(small_tokenizer(), 64)["validation"]
    task.describe("validation", encoded, np.zeros((len(encoded), 64)), tmp_path)
    task = QuestionAnswering(QuestionAnsweringSettings("model", "data", stride=4), both_splits(asked_rows(8)))
    encoded = task.encode(small_tokenizer(), 64)["validation"]
    logits = np.zeros((len(encoded), 64))
    task.score("validation", encoded, (logits, logits))
    task.describe("validation", encoded, (logits, logits), tmp_path)


def test_the_surest_wrong_answers_and_the_picture(tmp_path):
    rows = asked_rows(13)
    task = QuestionAnswering(QuestionAnsweringSettings("model", "data", stride=4, best_answers=1), both_splits(rows))
    encoded = task.encode(small_tokenizer(), 64)["validation"]
    start, expected = np.full((len(rows), 64), -50.0), []
    for number, window in enumerate(encoded):
        right, words = window["start_positions"], rows[number]["context"].split()
        first = right - rows[number]["answers"][0]["answer_start"] // 2
        # The word beside the answer, with another certainty for each row; the last row is right.
        place = right if number == 12 else right - 1 if right > first else right + 1
        start[number, place] = MARGINS[number]
        expected.append([str(number), "n ?", words[right - first], words[place - first]])
    lines = task.describe("validation", encoded, (start, start), tmp_path)
    found = table_below(lines, "The 10 most confident of 12 wholly wrong answers (all in answers_validation.json):")
    order = sorted(range(12), key=lambda number: -MARGINS[number])[:10]
    assert found == [expected[number] for number in order]
    assert len(json.loads((tmp_path / "answers_validation.json").read_text())) == 13
    assert "(f1_by_length_validation.png)" in lines[0]
    assert (tmp_path / "f1_by_length_validation.png").stat().st_size > 5_000


@pytest.mark.parametrize("entities", [True, False])
def test_the_picture_of_tags(tmp_path, entities):
    """Of entities it is of their types, whether a word begins one or not."""
    rows = tagged_rows(8) if entities else [{"tokens": ["a", "b", "c"], "tags": ["x", "y-1", "z"]}]
    rows += [{"tokens": ["a", "a"], "tags": ["B-PER", "I-PER"]}] if entities else []
    task = TokenClassification(TokenClassificationSettings("model", "data"), both_splits(rows))
    encoded = task.encode(small_tokenizer(), 64)["validation"]
    # The first tag, O or x, is said of every word.
    lines = task.describe("validation", encoded, np.zeros((len(encoded), 64)), tmp_path)
    names = ["O", "LOC", "PER"] if entities else ["x", "y-1", "z"]
    tags = [tag.split("-")[-1] if entities else tag for row in rows for tag in row["tags"]]
    counts = np.array([[tags.count(name), 0, 0] for name in names])
    shown = plot_confusion(tmp_path / "expected.png", counts, names)
    assert lines[-2:] == ["![confusion matrix](confusion_validation.png)", ""] and len(shown) == 2
    assert (tmp_path / "confusion_validation.png").read_bytes() == (tmp_path / "expected.png").read_bytes()
