"""Tasks: descriptions in YAML, texts and labels of their rows, and rows and descriptions that are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Value

from neobert_hf.evaluation.glue.tasks import GlueTask, choose_tasks, load_task, read_tasks, report_repeated_rows
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import TASKS, results_of
from tests.helpers.models import ROOT


RELEASED = read_tasks(str(ROOT / "configs" / "glue" / "released_tasks.yaml"))
SUPERGLUE = read_tasks(str(ROOT / "configs" / "glue" / "superglue.yaml"))
PAIR = {"premise": "It rains.", "hypothesis": "It is wet."}
# One row of each task of SuperGLUE, as on the Hub, and the text or pair that it becomes.
ROWS = {
    "allnli": (PAIR, ["It rains.", "It is wet."]),
    "boolq": ({"question": "is rain wet", "passage": "Rain is water."}, ["is rain wet", "Rain is water."]),
    "cb": (PAIR, ["It rains.", "It is wet."]),
    "rte": (PAIR, ["It rains.", "It is wet."]),
    "wic": (
        {"word": "bank", "sentence1": "A bank lends.", "sentence2": "On the {bank} of it.", "start1": 2},
        ["bank: A bank lends.", "On the {bank} of it."],
    ),
    "wsc": (
        {"text": "Ann saw Eve when she came.", "span1_index": 0, "span1_text": "Ann", "span2_text": "she"},
        ["Ann saw Eve when she came.", "she refers to Ann."],
    ),
    "copa": (
        {"premise": "It rained.", "choice1": "I got wet.", "choice2": "I got {dry}.", "question": "effect"},
        ["It rained. What is the effect?", "1: I got wet. 2: I got {dry}."],
    ),
    "multirc": (
        {"paragraph": "Rain fell.", "question": "What fell?", "answer": "rain"},
        ["What fell? Rain fell.", "rain"],
    ),
}


def rows_of(name: str) -> Dataset:
    row, labels = ROWS[name][0], SUPERGLUE[name].labels
    features = {key: Value("int32" if isinstance(value, int) else "string") for key, value in row.items()}
    rows = [row | {"label": number} for number in range(len(labels))] * 4
    return Dataset.from_list(rows, features=Features(features | {"label": ClassLabel(names=labels)}))


@pytest.fixture(scope="module")
def superglue_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("superglue")
    for name, task in SUPERGLUE.items():
        (folder / name).mkdir()
        for split in ("train", *task.validation):
            rows_of(name).to_parquet(folder / name / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("name", SUPERGLUE)
def test_columns_become_texts(superglue_dir, name):
    numbers = list(range(len(SUPERGLUE[name].labels))) * 4
    for split in load_task(SUPERGLUE[name], str(superglue_dir)).values():
        text, pair = ROWS[name][1]
        assert split[:] == {"text": [text] * len(numbers), "text_pair": [pair] * len(numbers), "label": numbers}


def test_every_task_of_superglue_runs(flags, superglue_dir, tmp_path):
    data = shutil.copytree(superglue_dir, tmp_path / "data")
    for name in SUPERGLUE:
        # Held-out rows must be others, by a space at least.
        rows = rows_of(name)
        column = rows.column_names[0]
        rows.map(lambda row, column=column: {column: f"{row[column]} "}).to_parquet(data / name / "train.parquet")
    changes = {"task": "all", "task_config": ROOT / "configs" / "glue" / "superglue.yaml", "data_dir": data}
    load_example("run_glue").main(flags(tmp_path / "run", **changes, published=None, max_steps=2, eval_steps=1))
    results = {result["task"]: result for result in results_of(tmp_path / "run").values()}
    assert {name: set(result["metrics"]) for name, result in results.items()} == {
        name: set(task.metrics) for name, task in SUPERGLUE.items()
    }
    assert results["cb"]["start"].startswith("allnli/")


NLI = Features(
    {
        "premise": Value("string"),
        "hypothesis": Value("string"),
        "label": ClassLabel(names=["entailment", "neutral", "contradiction"]),
    }
)


def write_nli(folder: Path, labels: list[int]) -> str:
    for name, held_out in (("snli", "validation"), ("allnli", "dev")):
        (folder / name).mkdir(exist_ok=True)
        rows = [{"premise": "" if label < 0 else "a", "hypothesis": "b", "label": label} for label in labels]
        for split in ("train", held_out):
            Dataset.from_list(rows, features=NLI).to_parquet(folder / name / f"{split}.parquet")
    return str(folder)


def test_rows_without_a_label_are_left_out_and_classes_are_merged(tmp_path, capsys):
    assert load_task(RELEASED["snli"], write_nli(tmp_path, [0, 2, -1, 1]))["train"]["label"][:] == [0, 2, 1]
    assert "1 rows have no label (-1)" in capsys.readouterr().out
    assert load_task(RELEASED["allnli"], write_nli(tmp_path, [0, 2, 1]))["dev"]["label"][:] == [0, 1, 1]
    # A missing label is not the last class.
    with pytest.raises(ValueError, match="row 1 "):
        load_task(RELEASED["allnli"], write_nli(tmp_path, [0, -1]))
    with pytest.raises(ValueError, match="snli.*no row"):
        load_task(RELEASED["snli"], write_nli(tmp_path, [-1]))


def task_of(folder: Path, **changes) -> GlueTask:
    values = {"source": str(folder), "texts": ["text"], "labels": ["no", "yes"], "metrics": ["accuracy"]}
    return GlueTask(name="own", **values | changes)


def write_own(folder: Path, train: list[dict], held_out: list[dict] | None = None) -> None:
    for split, rows in (("train", train), ("validation", held_out or train)):
        Dataset.from_list(rows).to_json(folder / f"{split}.jsonl")


@pytest.mark.parametrize(
    "found, names, numbers",
    [
        ([True, False], ["true", "false"], [0, 1]),
        ([True, False], ["True", "maybe", "False"], [0, 2]),
        ([True, False], ["no", "yes"], [1, 0]),
        ([True, False], ["0", "1"], [1, 0]),
        ([1, 2], ["1", "2", "3"], [0, 1]),
        (["1", "2"], ["bad", "fair", "good"], [1, 2]),
        (["bad", "good"], ["bad", "fair", "good"], [0, 2]),
        (["0", "1"], ["1", "2"], None),
        ([0, 3], ["bad", "fair", "good"], None),
        ([None, 0], ["bad", "fair", "good"], None),
        (["bad", "worse"], ["bad", "fair", "good"], None),
    ],
)
def test_a_label_is_the_class_of_its_name_or_place(tmp_path, found, names, numbers):
    write_own(tmp_path, [{"text": str(number), "label": label} for number, label in enumerate(found)])
    task = task_of(tmp_path, labels=names)
    if numbers is not None:
        assert load_task(task)["train"]["label"][:] == numbers
        return
    with pytest.raises(ValueError, match="Task own: .*train.jsonl, row [01] has the label"):
        load_task(task)


BAD_ROWS = [
    ({"text": None}, "train.jsonl, row 2 has an empty 'text'"),
    ({"text": "\u200b"}, "train.jsonl, row 2 has an empty 'text'"),
    ({"text": ["a"]}, "train.jsonl, row 2: 'text'"),
    ({"label": 2}, "train.jsonl, row 2 has the label 2"),
    ({"label": -1}, "train.jsonl, row 2 has the label -1"),
]


@pytest.mark.parametrize("change, message", BAD_ROWS)
def test_a_bad_row_is_refused_by_file_and_number(tmp_path, change, message):
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, rows[0] | change)))
    with pytest.raises(ValueError, match=message):
        load_task(task_of(tmp_path))


def test_bad_splits_are_refused_by_name(tmp_path):
    write_own(tmp_path, [{"text": "a", "label": 1}, {"text": "b", "label": 1}])
    for changes, message in (
        ({}, "'train' have the label yes"),
        ({"texts": ["sentence"]}, "no column 'sentence'"),
        ({"label": "class"}, "no column 'class'"),
        ({"train": "dev"}, "no split 'dev'.*train.jsonl"),
        ({"labels": None, "metrics": ["pearson"], "label_range": [2, 5]}, "row 0 has the label 1.0"),
        ({"labels": None, "metrics": ["pearson"]}, "'train' have the label 1.0"),
    ):
        with pytest.raises(ValueError, match=f"Task own: .*{message}"):
            load_task(task_of(tmp_path, **changes))


def test_qqp_has_two_empty_questions_and_no_more(tmp_path):
    """As in the real data."""
    row = {"question1": "How can I create an Android app?", "question2": "a", "label": 0}
    rows = [row, row | {"label": 1}, row | {"question2": ""}, row | {"question2": " "}]
    (tmp_path / "qqp").mkdir()
    for split in ("train", "validation"):
        Dataset.from_list(rows).to_parquet(tmp_path / "qqp" / f"{split}.parquet")
    assert load_task(TASKS["qqp"], str(tmp_path))["train"]["text_pair"][:] == ["a", "a", "", " "]
    Dataset.from_list([*rows, row | {"question1": "\t"}]).to_parquet(tmp_path / "qqp" / "validation.parquet")
    with pytest.raises(ValueError, match="validation.parquet, row 2 has an empty 'question2'; 3 texts"):
        load_task(TASKS["qqp"], str(tmp_path))
    assert {name for name, task in TASKS.items() if task.empty_texts} == {"qqp"}


def test_held_out_rows_that_are_trained_on_are_refused_or_counted(tmp_path, capsys):
    rows = [{"text": text, "label": number} for number, text in enumerate("ab")]
    write_own(tmp_path, rows)
    with pytest.raises(ValueError, match="2 of 2 rows of the split validation of own"):
        report_repeated_rows(task_of(tmp_path), load_task(task_of(tmp_path)))
    write_own(tmp_path, rows, [*rows, {"text": "c", "label": 1}])
    report_repeated_rows(task_of(tmp_path), load_task(task_of(tmp_path)))
    assert "2 of 3 rows of the split validation of own" in capsys.readouterr().out


BAD_TASKS = [
    ({"textz": ["a"]}, "textz.*texts"),
    ({"metrics": ["acuracy"]}, "acuracy.*accuracy"),
    ({"metrics": ["pearson"]}, "pearson"),
    ({"labels": None}, "accuracy"),
    ({"labels": ["a", "a"]}, "labels"),
    ({"labels": ["a", "b", "c"], "metrics": ["f1"]}, "macro_f1"),
    ({"texts": ["a", "b", "c"]}, "texts"),
    ({"texts": "a"}, "texts"),
    ({"transfer_from": "mnli"}, "mnli"),
]


@pytest.mark.parametrize("change, name", BAD_TASKS)
def test_bad_descriptions_are_refused_by_file_and_task(tmp_path, change, name):
    task = {"source": "a/b", "texts": ["sentence"], "labels": ["a", "b"], "metrics": ["accuracy"]}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"mine": task}))
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"extends": "base.yaml", "mine": change}))
    assert choose_tasks(str(tmp_path / "base.yaml"), ["all"])["mine"].source == "a/b"
    with pytest.raises(ValueError, match=f"(?s)tasks.yaml, task mine.*{name}"):
        read_tasks(str(tmp_path / "tasks.yaml"))


def test_a_text_of_a_column_that_is_not_there_is_refused(superglue_dir):
    task = replace(SUPERGLUE["wic"], texts=["{wrd}: {sentence1}", "sentence2"])
    with pytest.raises(ValueError, match="no column 'wrd'"):
        load_task(task, str(superglue_dir))
