"""What the recipes for one's own tasks refuse before they train, and how they say it."""

import json
import re
from types import SimpleNamespace

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from neobert_hf.common.settings import parse_config, read_yaml
from neobert_hf.data.tables import read_rows
from neobert_hf.tasks.classification import Classification, ClassificationSettings
from neobert_hf.tasks.question_answering import READERS as ASKED
from neobert_hf.tasks.question_answering import QuestionAnswering, QuestionAnsweringSettings, read_squad
from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.token_classification import (
    READERS,
    TokenClassification,
    TokenClassificationSettings,
    read_conll,
)
from neobert_hf.training.fine_tuning import FineTuningArguments
from neobert_hf.training.starting_points import StartingPoint
from tests.helpers.models import ROOT
from tests.helpers.task_runs import asked_rows, splits, tagged_rows, text_rows, write_csv, write_json_lines, write_squad


def rows_of(data, **settings) -> dict:
    defaults = {"subset": None, "validation_data": None, "test_data": None, "validation_share": 0.25}
    # Every row is another text.
    defaults |= {"score_test": True, "columns_read": lambda rows: list(rows[0].cells)}
    defaults |= {"columns_compared": lambda rows: ["text"], "labels_of_rows": lambda rows: [set()] * len(rows)}
    return read_splits(SimpleNamespace(data=str(data), **defaults | settings), READERS | ASKED)


def test_files_of_every_kind(tmp_path):
    rows = text_rows(20)
    for name in ("rows.csv", "rows.tsv"):
        parts = rows_of(write_csv(tmp_path / name, rows))
        assert {name: len(part) for name, part in parts.items()} == {"train": 15, "validation": 5}
        read = sorted([*parts["train"], *parts["validation"]], key=lambda row: row.index)
        assert [row.cells for row in read] == rows
    (tmp_path / "folder").mkdir()
    Dataset.from_list(rows[:9]).to_parquet(tmp_path / "folder" / "train-00000-of-00002.parquet")
    Dataset.from_list(rows[9:12]).to_parquet(tmp_path / "folder" / "train-00001-of-00002.parquet")
    write_csv(tmp_path / "folder" / "dev.csv", rows[12:])
    found = rows_of(tmp_path / "folder", test_data=str(tmp_path / "rows.csv"))
    assert {name: len(part) for name, part in found.items()} == {"train": 12, "validation": 8, "test": 20}
    assert len(rows_of(str(tmp_path / "rows.*"))["train"]) == 30
    asked = asked_rows(6, none=0.5)
    read = rows_of(write_squad(tmp_path / "squad.json", asked), validation_share=0.5)
    read = sorted([*read["train"], *read["validation"]], key=lambda row: row.index)
    assert [row.cells for row in read] == asked


def test_a_text_that_is_trained_on_is_not_held_out_again(tmp_path, capsys):
    """Each text three times, and three questions about each; once the same texts stood on both sides."""
    labelled = [{"text": f"text {number % 20}", "label": "yn"[number % 2]} for number in range(60)]
    asked = [row | {"id": str(number)} for number, row in enumerate(3 * asked_rows(20))]
    tagged = 3 * tagged_rows(20)
    files = (write_csv(tmp_path / "rows.csv", labelled), write_squad(tmp_path / "squad.json", asked))
    write_json_lines(tmp_path / "tagged.jsonl", tagged)
    for settings, column in (
        (ClassificationSettings(model="m", data=str(files[0])), "text"),
        (QuestionAnsweringSettings(model="m", data=str(files[1])), "context"),
        (TokenClassificationSettings(model="m", data=str(tmp_path / "tagged.jsonl")), "tokens"),
    ):
        parts = read_splits(settings, READERS | (ASKED if column == "context" else {}))
        texts = {name: {str(row.cells[column]) for row in part} for name, part in parts.items()}
        assert not texts["train"] & texts["validation"]
        assert (len(parts["train"]), len(parts["validation"])) == (54, 6)
        assert "6 of 60 rows are held out" in capsys.readouterr().out
    write_csv(tmp_path / "one.csv", [{"text": "the same", "label": label} for label in "yn" * 10])
    with pytest.raises(ValueError, match="has 20 rows with 1 different texts: too few to hold out 10%"):
        read_splits(ClassificationSettings(model="m", data=str(tmp_path / "one.csv")))


