"""Rows of tasks: what is read and held out, and what is refused before anything is trained."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from neobert_hf.tasks.question_answering import READERS as ASKED
from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.words import READERS, read_conll
from tests.helpers.examples import load_example
from tests.helpers.other_encoders import save_other_encoder
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import (
    asked_rows,
    flags,
    tagged_rows,
    task_of_rows,
    text_rows,
    write_csv,
    write_json_lines,
    write_squad,
)


def rows_of(data, **settings) -> dict:
    defaults = {"subset": None, "validation_data": None, "test_data": None, "score_test": True}
    return read_splits(SimpleNamespace(data=str(data), **defaults | settings), READERS | ASKED)


def test_files_and_folders_are_read_as_splits(tmp_path):
    rows = text_rows(20)
    for name in ("rows.csv", "rows.tsv"):
        assert [row.cells for row in rows_of(write_csv(tmp_path / name, rows))["train"]] == rows
    folder = tmp_path / "folder"
    folder.mkdir()
    Dataset.from_list(rows[:9]).to_parquet(folder / "train-00000-of-00002.parquet")
    Dataset.from_list(rows[9:12]).to_parquet(folder / "train-00001-of-00002.parquet")
    write_csv(folder / "dev.csv", rows[12:])
    # What lies beside them is not read.
    write_csv(folder / "eval.csv", rows)
    assert {name: len(part) for name, part in rows_of(folder).items()} == {"train": 12, "validation": 8}
    assert len(rows_of(folder, test_data=str(folder / "eval.csv"))["test"]) == 20
    # The same rows in two formats would be twice as many.
    Dataset.from_list(rows).to_parquet(folder / "valid.parquet")
    with pytest.raises(ValueError, match="dev.csv, valid.parquet"):
        rows_of(folder)
    with pytest.raises(ValueError, match="subset"):
        rows_of(tmp_path / "rows.csv", subset="en")


def test_paths_that_do_not_exist_are_said_to_be_that(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "data" / "reviews.csv", text_rows(8))
    with pytest.raises(FileNotFoundError, match="`data` is 'data/review.csv'"):
        rows_of("data/review.csv")
    # Found before the training rows are read.
    (tmp_path / "data" / "reviews.csv").write_text("no,csv\n1\n")
    with pytest.raises(FileNotFoundError, match="`test_data` is 'owner/rows.jsonl.gz'"):
        rows_of("data/reviews.csv", test_data="owner/rows.jsonl.gz")


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            "-DOCSTART- -X- O\n\nU.N. NNP B-ORG\nof IN O\n\n# id 5\tdomain=en\n\n# NN O\n",
            [(["U.N.", "of"], ["B-ORG", "O"]), (["#"], ["O"])],
        ),
        (
            "in\tO\nNew York\tB-LOC\n10\u00a0000\tB-NUM\t\n\n  two   X O \n10\u00a0000 O\n",
            [(["in", "New York", "10\u00a0000"], ["O", "B-LOC", "B-NUM"]), (["two", "10\u00a0000"], ["O", "O"])],
        ),
    ],
    ids=["spaces between word and tag", "spaces inside words"],
)
def test_words_and_tags_of_a_text_file(tmp_path, content, expected):
    (tmp_path / "a.conll").write_text(content)
    assert [(row["tokens"], row["tags"]) for row in read_conll(tmp_path / "a.conll")] == expected


def test_questions_of_a_file(tmp_path):
    asked = asked_rows(6, none=0.5)
    for file in (write_squad(tmp_path / "squad.json", asked), write_json_lines(tmp_path / "one.jsonl", asked)):
        assert [row.cells | {"id": "0"} for row in rows_of(file)["train"]] == [row | {"id": "0"} for row in asked]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("rows.conll", "one O\ntwo\n", "rows.conll, row 0: line 2 is 'two'; it must have a word and a tag"),
        ("rows.json", '{"data": []}', "rows.json is empty"),
        ("rows.json", '{"data": [{}]}', "rows.json, row 0: not in SQuAD's format"),
    ],
)
def test_faults_of_a_file_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name)


def test_a_text_that_is_trained_on_is_not_held_out_again():
    """Each text three times, and three questions about each."""
    labelled = [{"text": f"text {number % 20}", "label": "yn"[number % 2]} for number in range(60)]
    for kind, rows, column in (
        ("classes", labelled, "text"),
        ("answers", 3 * asked_rows(20), "context"),
        ("tags", 3 * tagged_rows(20), "words"),
    ):
        tables = task_of_rows(kind, train=rows).tables
        texts = {name: set(map(str, table[column][:])) for name, table in tables.items()}
        assert not texts["train"] & texts["validation"]
        assert (len(tables["train"]), len(tables["validation"])) == (54, 6)
    with pytest.raises(ValueError, match="20 rows with 1 different texts"):
        task_of_rows("classes", train=[{"text": "the same", "label": label} for label in "yn" * 10])


def test_every_label_stays_in_training():
    labels = [f"c{number}" if number < 8 else "yn"[number % 2] for number in range(60)]
    single = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    several = [row | {"label": [row["label"], "all"]} for row in single]
    tagged = [{"tokens": [row["text"]] * 2, "tags": row["label"]} for row in several]
    for kind, rows in (("classes", single), ("classes", several), ("tags", tagged)):
        assert len(task_of_rows(kind, train=rows).tables["validation"]) == 6
    with pytest.raises(ValueError, match="and 20 labels are too few"):
        task_of_rows("classes", train=[{"text": f"text {number}", "label": f"c{number}"} for number in range(20)])


def test_settings_that_are_refused(tmp_path):
    save_other_encoder("bert", tmp_path / "bert", small_tokenizer())
    data = write_csv(tmp_path / "rows.csv", text_rows(40))
    for changes, error, name in (
        ({"model": tmp_path / "nowhere"}, OSError, "`model`"),
        ({"pooling": "mean"}, ValueError, "`pooling` is 'mean'"),
        ({"validation_share": 10}, ValueError, "`validation_share`"),
        ({"max_steps": 0}, ValueError, "`max_steps` is 0"),
        ({"data": "mydata"}, ConnectionError, "'mydata' is not a local file, .*the Hub cannot be reached"),
    ):
        with pytest.raises(error, match=name):
            load_example("run_classification").main(
                flags(**{"output_dir": tmp_path / "run", "model": tmp_path / "bert", "data": data} | changes)
            )


def test_held_out_rows_that_are_trained_on_are_counted(capsys):
    rows = [{"text": f"text {number}", "label": "yn"[number % 2]} for number in range(8)]
    held_out = {"validation": [*rows[:2], {"text": "another", "label": "y"}]}
    task_of_rows("classes", train=rows, **held_out)
    assert "2 of 3 rows of the split validation are also trained on" in capsys.readouterr().out
    with pytest.raises(ValueError, match="2 of 2 rows of the split test are also trained on"):
        task_of_rows("classes", train=rows, **held_out, test=rows[3:5])
    capsys.readouterr()
    # Other questions about a text that is trained on do no harm.
    asked = asked_rows(8)
    task_of_rows("answers", train=asked, validation=[row | {"question": "m ?"} for row in asked])
    assert "also trained on" not in capsys.readouterr().out


ONES = [{"text": "a b", "label": "x"}, {"text": "c", "label": "y"}]
OTHERS = [{"text": "d", "label": "x"}, {"text": "e", "label": "y"}]
HOT = [{"text": "a", "label": [1.0, 0.0]}, {"text": "b", "label": [0.0, 1.0]}]
HOURS = [row | {"label": number} for row, number in zip(ONES, ("1", 2.5))]
PRICES = [{"text": f"text {number}", "label": 1000 + number} for number in range(30)]
WRITTEN = [row | {"label": "['x', 'y']"} for row in ONES]
TAGGED = tagged_rows(8)
TAGGED_OTHERS = tagged_rows(2, seed=1)
NUMBERED = [{"tokens": ["a", "b"], "tags": [0, 1]}, {"tokens": ["c"], "tags": [2]}]
NAMES = ["O", "B-PER", "I-PER"]
ASKED_ROWS, ASKED_OTHERS = asked_rows(4), asked_rows(4, seed=1)
PRICED = [{"text": "a", "price": 2}, {"text": "b", "price": "2.5"}]
PRICED_OTHERS = [{"text": "c", "price": 3}]
TABLES = {
    "classes": (ONES, OTHERS),
    "numbers": (PRICED, PRICED_OTHERS),
    "tags": (TAGGED, TAGGED_OTHERS),
    "answers": (ASKED_ROWS, ASKED_OTHERS),
}


def built(kind: str, settings: dict | None = None, **tables):
    return task_of_rows(kind, settings, **dict(zip(("train", "validation"), TABLES[kind])) | tables)


def answered(answers) -> list[dict]:
    return [*ASKED_ROWS, {"question": "n ?", "context": "a 5 b", "answers": answers}]


# The kind of task, settings, tables, and what the error names.
BAD_ROWS = [
    ("classes", {}, {"train": [{"words": "a", "kind": "x"}]}, "`label_column`.* 'words', 'kind'"),
    ("classes", {"label_column": "lable"}, {}, "`label_column` is 'lable'.* 'label'"),
    ("classes", {}, {"test": [{"text": "a", "label": None}]}, "test, row 0: 'label' is None.*`score_test`"),
    ("classes", {}, {"test": [{"text": "a", "label": "z"}]}, "test, row 0 has the label 'z'.*`score_test`"),
    ("classes", {}, {"train": ONES[:1]}, "one label, x"),
    ("classes", {}, {"train": HOURS}, "'label' holds numbers such as 2.5, .*`regress`"),
    ("classes", {}, {"train": PRICES}, "'label' holds numbers such as 1000, .*`regress`"),
    (
        "tags",
        {},
        {"train": ONES, "validation": OTHERS},
        "'text' holds 'a b', which is no list of words.* `sentence_column`",
    ),
    ("answers", {}, {"train": [{"question": "n ?", "context": "a", "answer": "a"}]}, "no column 'answers'.* 'answer'"),
    ("classes", {"label_separator": ";", "class_weights": "balanced"}, {}, "`class_weights`"),
    ("numbers", {}, {"train": [*PRICED, {"text": "e", "price": "12,5"}]}, "row 2: 'price' is '12,5'"),
    ("numbers", {}, {"train": PRICED[:1]}, "All training rows have 2 in 'price'"),
    ("classes", {}, {"train": WRITTEN}, "'x', 'y'.*`label_separator`"),
    ("classes", {}, {"train": HOT, "validation": [HOT[0] | {"text": "c"}]}, "lists of 0.0 and 1.0"),
    ("tags", {}, {"validation": [{"tokens": ["a", "b"], "tags": ["O"]}]}, "row 0 has 2 words and 1 tags"),
    ("tags", {}, {"train": [*TAGGED, {"tokens": ["a", " "], "tags": ["O", "O"]}]}, "row 8: 'tokens' is"),
    ("tags", {}, {"test": [{"tokens": ["a"], "tags": ["B-NEW"]}]}, "test, row 0 has the tag 'B-NEW'"),
    ("tags", {}, {"train": [{"piece": ["a"], "tags": ["O"]}]}, "`word_column`.* 'piece', 'tags'"),
    ("tags", {}, {"train": NUMBERED}, "train, row 0: 'tags' holds .*`tag_names`"),
    ("tags", {"tag_names": NAMES[:2]}, {"train": NUMBERED}, "row 1 has the tag 2.*`tag_names`"),
    ("answers", {}, {"train": answered([{"text": "5", "answer_start": 9}])}, "row 4: the answer '5'.* it is at 2"),
    ("answers", {}, {"train": answered({"text": ["5", "5"], "answer_start": [2]})}, "row 4: `answers` is"),
    ("answers", {}, {"train": [row | {"answers": []} for row in ASKED_ROWS]}, "No training question has an answer"),
]


@pytest.mark.parametrize("kind, settings, tables, message", BAD_ROWS)
def test_bad_rows_are_named_before_training(kind, settings, tables, message):
    with pytest.raises(ValueError, match=message):
        built(kind, settings, **tables)


def test_numbers_that_are_read_as_texts_are_said(capsys):
    rows = [{"text": 7, "label": "x"}, *ONES]
    built("classes", train=rows)
    assert "1 of 3 training rows have a number in 'text', such as 7" in capsys.readouterr().out
    # In a CSV file all cells are texts, and a text may be a number.
    built("classes", train=[rows[0] | {"text": "7"}, *ONES])
    assert "number" not in capsys.readouterr().out
    built(
        "classes",
        {"text_columns": ["id"]},
        train=[row | {"id": "12"} for row in ONES],
        validation=[rows[0] | {"id": 3}],
    )
    assert "2 of 2 training rows have a number in 'id', such as 12" in capsys.readouterr().out
    # Whole numbers may be the numbers of classes, also as pandas writes them beside missing cells.
    assert built(
        "classes",
        train=[row | {"label": number} for row, number in zip(ONES, (1.0, 2.0))],
        validation=[OTHERS[0] | {"label": 1.0}],
    ).labels == ["1.0", "2.0"]


def test_columns_are_guessed():
    row = {"label": 1, "premise": "a", "hypothesis": "b", "label_text": "x"}
    task = built("classes", train=[row, row | {"label_text": "y"}], validation=[row | {"premise": "c"}])
    assert task.labels == ["x", "y"] and set(task.tables["train"].column_names) >= {"text", "text_pair", "label"}


def test_numbers_of_tags_get_the_names_of_the_setting():
    task = built("tags", {"tag_names": NAMES}, train=NUMBERED, validation=[{"tokens": ["d"], "tags": [0]}])
    assert task.tables["train"]["tags"][:] == [["O", "B-PER"], ["I-PER"]] and task.entities


def test_answers_of_every_form():
    both = [{name: [one[name] for one in row["answers"]] for name in ("text", "answer_start")} for row in ASKED_ROWS]
    rows = [row | {"answers": answers} for row, answers in zip(ASKED_ROWS, both)]
    # `{}` for none, in a file whose other rows have both keys.
    task = built("answers", train=[*rows, ASKED_ROWS[0] | {"answers": {}}])
    assert task.tables["train"]["texts"][:] == [[row["answers"][0]["text"]] for row in ASKED_ROWS] + [[]]
    spaced = {"question": "n ?", "context": "a 5 b", "answers": [{"text": " 5 ", "answer_start": 1}]}
    assert built("answers", train=[spaced]).tables["train"]["begins"][:] == [[2]]


def test_answers_that_no_window_holds_are_counted(capsys):
    rows = [
        {"question": "a ?", "context": context, "answers": [{"text": answer, "answer_start": 0}]}
        for context, answer in (("a b c", "a"), ("b " * 40, "b " * 39 + "b"))
    ]
    task = built("answers", {"stride": 4}, train=rows)
    task.encode(task.tables["train"], small_tokenizer(), 16)
    assert "1 of 2 answers count as no answer" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_labels_that_look_the_same_are_one_and_others_stay_as_they_are_written(kind, capsys):
    """NFC, NFD and a character without a width; `cafe` with an accent of its own is spelled in one way only."""
    names = ["th\u00e9", "the\u0301", "the\u0301\u200b", "cafe\u0301"]
    if kind == "tags":
        rows = [{"tokens": [f"a{row}", "b"], "tags": [names[row % 4], "th\u00e9"]} for row in range(20)]
    else:
        rows = [{"text": f"a{row}", "label": names[row % 4]} for row in range(20)]
    assert task_of_rows(kind, train=rows[:12], validation=rows[12:]).labels == ["cafe\u0301", "th\u00e9"]
    assert "look the same" in capsys.readouterr().out


def test_a_row_without_answers_is_told_which_columns_are_needed():
    rows = asked_rows(8)
    del rows[5]["answers"]
    with pytest.raises(ValueError, match="row 5 has no column 'answers'.*`question`.*`context`"):
        task_of_rows("answers", train=rows)


def test_numbers_whose_squares_are_infinite_are_refused():
    """All evaluations would have a score of minus infinity, and none would be the best."""
    rows = [{"text": f"a{row}", "price": 10.0 ** (40 * (row % 2))} for row in range(20)]
    with pytest.raises(ValueError, match="row 1: 'price' is 1e"):
        task_of_rows("numbers", train=rows)
