"""Tasks: the labels and empty texts of their rows, and rows and descriptions that are refused."""

from pathlib import Path

import pytest
import yaml

from neobert_hf.evaluation.glue.tasks import GlueTask, choose_tasks, load_task
from tests.helpers.glue_runs import TASKS
from tests.helpers.task_runs import write_json_lines


def task_of(folder: Path, **changes) -> GlueTask:
    values = {"source": str(folder), "texts": ["text"], "labels": ["no", "yes"], "metrics": ["accuracy"]}
    return GlueTask(name="own", **values | changes)


def write_own(folder: Path, train: list[dict], held_out: list[dict] | None = None) -> None:
    rows = {"train": train, "validation": held_out or [{"text": f"other {n}", "label": 1} for n in (1, 2)]}
    for split, found in rows.items():
        write_json_lines(folder / f"{split}.jsonl", found)


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
    ({"label": 2}, {}, "row 2 has the label '2'"),
    # Where classes are called by numbers, a number is a name.
    ({}, {"labels": ["1", "2"]}, "row 0 has the label '0'"),
    ({}, {"texts": ["sentence"]}, "no column 'sentence'.*`texts`"),
    ({}, {"train": "dev"}, "no split 'dev'.*train.jsonl"),
    ({"label": "x"}, {"labels": None, "metrics": ["pearson"]}, "row 2: 'label'"),
]


@pytest.mark.parametrize("change, task, message", BAD_ROWS)
def test_bad_rows_and_splits_are_refused_by_file_and_row(tmp_path, change, task, message):
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    write_own(tmp_path, [*rows, rows[0] | change])
    with pytest.raises(ValueError, match=f"Task own: .*{message}"):
        load_task(task_of(tmp_path, **task))


def test_as_many_texts_may_be_empty_as_the_task_says(tmp_path):
    """QQP has two empty questions, also in GLUE's own files."""
    write_own(tmp_path, [{"text": text, "label": 0} for text in ("a", "", "\u200b")])
    assert load_task(task_of(tmp_path, empty_texts=2))["train"]["text"][:] == ["a", "", "\u200b"]
    with pytest.raises(ValueError, match="Task own: .*train.jsonl, row 1 has an empty 'text'; 2 texts"):
        load_task(task_of(tmp_path, empty_texts=1))
    assert {name: task.empty_texts for name, task in TASKS.items() if task.empty_texts} == {"qqp": 2}


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
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task | change}))
    with pytest.raises(ValueError, match=f"(?s)tasks.yaml, task mine.*{name}"):
        choose_tasks(str(tmp_path / "tasks.yaml"), ["all"])