def test_rows_are_held_out_of_every_label(tmp_path, capsys):
    """Of 4 rare rows among 100 none was held out once, and a label of one row ended the run."""
    rare = [{"text": f"text {number}", "label": "fraud" if number < 4 else "fine"} for number in range(100)]
    single = [
        {"text": f"text {number}", "label": f"c{number}" if number < 8 else "yn"[number % 2]} for number in range(60)
    ]
    several = [row | {"label": [row["label"], "all"]} for row in single]
    tagged = [{"tokens": [row["text"]] * 2, "tags": row["label"]} for row in several]
    write_json_lines(tmp_path / "several.jsonl", several)
    write_json_lines(tmp_path / "tagged.jsonl", tagged)
    for rows, name, number, kind in (
        (rare, "rare.csv", 10, "classes"),
        (single, "single.csv", 6, "classes"),
        (several, "several.jsonl", 6, "classes"),
        (tagged, "tagged.jsonl", 6, "tags"),
    ):
        data = tmp_path / name if rows in (several, tagged) else write_csv(tmp_path / name, rows)
        settings_class, task = (
            (ClassificationSettings, Classification)
            if kind == "classes"
            else (TokenClassificationSettings, TokenClassification)
        )
        settings = settings_class(model="m", data=str(data))
        parts = read_splits(settings)
        assert len(parts["validation"]) == number
        assert parts["validation"] == read_splits(settings)["validation"]
        task(settings, parts)
        printed = capsys.readouterr().out
        labels = [row.cells["tags" if kind == "tags" else "label"] for row in parts["validation"]]
        if name == "rare.csv":
            assert labels.count("fraud") == 1 and "No validation row" not in printed
        else:
            assert "No validation row has 8 of these: c0, c1, c2, c3, c4, c5, c6, c7.\n" in printed
        if name == "single.csv":
            assert sorted(labels) == ["n"] * 3 + ["y"] * 3
    write_csv(tmp_path / "unlike.csv", [{"text": f"text {number}", "label": f"c{number}"} for number in range(20)])
    with pytest.raises(ValueError, match="has 20 different texts, each with a label that no other text has"):
        read_splits(ClassificationSettings(model="m", data=str(tmp_path / "unlike.csv")))


def list_conll(file) -> list[dict]:
    return list(read_conll(file))


def test_words_with_spaces_inside_stay_whole(tmp_path):
    (tmp_path / "rows.conll").write_text(
        "in\tO\nNew York\tB-LOC\n10\u00a0000\tB-NUM\t\n\n  two   X O \n10\u00a0000 O\n"
    )
    assert list_conll(tmp_path / "rows.conll") == [
        {"tokens": ["in", "New York", "10\u00a0000"], "tags": ["O", "B-LOC", "B-NUM"]},
        {"tokens": ["two", "10\u00a0000"], "tags": ["O", "O"]},
    ]


