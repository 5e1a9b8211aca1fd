"""Tasks: descriptions in YAML, texts and labels of their rows, and rows and descriptions that are refused."""

import json
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Value

from neobert_hf.evaluation.glue.tasks import GlueTask, choose_tasks, load_task
from tests.helpers.glue_runs import TASKS


def task_of(folder: Path, **changes) -> GlueTask:
    values = {"source": str(folder), "texts": ["text"], "labels": ["no", "yes"], "metrics": ["accuracy"]}
    return GlueTask(name="own", **values | changes)


def write_own(folder: Path, train: list[dict], held_out: list[dict] | None = None) -> None:
    rows = {"train": train, "validation": held_out or [{"text": f"other {n}", "label": 1} for n in (1, 2)]}
    for split, found in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def test_columns_become_texts_and_a_class_the_number_of_its_name(tmp_path):
    """As on the Hub, where a class has a number and a name; numbers in other files are the same."""
    pair = {"sentence1": "It rains.", "sentence2": "It is wet."}
    features = {"sentence1": Value("string"), "sentence2": Value("string")}
    # In another order than in the task: the name decides.
    features |= {"label": ClassLabel(names=["not_entailment", "entailment"])}
    (tmp_path / "rte").mkdir()
    rows = Dataset.from_list([pair | {"label": 1}, pair | {"label": 0}], features=Features(features))
    rows.to_parquet(tmp_path / "rte" / "train.parquet")
    (tmp_path / "rte" / "validation.jsonl").write_text(json.dumps({"sentence1": "a", "sentence2": "b", "label": 1}))
    splits = load_task(TASKS["rte"], str(tmp_path))
    assert splits["train"][:] == {"text": ["It rains."] * 2, "text_pair": ["It is wet."] * 2, "label": [0, 1]}
    assert splits["validation"][0] == {"text": "a", "text_pair": "b", "label": 1}


@pytest.mark.parametrize(
    "found, names, numbers",
    [
        ([1, 2], ["1", "2", "3"], [0, 1]),
        (["1", "2"], ["bad", "fair", "good"], [1, 2]),
        (["bad", "good"], ["bad", "fair", "good"], [0, 2]),
    ],
)
def test_a_label_is_the_class_of_its_name_or_number(tmp_path, found, names, numbers):
    rows = [{"text": f"row {label}", "label": label} for label in found]
    write_own(tmp_path, rows, [{"text": "x", "label": found[0]}])
    assert load_task(task_of(tmp_path, labels=names))["train"]["label"][:] == numbers


BAD_ROWS = [
    ({"text": "\u200b"}, {}, "row 2 has an empty 'text'"),
    ({"label": 2}, {}, "row 2 has the label '2'"),
    # Where classes are called by numbers, a number is a name.
    ({}, {"labels": ["1", "2"]}, "row 0 has the label '0'"),
    ({}, {"texts": ["sentence"]}, "no column 'sentence'"),
    ({}, {"train": "dev"}, "no split 'dev'.*train.jsonl"),
    ({"label": "x"}, {"labels": None, "metrics": ["pearson"]}, "row 2: 'label'"),
]


@pytest.mark.parametrize("change, task, message", BAD_ROWS)
def test_bad_rows_and_splits_are_refused_by_file_and_row(tmp_path, change, task, message):
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    write_own(tmp_path, [*rows, rows[0] | change])
    with pytest.raises(ValueError, match=f"Task own: .*{message}"):
        load_task(task_of(tmp_path, **task))


def test_qqp_has_two_empty_questions_and_no_more(tmp_path):
    """As in the real data."""
    row = {"question1": "How can I create an Android app?", "question2": "a", "label": 0}
    rows = [row, row | {"question2": ""}, row | {"question2": " "}]
    (tmp_path / "qqp").mkdir()
    Dataset.from_list([row | {"question1": "Why?"}]).to_parquet(tmp_path / "qqp" / "validation.parquet")
    Dataset.from_list(rows).to_parquet(tmp_path / "qqp" / "train.parquet")
    assert load_task(TASKS["qqp"], str(tmp_path))["train"]["text_pair"][:] == ["a", "", " "]
    Dataset.from_list([*rows, row | {"question1": "\t"}]).to_parquet(tmp_path / "qqp" / "train.parquet")
    with pytest.raises(ValueError, match="train.parquet, row 1 has an empty 'question2'; 3 texts"):
        load_task(TASKS["qqp"], str(tmp_path))
    assert {name for name, task in TASKS.items() if task.empty_texts} == {"qqp"}


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path, capsys):
    rows = [{"text": text, "label": number} for number, text in enumerate("ab")]
    write_own(tmp_path, rows, [*rows, {"text": "c", "label": 1}])
    load_task(task_of(tmp_path))
    assert "2 of 3 rows of the split validation of own" in capsys.readouterr().out


BAD_TASKS = [
    ({"textz": ["a"]}, "textz.*texts"),
    ({"metrics": ["acuracy"]}, "acuracy.*accuracy"),
    ({"labels": None}, "accuracy"),
    ({"texts": "a"}, "texts"),
    ({"transfer_from": "mnli"}, "mnli"),
]


@pytest.mark.parametrize("change, name", BAD_TASKS)
def test_bad_descriptions_are_refused_by_file_and_task(tmp_path, change, name):
    task = {"source": "a/b", "texts": ["sentence"], "labels": ["a", "b"], "metrics": ["accuracy"]}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task}))
    assert choose_tasks(str(tmp_path / "tasks.yaml"), ["all"])["mine"].source == "a/b"
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task | change}))
    with pytest.raises(ValueError, match=f"(?s)tasks.yaml, task mine.*{name}"):
        choose_tasks(str(tmp_path / "tasks.yaml"), ["all"])
