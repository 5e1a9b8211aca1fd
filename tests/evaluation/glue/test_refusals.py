"""What examples/run_glue.py refuses before it trains: other settings, weights and data, and mistakes in all of them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Value

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.evaluation.glue.report import collect
from neobert_hf.evaluation.glue.tasks import GlueTask, load_task, read_tasks, report_repeated_rows
from neobert_hf.training.run_checkpoints import CheckpointError
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import GRID, TRAINING_ROWS, best_of, model_folder, save_encoder
from tests.helpers.models import ROOT


run_glue = load_example("run_glue")


def test_finished_runs_are_not_repeated_and_other_settings_are_refused(finished, flags, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "copy").rglob("*seed*.json")}
    # Nor for a setting that changes no weights.
    run_glue.main(flags(tmp_path / "copy", task="mnli rte stsb sst2", seeds="0 1", per_device_eval_batch_size=7))
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "copy").rglob("*seed*.json")}
    with pytest.raises(SettingsMismatch, match="(?s)other settings.*max_length: 32 there, 16 now"):
        run_glue.main(flags(tmp_path / "copy", max_length=16))
    # Also of a further seed: the report would take their mean.
    with pytest.raises(SettingsMismatch, match="(?s)sst2/bs8.*seed0.json.*schedule.max_steps: -1 there, 2 now"):
        run_glue.main(flags(tmp_path / "copy", seeds=7, max_steps=2))
    # And if two shards were started with different settings at the same time.
    file = next((tmp_path / "copy" / "small" / "sst2").glob("*seed1.json"))
    result = json.loads(file.read_text())
    file.write_text(json.dumps(result | {"settings": result["settings"] | {"max_length": 16}}))
    with pytest.raises(SettingsMismatch, match="(?s)seed1.json was made with other settings.*max_length: 16 there"):
        collect(tmp_path / "copy")


@pytest.mark.parametrize(
    "name, value", [("data_seed", 3), ("label_smoothing_factor", 0.1), ("neftune_noise_alpha", 5.0)]
)
def test_a_setting_that_changes_weights_does_not_give_the_score_of_others(finished, flags, name, value):
    with pytest.raises(SettingsMismatch, match=f"other settings:\n  {name}: None there, {value} now"):
        run_glue.main(flags(finished, **{name: value}))


def test_other_weights_or_data_in_the_same_place_are_refused(flags, data_dir, tokenizer, tmp_path):
    changes = {"model": save_encoder(tmp_path / "encoder", tokenizer), "max_steps": 2}
    changes["data_dir"] = edit(data_dir, tmp_path, lambda rows: rows)
    run_glue.main(flags(tmp_path / "run", **changes))
    file = changes["data_dir"] / "sst2" / "validation.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"label": 1', '"label": 0', 1))
    with pytest.raises(SettingsMismatch, match="(?s)other settings:\n  data.validation: .*there, .*now\nGive"):
        run_glue.main(flags(tmp_path / "run", **changes))
    file.write_text(text)
    # The tokenizer cuts texts earlier.
    file = changes["model"] / "tokenizer_config.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | {"model_max_length": 5}))
    with pytest.raises(SettingsMismatch, match="(?s)other settings:\n  model: .*there, .*now\nGive"):
        run_glue.main(flags(tmp_path / "run", **changes))
    file.write_text(text)
    save_encoder(changes["model"], tokenizer, seed=1)
    with pytest.raises(SettingsMismatch, match="(?s)other settings:\n  model: .*there, .*now\nGive"):
        run_glue.main(flags(tmp_path / "run", **changes))


def test_a_better_source_leaves_finished_runs_as_they_are(finished, flags, encoder, tokenizer, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    best = best_of(finished, "mnli")
    name = best["run"].replace(f"seed{best['seed']}", "seed2")
    (tmp_path / "copy" / "small" / f"{name}.json").write_text(json.dumps(best | {"run": name, "score": 1.0}))
    # It has no model, and is not asked for one.
    run_glue.main(flags(tmp_path / "copy", task="rte stsb", seeds="0 1"))
    with pytest.raises(CheckpointError, match="small/mnli holds 3 results but no model of the best"):
        run_glue.main(flags(tmp_path / "copy", task="rte", seeds="2"))
    with pytest.raises(SettingsMismatch, match="transfer: True there, False now"):
        run_glue.main(flags(tmp_path / "copy", task="rte", transfer=False))
    # Nor do two models share a name: the report would have one row for both, with an average.
    shutil.copytree(model_folder(finished, "mnli"), tmp_path / "copy" / "small" / name / "model")
    shutil.rmtree(tmp_path / "copy" / "small" / "rte")
    changed = save_encoder(tmp_path / "encoder", tokenizer, seed=1)
    with pytest.raises(SettingsMismatch, match="mnli/.*json was made with other settings:\n  model: "):
        run_glue.main(flags(tmp_path / "copy", task="rte", model=changed))


def edit(data_dir: Path, tmp_path: Path, change) -> Path:
    """A copy of SST-2 with other rows in its training split."""
    shutil.copytree(data_dir / "sst2", tmp_path / "data" / "sst2")
    file = tmp_path / "data" / "sst2" / "train.jsonl"
    changed = change([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return tmp_path / "data"


BAD_ROWS = [
    (
        lambda rows: [*rows, rows[0] | {"label": 2}],
        f"row {TRAINING_ROWS} has the label 2; the task expects 0 negative, 1 positive",
    ),
    (lambda rows: [*rows, rows[0] | {"label": -1}], f"row {TRAINING_ROWS} has the label -1"),
    (lambda rows: [*rows, rows[0] | {"label": None}], f"row {TRAINING_ROWS} has the label None"),
    (lambda rows: [row | {"label": "good"} for row in rows], "row 0 has the label 'good'"),
    (lambda rows: [*rows, rows[0] | {"sentence": None}], f"train.jsonl, row {TRAINING_ROWS} has an empty 'sentence'"),
    (lambda rows: [*rows, rows[0] | {"sentence": "\u200b"}], f"row {TRAINING_ROWS} has an empty 'sentence'"),
    (
        lambda rows: [*rows, rows[0] | {"sentence": " "}, rows[0] | {"sentence": ""}],
        f"row {TRAINING_ROWS} has an empty 'sentence'; 2 texts are empty, but only 0 may.*`empty_texts: 2`",
    ),
    (
        lambda rows: [row for row in rows if row["label"] == 1],
        f"all {TRAINING_ROWS // 2} rows of the split 'train', from row 0 on, have the same label, positive: there is",
    ),
    (lambda rows: [row | {"sentence": ["a"]} for row in rows], "row 0: 'sentence' holds list .*; it must be a text"),
    (
        lambda rows: [{"text": row["sentence"], "label": 0} for row in rows],
        "no column 'sentence'; it has 'text', 'label'",
    ),
    (lambda rows: [], "there is no row"),
]


@pytest.mark.parametrize("change, message", BAD_ROWS)
def test_bad_rows_are_refused_before_training(flags, data_dir, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", data_dir=edit(data_dir, tmp_path, change)))
    assert not (tmp_path / "run").exists()


def test_qqp_has_two_empty_questions_and_no_more(tmp_path):
    """As in the real data; and a regression with one value has nothing to learn either."""
    tasks = read_tasks(str(ROOT / "configs/glue/tasks.yaml"))
    assert {name: task.empty_texts for name, task in tasks.items() if task.empty_texts} == {"qqp": 2}
    row = {"question1": "How can I create an Android app?", "question2": "a", "label": 0}
    rows = [row, row | {"label": 1}, row | {"question2": ""}, row | {"question2": " "}]
    (tmp_path / "qqp").mkdir()
    for split in ("train", "validation"):
        Dataset.from_list(rows).to_parquet(tmp_path / "qqp" / f"{split}.parquet")
    assert load_task(tasks["qqp"], str(tmp_path))["train"]["text_pair"][:] == ["a", "a", "", " "]
    Dataset.from_list([*rows, row | {"question1": "\t"}]).to_parquet(tmp_path / "qqp" / "validation.parquet")
    with pytest.raises(
        ValueError, match="validation.parquet, row 2 has an empty 'question2'; 3 texts .* but only 2 may"
    ):
        load_task(tasks["qqp"], str(tmp_path))
    scored = {"sentence1": "a", "sentence2": "b", "label": 2.5}
    (tmp_path / "stsb").mkdir()
    for split in ("train", "validation"):
        Dataset.from_list([scored, scored]).to_parquet(tmp_path / "stsb" / f"{split}.parquet")
    with pytest.raises(ValueError, match="all 2 rows of the split 'train', from row 0 on, have the same label, 2.5"):
        load_task(tasks["stsb"], str(tmp_path))


def test_files_of_a_split_are_one_or_all_parts(tmp_path):
    """A copy that broke off was read as the whole, and so were old parts beside a new file."""
    # The folder's name is no pattern.
    (tmp_path := tmp_path / "[1]").mkdir()
    rows = Dataset.from_list([{"sentence": "a", "label": 0}, {"sentence": "b", "label": 1}])
    task = replace(read_tasks(str(ROOT / "configs/glue/tasks.yaml"))["sst2"], source=str(tmp_path), subset=None)
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / f"{split}-00000-of-00002.parquet")
    with pytest.raises(ValueError, match="Task sst2: train-00000-of-00002.parquet in .* Restore the missing"):
        load_task(task, None)
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / f"{split}-00001-of-00002.parquet")
    assert len(load_task(task, None)["train"]) == 4
    rows.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="train.parquet in .* are neither one file nor all parts of one"):
        load_task(task, None)
    with pytest.raises(ValueError, match="is local and has no subset 'v2': name the subset's folder"):
        load_task(replace(task, subset="v2"), None)


def test_missing_splits_and_other_label_maps_are_refused_before_training(flags, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    (tmp_path / "data" / "mnli" / "validation_mismatched.parquet").unlink()
    message = "there is no split 'validation_mismatched': expected .*dev_mismatched.tsv; found .*validation_matched.par"
    with pytest.raises(ValueError, match=message):
        # Of the second task, before the first is trained.
        run_glue.main(flags(tmp_path / "run", task="sst2 mnli", data_dir=tmp_path / "data"))
    features = Features(
        {"sentence1": Value("string"), "sentence2": Value("string"), "label": ClassLabel(names=["no", "yes"])}
    )
    rows = [{"sentence1": "a", "sentence2": "b", "label": 0}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "data" / "rte" / "validation.parquet")
    with pytest.raises(ValueError, match="row 0 has the label 'no'; the task expects 0 entailment, 1 not_entailment"):
        run_glue.main(flags(tmp_path / "run", task="rte", transfer=False, data_dir=tmp_path / "data"))
    Dataset.from_list([{"sentence1": "a", "sentence2": "b", "label": 5.1}]).to_parquet(
        tmp_path / "data" / "stsb" / "validation.parquet"
    )
    with pytest.raises(ValueError, match="row 0 has the label 5.1; the task expects numbers from 0 to 5"):
        run_glue.main(flags(tmp_path / "run", task="stsb", transfer=False, data_dir=tmp_path / "data"))
    Dataset.from_list([{"sentence1": text, "sentence2": "b", "label": 2.5} for text in "ac"]).to_parquet(
        tmp_path / "data" / "stsb" / "validation.parquet"
    )
    with pytest.raises(ValueError, match="all 2 rows of the split 'validation', from row 0 on, have the same label"):
        run_glue.main(flags(tmp_path / "run", task="stsb", transfer=False, data_dir=tmp_path / "data"))
    assert not (tmp_path / "run").exists()


def test_held_out_rows_that_are_trained_on_are_refused_or_counted(tmp_path, capsys):
    rows = [{"sentence": text, "label": number} for number, text in enumerate("ab")]
    for split in ("train", "validation"):
        Dataset.from_list(rows).to_parquet(tmp_path / f"{split}.parquet")
    names = {"source": str(tmp_path), "texts": ["sentence"], "metrics": ["accuracy"], "labels": ["no", "yes"]}
    task = GlueTask(name="own", **names)
    with pytest.raises(ValueError, match="2 of 2 rows of the split validation of own are also trained on: every model"):
        report_repeated_rows(task, load_task(task))
    Dataset.from_list([*rows, {"sentence": "c", "label": 1}]).to_parquet(tmp_path / "validation.parquet")
    report_repeated_rows(task, load_task(task))
    assert "2 of 3 rows of the split validation of own are also trained on: their scores" in capsys.readouterr().out


def own_task(folder: Path, found: list, names: list[str]) -> GlueTask:
    """A task with a row for each label that is found, and these names of the classes."""
    for split in ("train", "validation"):
        rows = [{"sentence": f"{split} {number}", "label": label} for number, label in enumerate(found)]
        Dataset.from_list(rows).to_json(folder / f"{split}.jsonl")
    return GlueTask(name="own", source=str(folder), texts=["sentence"], metrics=["accuracy"], labels=names)


def test_a_boolean_is_the_class_that_is_called_like_it(tmp_path):
    """True is also the number 1 to Python, whatever the class of that number is called."""
    task = own_task(tmp_path, [True, False], ["true", "false"])
    for names, numbers in (
        (["true", "false"], [0, 1]),
        (["false", "true"], [1, 0]),
        (["True", "maybe", "False"], [0, 2]),
        (["no", "yes"], [1, 0]),
        (["0", "1"], [1, 0]),
        (["wrong", "true"], [1, 0]),
    ):
        assert load_task(replace(task, labels=names))["train"]["label"][:] == numbers, names
    for names, message in (
        (["1", "0"], "label True; the task expects 0 1, 1 0"),
        (["true", "wrong"], "have the same label, true"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task(replace(task, labels=names))


def test_a_number_is_the_class_that_is_called_by_it(tmp_path):
    """Or else its place, if no class is called by a number."""
    for found in ([1, 2], ["1", "2"]):
        task = own_task(tmp_path, found, ["1", "2", "3", "4", "5"])
        assert load_task(task)["validation"]["label"][:] == [0, 1]
        assert load_task(replace(task, labels=["bad", "fair", "good"]))["validation"]["label"][:] == [1, 2]


def test_digits_that_no_class_is_called_by_are_refused(tmp_path):
    task = own_task(tmp_path, ["0", "1", "2"], ["1", "2", "3"])
    with pytest.raises(ValueError, match="row 0 has the label '0'; the task expects 0 1, 1 2, 2 3"):
        load_task(task)
    assert load_task(replace(task, labels=["bad", "fair", "good"]))["train"]["label"][:] == [0, 1, 2]


BAD_FLAGS = [
    ({"task": "mnl"}, "no task 'mnl'; did you mean 'mnli'"),
    ({"task": "mnli sst2 sst"}, "no task 'sst'; did you mean 'sst2'"),
    ({"learning_rate": None}, "no hyperparameters for sst2 in None: add them, or give"),
    ({"grid": True, "batch_sizes": "8", "learning_rates": "1e-5"}, "'batch_size' is set"),
    (GRID | {"weight_decays": None}, "one of them is empty"),
    ({"seed": 3}, "`seed` is 3, but runs take theirs from `seeds`: use --seeds 3"),
    ({"shard": "9/8"}, "k from 1 to n, such as 3/8"),
    ({"label_smoothing_factor": 0.1, "task": "sst2 stsb"}, "is 0.1, but the labels of stsb are numbers"),
    ({"ignore_data_skip": True}, "`ignore_data_skip` is True; this recipe needs False"),
    ({"eval_steps": 0.5}, "`eval_steps` is 0.5; it must be a whole number of steps"),
    ({"greater_is_better": False}, "`greater_is_better` is False; this recipe needs True"),
    ({"eval_strategy": "epoch"}, "`eval_strategy` is 'epoch', but this recipe evaluates, saves and logs every"),
    ({"eval_strategy": "steps", "eval_steps": None}, "`eval_strategy` is 'steps' without `eval_steps`"),
    ({"save_strategy": "no"}, "`save_strategy` is 'no'"),
    ({"save_steps": 7}, "`save_steps` is 7.0, but this recipe evaluates, saves and logs at the same steps"),
    ({"eval_delay": 20}, "`eval_delay` is 20.0; this recipe needs 0"),
    ({"dataloader_drop_last": True}, "`dataloader_drop_last` is True; this recipe needs False"),
    ({"name": "./"}, "give the model a `name`"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "`load_best_model_at_end` is True"),
    ({"lerning_rate": 1}, "Unknown argument '--lerning_rate'"),
]


@pytest.mark.parametrize("change, message", BAD_FLAGS)
def test_bad_settings_are_refused_before_training(flags, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", **change))
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_file_without_seeds_is_refused(flags, tmp_path):
    (tmp_path / "none.yaml").write_text("seeds: []\n")
    with pytest.raises(ValueError, match="`seeds` is empty"):
        run_glue.main(flags(tmp_path / "run", config=tmp_path / "none.yaml"))


BAD_TASKS = [
    ({"textz": ["a"]}, "the unknown key 'textz'; did you mean 'texts'"),
    ({"metrics": ["acuracy"]}, "'acuracy' is not a metric of a classification; did you mean 'accuracy'"),
    ({"metrics": ["pearson"]}, "'pearson' is not a metric of a classification"),
    ({"labels": None}, "'accuracy' is not a metric of a regression"),
    ({"labels": ["a", "a"]}, "two or more different names"),
    ({"labels": ["a", "b", "c"], "metrics": ["f1"]}, "use 'macro_f1'"),
    ({"texts": ["a", "b", "c"]}, "one or two text columns"),
    ({"texts": "a"}, "texts"),
    ({"transfer_from": "mnli"}, "starts from 'mnli', which is not a task of this file"),
    ({"transfer_from": "mine"}, "mine.* start from each other"),
    ({"label_range": [0, 1]}, "`label_range` is for a regression"),
]


@pytest.mark.parametrize("change, message", BAD_TASKS)
def test_bad_task_definitions_are_refused(flags, data_dir, tmp_path, change, message):
    task = {"source": str(data_dir / "sst2"), "texts": ["sentence"], "labels": ["a", "b"], "metrics": ["accuracy"]}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task | change}))
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", task="mine", task_config=tmp_path / "tasks.yaml", data_dir=None))
