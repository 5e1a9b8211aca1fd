"""Formats of the trade: what annotation tools and treebanks write is read as it is meant."""

import json

import pytest

from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.token_classification import TokenClassification, TokenClassificationSettings
from neobert_hf.tasks.words import read_conll, read_conllu, split_words
from tests.helpers.task_runs import task_of_file, task_of_rows, text_rows, write_csv, write_json_lines


def tags_of(rows, **settings) -> tuple[list, list]:
    task = task_of_rows("tags", settings, train=rows, validation=[{**rows[0]}]) if isinstance(rows, list) else rows
    return task.tables["train"]["words"][:], task.tables["train"]["tags"][:]


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            "# sentence 1\nEU B-ORG\nrejects O\n\n# sentence 2\n# text = # it\n# O\nit O\n",
            [("EU rejects", "B-ORG O"), ("# it", "O O")],
        ),
        (
            "#\thttp://de [2009]\n1\tHamm\tB-LOC\tO\n2\tist\tO\tO\n\n# next\n1\tda\tO\tO\n",
            [("Hamm ist", "O O"), ("da", "O")],
        ),
        ("1 CD O\nmay MD O\n\n2 CD O\n", [("1 may", "O O"), ("2", "O")]),
    ],
    ids=["comments and the word #", "numbered words", "words that are numbers"],
)
def test_comments_and_numbers_of_words_are_no_words(tmp_path, content, expected):
    (tmp_path / "a.conll").write_text(content)
    found = [(" ".join(row["tokens"]), " ".join(row["tags"])) for row in read_conll(tmp_path / "a.conll")]
    assert found == expected


CONLLU = """# sent_id = 1
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\tV\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tP\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\tA\t_\t5\tcase\t_\t_
4\tel\tel\tDET\tD\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\tN\t_\t1\tobl\t_\tSpaceAfter=No
5.1\tvamos\tir\tVERB\tV\t_\t_\t_\t_\t_

"""


def test_the_words_of_a_treebank_are_those_that_have_tags(tmp_path):
    (tmp_path / "train.conllu").write_text(CONLLU + CONLLU.replace("mar\tmar", "río\trío"))
    # The same file is often called so, too.
    (tmp_path / "a.conll").write_text(CONLLU)
    (row,) = read_conll(tmp_path / "a.conll")
    assert row["form"] == ["vamos", "nos", "a", "el", "mar"] and row == next(read_conllu(tmp_path / "train.conllu"))
    words, tags = tags_of(task_of_file("tags", tmp_path / "train.conllu", validation_share=0.5))
    assert {tuple(each[:4]) for each in tags} == {("VERB", "PRON", "ADP", "DET")}
    xpos = task_of_file("tags", tmp_path / "train.conllu", validation_share=0.5, tag_column="xpos")
    assert xpos.labels == ["A", "D", "N", "P", "V"]
    (tmp_path / "train.conllu").write_text("1\tvamos\tVERB\n")
    with pytest.raises(ValueError, match="train.conllu, row 0: line 1"):
        task_of_file("tags", tmp_path / "train.conllu")


def test_one_word_a_row(tmp_path):
    rows = [
        {"Sentence #": "Sentence: 1", "Word": "EU", "POS": "NNP", "Tag": "B-org"},
        {"Sentence #": "", "Word": "rejects", "POS": "VBZ", "Tag": "O"},
        {"Sentence #": "Sentence: 2", "Word": "Peter", "POS": "NNP", "Tag": "B-per"},
        {"Sentence #": "Sentence: 3", "Word": "He", "POS": "NNP", "Tag": "O"},
        {"Sentence #": "Sentence: 3", "Word": "ran", "POS": "NNP", "Tag": "O"},
    ]
    task = task_of_rows("tags", {"tag_column": "Tag"}, train=rows, validation=rows[3:4])
    assert task.tables["train"]["words"][:] == [["EU", "rejects"], ["Peter"], ["He", "ran"]]
    assert task.tables["train"]["tags"][:] == [["B-org", "O"], ["B-per"], ["O", "O"]] and task.entities
    with pytest.raises(ValueError, match="`sentence_column`.* 'Word'"):
        task_of_rows(
            "tags", {"tag_column": "Tag"}, train=[{name: row[name] for name in ("Word", "Tag")} for row in rows]
        )