def test_json_lines_end_where_json_says(tmp_path):
    rows = [row | {"context": f"{row['context']}\u2028\x85end"} for row in asked_rows(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\r\n" for row in rows))
    read = rows_of(tmp_path / "rows.jsonl")
    assert sorted(row.text("context") for part in read.values() for row in part) == sorted(
        row["context"] for row in rows
    )


def test_what_lies_beside_a_file_is_not_read_as_well(tmp_path, capsys):
    """A backup, the same rows in two formats, and subsets that are folders: each once doubled or mixed the rows."""
    folder = tmp_path / "folder"
    write_csv(folder / "train.csv", text_rows(8))
    write_csv(folder / "dev.csv", text_rows(4))
    write_csv(folder / "train.csv.bak", text_rows(8, seed=1))
    assert [row.cells for row in rows_of(folder)["train"]] == text_rows(8)
    assert "not read" not in capsys.readouterr().out
    write_csv(folder / "eval.csv", text_rows(4))
    assert rows_of(folder).keys() == {"train", "validation"}
    called = "train: train; validation: validation, valid, val, dev; test: test."
    assert f"not read in {folder}: eval.csv. The names of split files are: {called}" in capsys.readouterr().out
    # It may be named as well.
    assert rows_of(folder, test_data=str(folder / "eval.csv")).keys() == {"train", "validation", "test"}
    assert "not read" not in capsys.readouterr().out
    (folder / "eval.csv").unlink()
    Dataset.from_list(text_rows(4)).to_parquet(folder / "valid.parquet")
    with pytest.raises(ValueError, match="dev.csv, valid.parquet in .* neither one file nor all parts"):
        rows_of(folder)
    (folder / "valid.parquet").unlink()
    Dataset.from_list(text_rows(4)).to_parquet(folder / "test-00000-of-00002.parquet")
    with pytest.raises(ValueError, match="test-00000-of-00002.parquet in .* Restore the missing"):
        rows_of(folder)
    (folder / "test-00000-of-00002.parquet").unlink()
    for local in (folder, folder / "train.csv"):
        with pytest.raises(ValueError, match="`subset` is 'en', but .* is local: name the subset's folder"):
            rows_of(local, subset="en")


def test_conll_files(tmp_path):
    (tmp_path / "a.conll").write_text("-DOCSTART- -X- O\n\nU.N. NNP B-ORG\nof IN O\n\n# id 5\tdomain=en\n\n# NN O\n")
    assert list_conll(tmp_path / "a.conll") == [
        {"tokens": ["U.N.", "of"], "tags": ["B-ORG", "O"]},
        {"tokens": ["#"], "tags": ["O"]},
    ]
    lines = [
        "# text = au lac",
        "1-2\tau\t_\t_",
        "1\tà\tà\tADP\t_",
        "2\tle\tle\tDET\t_",
        "2.1\tx\tx\tX",
        "3\tlac\tlac\tNOUN",
    ]
    (tmp_path / "a.conllu").write_text("\n".join(lines))
    assert list_conll(tmp_path / "a.conllu") == [{"tokens": ["à", "le", "lac"], "tags": ["ADP", "DET", "NOUN"]}]
    (tmp_path / "b.conll").write_text("one O\ntwo\n")
    with pytest.raises(ValueError, match="b.conll, line 2 is 'two'; it must have a word and a tag"):
        list_conll(tmp_path / "b.conll")


def test_paths_that_do_not_exist_are_said_to_be_that(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "data" / "reviews.csv", text_rows(8))
    for name in ("data/review.csv", "./data/review.csv", str(tmp_path / "data" / "review.csv")):
        with pytest.raises(FileNotFoundError, match="`data` is .*no such file or folder; did you mean .*reviews.csv"):
            rows_of(name)
    for name in ("nowhere.csv", "my.rows.TSV", "owner/rows.jsonl.gz"):
        with pytest.raises(FileNotFoundError, match=f"`data` is '{name}', but there is no such file or folder"):
            rows_of(name)
    with pytest.raises(FileNotFoundError, match="`test_data` is 'nowhere.csv', but there is no such file"):
        rows_of("data/reviews.csv", test_data="nowhere.csv")
    with pytest.raises(
        FileNotFoundError, match="`model` is 'data/model', but there is no such file or folder; .*holds"
    ):
        StartingPoint("data/model")
    # This could be an id as well, and no Hub is at hand.
    message = f"`model` is 'runs/model'. There is no such folder in {tmp_path}, and no model of that id"
    with pytest.raises(OSError, match=message):
        StartingPoint("runs/model")


def test_too_few_texts_to_hold_out(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\na,b\n")
    with pytest.raises(ValueError, match="1 rows with 1 different texts: too few to hold out 25%"):
        rows_of(tmp_path / "rows.csv")


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path, capsys):
    rows = [{"text": f"text {number}", "label": "yn"[number % 2]} for number in range(8)]
    write_csv(tmp_path / "data" / "train.csv", rows)
    write_csv(tmp_path / "data" / "validation.csv", [*rows[:2], {"text": "another", "label": "y"}])
    write_csv(tmp_path / "data" / "test.csv", [{"text": "a third", "label": "n"}])
    assert len(rows_of(tmp_path / "data")["validation"]) == 3
    assert capsys.readouterr().out == (
        "2 of 3 rows of the split validation are also trained on: their scores say little.\n"
    )
    write_csv(tmp_path / "data" / "test.csv", rows[3:5])
    with pytest.raises(ValueError, match="2 of 2 rows of the split test are also trained on: every model would look"):
        rows_of(tmp_path / "data")
    # Questions about a text that is trained on are others.
    settings = QuestionAnsweringSettings(model="", data="")
    assert settings.columns_compared(None) == ["context", "question"]


GOOD = [{"text": "a b", "label": "x"}, {"text": "c", "label": "y"}]
MULTI_HOT = [{"text": "a", "label": [1.0, 0.0, 0.0]}, {"text": "b", "label": [0.0, 1.0, 1.0]}]
ONE = {"text": "a", "label": "1"}
BAD_CLASSES = [
    ({}, {"train": [{"words": "a", "kind": "x"}]}, "Set `label_column` to one of the columns: words, kind"),
    (
        {"label_column": "lable"},
        {},
        "`label_column` is 'lable', but the data have no such column; did you mean 'label'",
    ),
    ({"text_columns": ["txt"]}, {}, "`text_columns` is 'txt', but the data have no such column; did you mean 'text'"),
    ({}, {"test": [{"text": "a", "klass": "x"}]}, "test, row 0 has no column 'label'; .*'klass'.* `score_test` to"),
    ({}, {"test": [{"text": "a", "label": None}]}, "'label' is None; it must be a label. .* Or set `score_test`"),
    ({}, {"test": [{"text": "a", "label": "\u200b"}]}, r"test, row 0: 'label' is '\\u200b'; it must be a label"),
    ({}, {"validation": [{"text": " ", "label": "x"}]}, "validation, row 0: 'text' is ' '; it must be a text"),
    ({}, {"validation": [{"text": "\u200b", "label": "x"}]}, r"validation, row 0: 'text' is '\\u200b'; it must be a"),
    ({}, {"train": [*GOOD, {"text": None, "label": "x"}]}, "train, row 2: 'text' is None"),
    ({}, {"train": GOOD[:1]}, "All training rows have one label, x: there is nothing to tell apart"),
    ({}, {"test": [{"text": "a", "label": "z"}]}, "test, row 0 has the label 'z', which no training row has"),
    ({}, {"test": [{"text": "a", "label": "z"}]}, "or leave it out. Or set `score_test` to false"),
    (
        {},
        {"train": [*GOOD, {"text": "d", "label": None}]},
        "row 2: 'label' is None; it must be a label. Add one, or drop the row.$",
    ),
    ({"problem": "regression"}, {}, "row 0: 'label' is 'x'; it must be a number"),
    ({"problem": "single_label"}, {}, "`problem` is 'single_label'; did you mean 'single_label_classification'"),
    ({"problem": "multi_label_classification"}, {}, "it must be a list of labels"),
    ({"label_column": "text", "text_columns": ["text"]}, {}, "which is also a text column"),
    (
        {},
        {"train": [row | {"label": "['x', 'y']"} for row in GOOD]},
        "lists that were written as text, such as .*'x', 'y'",
    ),
    ({}, {"train": MULTI_HOT, "validation": MULTI_HOT}, "lists of 3 numbers 0 and 1, one for each class"),
    (
        {"label_separator": ";"},
        {"train": MULTI_HOT, "validation": MULTI_HOT},
        "`label_separator` is ';', but 'label' holds lists of labels: leave it out",
    ),
    (
        {"problem": "regression"},
        {"train": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}], "validation": [ONE, ONE]},
        "All rows of the split validation have the label 1.0: no correlation",
    ),
    (
        {"problem": "regression"},
        {"train": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}], "validation": [ONE]},
        "All rows of the split validation have the label 1.0: no correlation",
    ),
]


