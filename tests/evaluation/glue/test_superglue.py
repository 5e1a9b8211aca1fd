"""SuperGLUE as descriptions, on made rows with the columns and labels of the Hub's aps/super_glue."""

import shutil
from dataclasses import replace

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from neobert_hf.evaluation.glue.runs import order_tasks
from neobert_hf.evaluation.glue.tasks import load_task, read_tasks
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import results_of
from tests.helpers.models import ROOT


FILE = ROOT / "configs" / "glue" / "superglue.yaml"
TASKS = read_tasks(str(FILE))
PAIR = {"premise": "It rains.", "hypothesis": "It is wet."}
# One row of each task, without its number and label, and the text or pair that it becomes.
ROWS = {
    "allnli": (PAIR, ["It rains.", "It is wet."]),
    "boolq": ({"question": "is rain wet", "passage": "Rain is water."}, ["is rain wet", "Rain is water."]),
    "cb": (PAIR, ["It rains.", "It is wet."]),
    "rte": (PAIR, ["It rains.", "It is wet."]),
    "wic": (
        {
            "word": "bank",
            "sentence1": "A bank lends.",
            "sentence2": "On the {bank} of it.",
            **{"start1": 2, "start2": 7, "end1": 6, "end2": 12},
        },
        ["bank: A bank lends.", "On the {bank} of it."],
    ),
    "wsc": (
        {
            "text": "Ann saw Eve when she came.",
            **{"span1_index": 0, "span2_index": 4, "span1_text": "Ann", "span2_text": "she"},
        },
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
    row, _ = ROWS[name]
    labels = TASKS[name].labels
    features = {key: Value("int32" if isinstance(value, int) else "string") for key, value in row.items()}
    rows = [row | {"label": number, "idx": number} for number in range(len(labels))] * 4
    if name == "multirc":
        number = {"paragraph": 0, "question": 0, "answer": 0}
        features["idx"] = {key: Value("int32") for key in number}
        rows = [each | {"idx": number} for each in rows]
    else:
        features["idx"] = Value("int32")
    return Dataset.from_list(rows, features=Features(features | {"label": ClassLabel(names=labels)}))


@pytest.fixture(scope="module")
def superglue_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("superglue")
    for name, task in TASKS.items():
        (folder / name).mkdir()
        for split in ("train", *task.validation):
            rows_of(name).to_parquet(folder / name / f"{split}.parquet")
    return folder


def test_each_task_is_described_or_said_not_to_be():
    assert order_tasks(TASKS, list(TASKS))[0] == "allnli" and set(TASKS) == set(ROWS)
    assert {name for name, task in TASKS.items() if task.transfer_from} == {"boolq", "cb", "rte"}
    left_out = FILE.read_text().split("Tasks that are not included:")[1].split("allnli:")[0]
    assert all(f"# {name}" in left_out or f", {name}" in left_out for name in ("AX-b", "AX-g", "ReCoRD"))


@pytest.mark.parametrize("name", TASKS)
def test_columns_become_texts(superglue_dir, name):
    splits = load_task(TASKS[name], str(superglue_dir))
    numbers = list(range(len(TASKS[name].labels))) * 4
    for split in splits.values():
        text, pair = ROWS[name][1]
        assert split[:] == {"text": [text] * len(numbers), "text_pair": [pair] * len(numbers), "label": numbers}


BAD_TEXTS = [
    ("{wrd}: {sentence1}", "row 0 has no column 'wrd'; it has 'word', 'sentence1'"),
    ("{word: {sentence1", "has no column '{word: {sentence1'"),
]


@pytest.mark.parametrize("text, message", BAD_TEXTS)
def test_texts_of_columns_that_are_not_there_are_refused(superglue_dir, text, message):
    with pytest.raises(ValueError, match=message):
        load_task(replace(TASKS["wic"], texts=[text, "sentence2"]), str(superglue_dir))


def test_an_empty_column_makes_no_text(superglue_dir, tmp_path):
    (tmp_path / "wic").mkdir()
    for split in ("train", "validation"):
        rows = [row | {"word": " " if number == 2 else row["word"]} for number, row in enumerate(rows_of("wic"))]
        Dataset.from_list(rows).to_parquet(tmp_path / "wic" / f"{split}.parquet")
    with pytest.raises(ValueError, match="row 2 has an empty 'word'; 1 texts"):
        load_task(TASKS["wic"], str(tmp_path))


def test_every_task_runs(flags, superglue_dir, tmp_path):
    data = shutil.copytree(superglue_dir, tmp_path / "data")
    for name in TASKS:
        # Held-out rows must be others, by a space at least.
        rows = rows_of(name)
        column = rows.column_names[0]
        rows = rows.map(lambda row, column=column: {column: f"{row[column]} "})
        rows.to_parquet(data / name / "train.parquet")
    changes = {"task": "all", "task_config": FILE, "published": None, "data_dir": data}
    load_example("run_glue").main(flags(tmp_path / "run", **changes, max_steps=2, eval_steps=1))
    results = {result["task"]: result for result in results_of(tmp_path / "run").values()}
    assert set(results) == set(TASKS)
    for name, task in TASKS.items():
        assert set(results[name]["metrics"]) == set(task.metrics), name
    assert results["cb"]["settings"]["start"].startswith("allnli/")
