"""The recipes called from Python on tables in memory give what the command gives on files, and go on as it does."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from neobert_hf.tasks import answer, classify, regress, tag
from neobert_hf.training.fine_tuning import FineTuningTrainer
from neobert_hf.training.run import complete_checkpoints
from neobert_hf.training.trainer import Stopped
from tests.helpers.models import save_encoder
from tests.helpers.pretraining_runs import assert_same_weights, start
from tests.helpers.small_tokenizer import small_tokenizer, word_tokenizer
from tests.helpers.task_runs import SMALL, asked_rows, flags, numbered_rows, tagged_rows, text_rows, write_json_lines


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), small_tokenizer())


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def splits_of(rows: list[dict]) -> DatasetDict:
    return DatasetDict(train=Dataset.from_list(rows[4:]), validation=Dataset.from_list(rows[:4]))


TABLES = {
    "classify": (classify, text_rows(40), pd.DataFrame),
    "regress": (regress, numbered_rows(40), Dataset.from_list),
    "tag": (tag, tagged_rows(40), splits_of),
    "answer": (answer, asked_rows(40, none=0.3), list),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_memory_gives_the_bytes_that_its_file_gives(encoder, tmp_path, name):
    recipe, rows, table = TABLES[name]
    changes = {"max_steps": 4, "eval_steps": 2} | ({"stride": 4} if name == "answer" else {})
    held_out = {}
    if table is splits_of:
        held_out = {"validation_data": write_json_lines(tmp_path / "validation.jsonl", rows[:4])}
    file = write_json_lines(tmp_path / "rows.jsonl", rows[4:] if held_out else rows)
    by_command = recipe.main(flags(tmp_path / "file", encoder, file, **changes, **held_out))
    found = recipe(output_dir=tmp_path / "table", model=encoder, data=table(rows), **SMALL | changes)
    assert_same_weights(tmp_path / "file", tmp_path / "table")
    report = report_of(tmp_path / "table")
    assert report == report_of(tmp_path / "file")
    assert found.model == tmp_path / "table" / "model" and found.model.is_dir()
    assert found.scores == report["scores"] == by_command.scores and found.baseline == report["baselines"]


def test_ctrl_c_keeps_the_process_and_the_same_call_goes_on(encoder, tmp_path, monkeypatch):
    call = {"model": encoder, "data": text_rows(80)} | SMALL | {"eval_steps": 4}
    classify(output_dir=tmp_path / "whole", **call)
    compute_loss, calls = FineTuningTrainer.compute_loss, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) in (6, 13):
            os.kill(os.getpid(), signal.SIGINT)
        return compute_loss(*args, **kwargs)

    monkeypatch.setattr(FineTuningTrainer, "compute_loss", interrupted)
    for _ in range(2):
        with pytest.raises(Stopped, match="the same command goes on"):
            classify(output_dir=tmp_path / "run", **call)
    result = classify(output_dir=tmp_path / "run", **call)
    assert result.scores == report_of(tmp_path / "whole")["scores"] and len(calls) < 40
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def classify_in_a_process(settings: list[str]) -> None:
    classify(**json.loads(settings[0]), data=text_rows(80))


def test_killed_twice_the_same_call_ends_with_the_same_bits(encoder, tmp_path):
    call = {"model": str(encoder)} | SMALL | {"eval_steps": 2, "output_dir": str(tmp_path / "run")}
    classify(data=text_rows(80), **call | {"output_dir": tmp_path / "whole"})
    for step in (4, 10):
        process = start([json.dumps(call)], script=classify_in_a_process)
        while not any(folder.name == f"checkpoint-{step}" for folder in complete_checkpoints(tmp_path / "run")):
            process.check_running()
        process.kill()
    start([json.dumps(call)], script=classify_in_a_process).finish()
    assert_same_weights(tmp_path / "whole", tmp_path / "run")
    assert report_of(tmp_path / "whole") == report_of(tmp_path / "run")


@pytest.mark.parametrize("language", ["Hebrew", "NFD", "combining"])
def test_marks_that_have_no_piece_change_no_bit(tmp_path, language):
    """Tags and answers of right-to-left, NFD and combining text are those of the same text without marks."""
    letters = str.maketrans("abcd", "\u05d0\u05d1\u05d2\u05d3") if language == "Hebrew" else {}
    mark = {"Hebrew": "\u05b8\u05bc", "NFD": "\u0301", "combining": "\u094d\ufe0f\u00ad"}[language]

    def with_marks(word: str) -> str:
        begin = "\u200f" if language == "Hebrew" else ""
        return begin + "".join(letter + mark for letter in word)

    plain = [row | {"tokens": [word.translate(letters) for word in row["tokens"]]} for row in tagged_rows(40)]
    encoder = save_encoder(
        tmp_path / "encoder", word_tokenizer("abcdefghijklm\u05d0\u05d1\u05d2\u05d3?123456789", 60, 64)
    )
    for name, change in (("plain", str), ("marked", with_marks)):
        rows = [row | {"tokens": [change(word) for word in row["tokens"]]} for row in plain]
        tag(output_dir=tmp_path / "tags" / name, model=encoder, data=rows, **SMALL | {"max_steps": 10})
        asked = []
        for row in asked_rows(40, length=16):
            words, place = [change(word) for word in row["context"].split()], row["answers"][0]["answer_start"] // 2
            found = {"text": words[place], "answer_start": len(" ".join([*words[:place], ""]))}
            asked.append(row | {"context": " ".join(words), "answers": [found]})
        options = SMALL | {"max_steps": 10, "max_length": 16, "stride": 4}
        answer(output_dir=tmp_path / "answers" / name, model=encoder, data=asked, **options)
    for kind in ("tags", "answers"):
        assert_same_weights(tmp_path / kind / "plain", tmp_path / kind / "marked")
        of_plain, of_marked = (report_of(tmp_path / kind / name) for name in ("plain", "marked"))
        assert of_plain["scores"] == of_marked["scores"]


def test_cells_of_dictionaries_may_be_of_any_kind_of_python(encoder, tmp_path):
    labels = [("x", "y"), np.array(["x"]), ["y"]]
    rows = [{"text": f"text {row}", "label": labels[row % 3], "id": np.int64(row)} for row in range(30)]
    result = classify(output_dir=tmp_path, model=encoder, data=rows, **SMALL | {"max_steps": 1})
    assert "micro_f1" in result.scores["validation"]


def test_a_dictionary_of_tables_needs_one_for_training(encoder, tmp_path):
    with pytest.raises(ValueError, match="'train', only 'training'"):
        classify(model=encoder, data={"training": text_rows(9)}, output_dir=tmp_path / "run", use_cpu=True)
    assert not (tmp_path / "run").exists()