@pytest.mark.parametrize("settings, tables, message", BAD_CLASSES)
def test_bad_rows_of_classes(settings, tables, message):
    with pytest.raises(ValueError, match=message):
        tables = {"train": GOOD, "validation": GOOD} | tables
        Classification(ClassificationSettings("model", "data", **settings), splits(**tables))


def test_labels_are_counted_before_training(capsys):
    """What is written in two ways is two classes."""
    rows = [{"text": f"text {number}", "label": "spam" if number < 5 else "ham"} for number in range(9)]
    settings = ClassificationSettings("model", "data")
    Classification(settings, splits(train=[*rows, rows[0] | {"label": "Spam"}], validation=rows))
    assert "3 labels in training: spam 5, ham 4, Spam 1\n" in capsys.readouterr().out
    many = [{"text": f"text {number}", "label": f"c{min(number, 29)}"} for number in range(40)]
    Classification(settings, splits(train=many, validation=many))
    printed = capsys.readouterr().out
    assert "30 labels in training: c29 11, c0 1, " in printed and "c8 1, ..., c19 1, " in printed
    TokenClassification(TokenClassificationSettings("model", "data"), splits(train=TAGGED, validation=TAGGED))
    assert re.search(r"\d tags in training: O \d+, ", capsys.readouterr().out)