TEXT = "Ann Lee, of U.S. aid-groups,\nsleeps."
SPANS = [(0, 7, "PER"), (12, 16, "ORG"), (21, 27, "ORG")]
FORMS = {
    "doccano": {"id": 1, "text": TEXT, "label": [list(span) for span in SPANS], "Comments": []},
    "doccano with relations": {
        "text": TEXT,
        "entities": [{"id": 7, "label": label, "start_offset": a, "end_offset": b} for a, b, label in SPANS],
        "relations": [],
    },
    "prodigy": {"text": TEXT, "spans": [{"start": a, "end": b, "label": label} for a, b, label in SPANS]},
    "label studio": {
        "id": 1,
        "data": {"text": TEXT},
        "annotations": [
            {"was_cancelled": True, "result": []},
            {
                "result": [
                    {"type": "labels", "value": {"start": a, "end": b, "text": TEXT[a:b], "labels": [label]}}
                    for a, b, label in SPANS
                ]
            },
        ],
    },
    "label studio, small": {
        "text": TEXT,
        "label": [{"start": a, "end": b, "text": TEXT[a:b], "labels": [label]} for a, b, label in SPANS],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_spans_of_annotation_tools(tmp_path, form):
    rows = [FORMS[form], json.loads(json.dumps(FORMS[form]).replace("Ann", "Eve"))]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    task = task_of_file("tags", tmp_path / "rows.json", validation_share=0.5)
    (words,), (tags,) = task.tables["train"]["words"][:], task.tables["train"]["tags"][:]
    assert words[1:] == ["Lee", ",", "of", "U", ".", "S", ".", "aid", "-", "groups", ",", "sleeps", "."]
    expected = "B-PER I-PER O O B-ORG I-ORG I-ORG I-ORG O O B-ORG O O O".split()
    assert tags == expected and task.entities
    # As it is read by json.
    in_memory = TokenClassificationSettings("model", rows, validation_share=0.5)
    assert TokenClassification(in_memory, read_splits(in_memory)).tables["train"]["tags"][:] == [expected]


@pytest.mark.parametrize(
    "spans, message",
    [
        ([[0, 7, "PER"], [4, 7, "ORG"]], "'PER' and 'ORG' overlap at 4"),
        ([[0, 99, "PER"]], "the span"),
        ([[0, 3]], "such as"),
        # Label Studio counts an emoji as two characters.
        ([{"start": 1, "end": 4, "text": "Ann", "labels": ["PER"]}], "the span"),
    ],
)
def test_spans_that_are_wrong_are_named(spans, message):
    with pytest.raises(ValueError, match=f"train, row 1: .*{message}"):
        task_of_rows("tags", train=[FORMS["doccano"], {"text": TEXT, "label": spans}], validation=[FORMS["doccano"]])


def test_marks_stay_with_their_letters():
    text = "Besalu\u0301 \u05e7\u05b8\u05d3\u05b5 नमस्ते can't"
    assert [text[slice(*place)] for place in split_words(text)] == [*text.split()[:3], "can", "'", "t"]


@pytest.mark.parametrize(
    "names",
    [
        ["B_PER", "I_PER", "B_LOC", "O"],
        ["PER-B", "PER-I", "LOC-B", "O"],
        ["b-PER", "i-PER", "b-LOC", "o"],
        ["PER_b", "PER_i", "LOC_b", "O"],
    ],
    ids=" ".join,
)
def test_tags_in_another_spelling_are_scored_as_entities(names, capsys):
    rows = [{"tokens": ["a", "b", "c", "d"], "tags": names}, {"tokens": ["e"], "tags": names[-1:]}]
    task = task_of_rows("tags", train=rows, validation=[{"tokens": ["f"], "tags": names[:1]}])
    assert task.labels == ["B-LOC", "B-PER", "I-PER", "O"] and task.entities
    assert f"{names[0]} as B-PER" in capsys.readouterr().out


@pytest.mark.parametrize("names", [["PER", "LOC", "O"], ["B", "I", "O"], ["NOUN", "VERB", "X"]])
def test_other_tags_stay_as_they_are(names, capsys):
    rows = [{"tokens": ["a", "b", "c"], "tags": names}]
    task = task_of_rows("tags", train=rows, validation=[{"tokens": ["f"], "tags": names[:1]}])
    assert task.labels == sorted(names) and not task.entities
    assert ("no tags such as B-PER" in capsys.readouterr().out) == ("O" in names)


def test_classes_of_label_studio(tmp_path):
    rows = [
        {
            "id": number,
            "data": {"text": row["description"] + str(number), "source": "mail"},
            "annotations": [{"result": [{"type": "choices", "value": {"choices": [row["section"]]}}]}],
        }
        for number, row in enumerate(text_rows(20))
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    task = task_of_file("classes", tmp_path / "rows.json")
    assert task.labels == ["mail", "net"] and not task.several
    rows[3]["annotations"][0]["result"][0]["value"]["choices"] = ["mail", "net"]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    assert task_of_file("classes", tmp_path / "rows.jsonl").several
    rows[4]["annotations"] = []
    write_json_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="rows.jsonl, row 4 has no annotation"):
        task_of_file("classes", tmp_path / "rows.jsonl")


def test_a_column_for_each_class(tmp_path):
    rows = [
        {"id": str(row), "comment_text": f"text {row}", "toxic": str(row % 2), "threat": str(int(row % 3 == 0))}
        for row in range(20)
    ]
    data = write_csv(tmp_path / "rows.csv", rows)
    with pytest.raises(ValueError, match="`label_columns` to those of .*toxic, threat"):
        task_of_file("classes", data)
    settings = {"text_columns": ["comment_text"], "label_columns": ["toxic", "threat"]}
    task = task_of_file("classes", data, **settings)
    table = task.tables["train"]
    assert task.several and task.labels == ["threat", "toxic"]
    for text, names in zip(table["text"], table["label"]):
        row = int(text.split()[1])
        assert names == ["toxic"] * (row % 2) + ["threat"] * (row % 3 == 0)
    with pytest.raises(ValueError, match="rows.csv, row 2 has 2 in a column of `label_columns`"):
        task_of_file("classes", data, **settings | {"label_columns": ["id"]})


def test_lists_of_one_label_are_classes_and_that_is_said(capsys):
    rows = [{"text": f"text {row}", "label": ["yn"[row % 2]]} for row in range(20)]
    task = task_of_rows("classes", train=rows)
    assert not task.several and task.problem == "single_label_classification"
    assert "the lists in 'label' have one label each" in capsys.readouterr().out
    # If one held-out row has two, a row can have several.
    both = [{"text": "another", "label": ["y", "n"]}]
    assert task_of_rows("classes", train=rows, validation=both).several


def test_files_and_folders_with_the_letters_of_patterns(tmp_path):
    for place in ("reviews [1].csv", "data [old]/train.csv"):
        write_csv(tmp_path / place, text_rows(20))
        task = task_of_file("classes", tmp_path / place if "/" not in place else tmp_path / "data [old]")
        assert sum(len(table) for table in task.tables.values()) == 20
    validation = write_csv(tmp_path / "held [2].csv", [row | {"description": f"{row['id']} x"} for row in text_rows(5)])
    task = task_of_file("classes", tmp_path / "reviews [1].csv", validation_data=str(validation))
    assert len(task.tables["validation"]) == 5


def test_a_split_whose_columns_have_other_names(tmp_path):
    write_csv(tmp_path / "train.csv", [{"text": f"text {row}", "label": "yn"[row % 2]} for row in range(20)])
    write_csv(tmp_path / "dev.csv", [{"sentence": "a", "label": "y"}])
    with pytest.raises(
        ValueError, match="dev.csv, row 0 has no column 'text', which is the `text_columns`.* 'sentence'"
    ):
        task_of_file("classes", tmp_path)