def test_columns_are_guessed():
    rows = [{"label": 1, "premise": "a", "hypothesis": "b", "label_text": "x"}, GOOD[0] | {"label": 0}]
    rows[1] = rows[0] | {"label": 0, "label_text": "y"}
    task = Classification(ClassificationSettings("model", "data"), splits(train=rows, validation=rows))
    assert task.labels == ["x", "y"] and task.splits["train"].column_names == ["text", "text_pair", "label"]
    numbers = [{"words": "a", "label": str(number)} for number in (10, 9, 1)]
    task = Classification(ClassificationSettings("model", "data"), splits(train=numbers, validation=numbers))
    assert task.labels == ["1", "9", "10"] and task.splits["train"]["label"][:] == [2, 1, 0]


TAGGED = tagged_rows(4)
BAD_TAGS = [
    ({"validation": [{"tokens": ["a", "b"], "tags": ["O"]}]}, "row 0 has 2 words and 1 tags: a b"),
    ({"train": [*TAGGED, {"tokens": [], "tags": []}]}, "row 4: 'tokens' is .*must be a list of words, none empty"),
    ({"train": [*TAGGED, {"tokens": ["a", " "], "tags": ["O", "O"]}]}, "row 4: 'tokens' is .*none empty"),
    ({"train": [*TAGGED, {"tokens": ["a"], "tags": [None]}]}, "row 4: 'tags' is None; it must be a label"),
    ({"train": [{"tokens": ["a"], "tags": ["O"]}]}, "All training rows have one tag, O"),
    ({"test": [{"tokens": ["a"], "tags": ["B-NEW"]}]}, "test, row 0 has the tag 'B-NEW', which no training"),
    ({"train": [{"tokens": ["a"], "tags": "O"}]}, "'tags' is 'O'; it must be a list of labels"),
    ({"train": [{"token": ["a"], "tags": ["O"]}]}, "Set `word_column` to one of the columns: token, tags"),
]


@pytest.mark.parametrize("tables, message", BAD_TAGS)
def test_bad_rows_of_tags(tables, message):
    tables = {"train": TAGGED, "validation": TAGGED} | tables
    with pytest.raises(ValueError, match=message):
        TokenClassification(TokenClassificationSettings("model", "data"), splits(**tables))


def test_tags_with_names_of_the_hub(tmp_path):
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-A", "I-A"]))})
    table = Dataset.from_dict({"tokens": [["a", "b"], ["c"]], "ner_tags": [[1, 2], [0]]}, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    rows = list(read_rows(str(tmp_path / "rows.parquet")))
    task = TokenClassification(TokenClassificationSettings("model", "data"), {"train": rows, "validation": rows})
    assert task.labels == ["O", "B-A", "I-A"] and task.references("train") == [["B-A", "I-A"], ["O"]] and task.entities


NUMBERED = [{"tokens": ["a", "b"], "tags": [0, 1]}, {"tokens": ["c"], "tags": [2]}]
NAMES = ["O", "B-PER", "I-PER"]


def test_tags_that_are_bare_numbers_want_names():
    """They would be labels called 0 and 1, and names of entities would be scored by accuracy."""
    tables = splits(train=NUMBERED, validation=NUMBERED)
    settings = TokenClassificationSettings("model", "data", tag_names=NAMES)
    task = TokenClassification(settings, tables)
    assert task.labels == ["O", "B-PER", "I-PER"] and task.references("train") == [["O", "B-PER"], ["I-PER"]]
    assert task.entities
    message = r"train, row 0: 'tags' holds numbers, \[0, 1\], and nothing says .*Set `tag_names` to the names of 0, 1"
    with pytest.raises(ValueError, match=message):
        TokenClassification(TokenClassificationSettings("model", "data"), tables)


@pytest.mark.parametrize(
    "names, rows, message",
    [
        (
            ["O", "B-PER"],
            NUMBERED,
            "row 1 has the tag 2 in 'tags', but `tag_names` has only 2 names, from 0 on",
        ),
        (NAMES, TAGGED, "`tag_names` is given, but 'tags' has names already .train, row 0.: leave it out"),
        ([], [{"tokens": ["a"], "tags": [0.5]}], r"'tags' is \[0.5\]; tags must be texts, or numbers"),
        (["O", "B-A", "O"], NUMBERED, "`tag_names` has 'O'; it must name every tag once, and none may be empty"),
    ],
)
def test_names_that_do_not_fit_the_tags(names, rows, message):
    with pytest.raises(ValueError, match=message):
        settings = TokenClassificationSettings("model", "data", tag_names=names)
        TokenClassification(settings, splits(train=rows, validation=rows))


ASKED_ROWS = asked_rows(4)
BAD_ANSWERS = [
    ([{"text": "5", "answer_start": 9}], "the answer '5' should be at 9; it is at 2"),
    ([{"text": "7", "answer_start": 2}], "the answer '7' should be at 2; the text does not hold it"),
    ([{"text": "", "answer_start": 2}], "an answer is '' at 2; it must be a text at a number"),
    ([{"text": "5", "answer_start": "2"}], "an answer is '5' at '2'; it must be a text at a number"),
    ({"text": ["5", "5"], "answer_start": [2]}, "2 texts of answers and 1 positions; they must be equally many"),
    ("5", "`answers` is '5'; it must be as in SQuAD, a list such as .*, empty if there is none"),
    (["5"], r"`answers` is \['5'\]; it must be as in SQuAD"),
    ([{"text": "5"}], r"`answers` is \[\{'text': '5'\}\]; it must be as in SQuAD"),
    ({"text": "5", "answer_start": 2}, "`answers` is {'text': '5', 'answer_start': 2}; it must be as in SQuAD"),
    # Read as no answer once, so that a model learned to say so.
    ({"texts": ["5"]}, r"`answers` is {'texts': \['5'\]}; it must be as in SQuAD"),
]


def test_rows_are_named_by_their_number_in_the_file(tmp_path):
    """Also after rows were held out; 36 was said of row 40 once."""
    asked = [row | {"id": str(number)} for number, row in enumerate(asked_rows(41))]
    asked[40]["answers"] = [{"text": "no such", "answer_start": 1}]
    data = write_json_lines(tmp_path / "asked.jsonl", asked)
    with pytest.raises(ValueError, match="row 40: the answer 'no such'"):
        settings = QuestionAnsweringSettings(model="m", data=str(data))
        QuestionAnswering(settings, read_splits(settings, ASKED))
    tagged = tagged_rows(41)
    tagged[40]["tags"] = tagged[40]["tags"][1:]
    data = write_json_lines(tmp_path / "tagged.jsonl", tagged)
    with pytest.raises(ValueError, match="row 40 has . words and . tags"):
        settings = TokenClassificationSettings(model="m", data=str(data))
        TokenClassification(settings, read_splits(settings, READERS))


def test_files_of_questions_that_were_misread(tmp_path):
    (row,) = asked_rows(1)
    assert list(read_squad(write_json_lines(tmp_path / "one.jsonl", [row]))) == [row]
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "1"}\n{"id": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="latin.jsonl, line 2 is not UTF-8 .*: save the file as UTF-8"):
        list(read_squad(tmp_path / "latin.jsonl"))


@pytest.mark.parametrize("answers, message", BAD_ANSWERS)
def test_answers_outside_the_text(answers, message):
    bad = {"id": "x", "question": "n ?", "context": "a 5 b", "answers": answers}
    tables = splits(train=[bad, bad], validation=ASKED_ROWS)
    with pytest.raises(ValueError, match=f"train, row 0: {message}"):
        QuestionAnswering(QuestionAnsweringSettings("model", "data"), tables)


def test_questions_without_answers():
    none = [row | {"answers": []} for row in ASKED_ROWS]
    settings = QuestionAnsweringSettings("model", "data")
    # `{}` for none, in a file whose other rows have both keys.
    both = [{name: [one[name] for one in row["answers"]] for name in ("text", "answer_start")} for row in ASKED_ROWS]
    rows = [row | {"answers": answers} for row, answers in zip(ASKED_ROWS, both)]
    mixed = [*rows, ASKED_ROWS[0] | {"answers": {}}]
    assert len(QuestionAnswering(settings, splits(train=mixed, validation=mixed)).splits["train"]) == len(mixed)
    with pytest.raises(ValueError, match="validation, row 0 has no answer, but every training question has one"):
        QuestionAnswering(settings, splits(train=ASKED_ROWS, validation=none))
    empty = [row | {"context": ""} for row in ASKED_ROWS]
    with pytest.raises(ValueError, match="train, row 0: 'context' is ''"):
        QuestionAnswering(settings, splits(train=empty, validation=ASKED_ROWS))
    blank = [*ASKED_ROWS, ASKED_ROWS[0] | {"question": " "}]
    with pytest.raises(ValueError, match="validation, row 4: 'question' is ' '; it must be a text"):
        QuestionAnswering(settings, splits(train=ASKED_ROWS, validation=blank))
    with pytest.raises(ValueError, match="No training question has an answer: there is nothing to learn"):
        QuestionAnswering(settings, splits(train=none, validation=none))


def test_columns_of_questions():
    settings = QuestionAnsweringSettings("model", "data")
    short = [{"question": "a", "answers": []}]
    for split in ("train", "validation"):
        message = f"{split}, row 0 has no column 'context'; it has 'question', 'answers'."
        with pytest.raises(ValueError, match=message):
            QuestionAnswering(settings, splits(**{"train": ASKED_ROWS, "validation": ASKED_ROWS} | {split: short}))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "rows.json is empty: it holds no row"),
        ("[]", "rows.json is empty: it holds no row"),
        ('{"data": []}', "rows.json is empty: it holds no row"),
        ('[{"question": "a"}, "b"]', "rows.json, line 1 holds 'b'; a row must be an object"),
        ('{"data": [{}]}', r"rows.json is not in SQuAD's format: KeyError\('paragraphs'\)"),
        ("{", "rows.json, line 1 is not valid JSON"),
    ],
)
def test_files_without_questions(tmp_path, text, message):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "rows.json")


def test_answers_that_cannot_be_found_are_counted(tokenizer, capsys):
    """An answer over two windows, and one of more tokens than an answer may have."""
    rows = [
        {"id": name, "question": "a ?", "context": context, "answers": [{"text": answer, "answer_start": 0}]}
        for name, context, answer in (("x", "a b c", "a"), ("y", "a b c", "a b c"), ("z", "b " * 40, "b " * 39 + "b"))
    ]
    settings = QuestionAnsweringSettings("model", "data", stride=4, max_answer_length=2)
    task = QuestionAnswering(settings, splits(train=rows, validation=rows[:1]))
    encoded = task.encode(tokenizer, 16)
    assert capsys.readouterr().out.strip().splitlines() == [
        "train: of 3 answers, 1 are whole in no window and count as no answer (raise `stride`), and 1 are longer than "
        "`max_answer_length` and cannot be found."
    ]
    assert not any(last for row, last in zip(encoded["train"]["row"], encoded["train"]["end_positions"]) if row == 2)
    with pytest.raises(ValueError, match="`label_smoothing_factor` is 0.1; answers cannot be smoothed"):
        QuestionAnswering(settings, splits(train=rows, validation=rows), smoothing=0.1)


CONFIGS = {
    "classification": ClassificationSettings,
    "token_classification": TokenClassificationSettings,
    "question_answering": QuestionAnsweringSettings,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_settings_are_the_papers(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--config", f"configs/tasks/{name}.yaml", "--use_cpu", "true", "--bf16", "false"]
    settings, arguments = parse_config(CONFIGS[name], FineTuningArguments, args=flags)
    assert settings.model == "chandar-lab/NeoBERT" and arguments.output_dir == f"runs/{name}"
    # A point of the grid, and the defaults of the classes.
    grid = read_yaml("configs/glue/paper.yaml")
    assert arguments.learning_rate in grid["learning_rates"] and arguments.weight_decay in grid["weight_decays"]
    assert arguments.per_device_train_batch_size in grid["batch_sizes"]
    bare = FineTuningArguments("x", use_cpu=True, bf16=False)
    for key in ("learning_rate", "weight_decay", "per_device_train_batch_size", "warmup_steps", "layer_decay"):
        assert getattr(bare, key) == getattr(arguments, key)
