"""examples/run_glue.py on small data in GLUE's form: what it trains and reports, and what it does not do again."""

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score
from transformers import AutoConfig

from neobert_hf.common.fingerprints import SettingsMismatch, model_fingerprint
from neobert_hf.evaluation.glue import recipe
from neobert_hf.evaluation.glue.recipe import GlueSettings, load_classifier
from neobert_hf.evaluation.glue.report import read_published, summarize, write_report
from neobert_hf.training.run_checkpoints import CheckpointError
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import GRID, TASKS, best_of, model_folder, predictions_of, results_of, save_encoder
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder
from tests.helpers.pretraining_runs import interrupted_behind


run_glue = load_example("run_glue")


def test_tasks_learn_and_results_are_those_of_the_saved_models(finished, data_dir):
    results = results_of(finished)
    chance = {"mnli": 0.34, "sst2": 0.5, "stsb": 0.0}
    for name, result in results.items():
        assert result["score"] > chance[result["task"]] + 0.25, name
        assert result["score"] == max(entry["score"] for entry in result["evaluations"])
        steps = [entry["step"] for entry in result["evaluations"]]
        assert steps == list(range(10, 2 * (200 if result["task"] == "mnli" else 160) // 8 + 1, 10))
    best = {task: best_of(finished, task)["metrics"] for task in ("mnli", "stsb")}
    accuracies = []
    for split in ("validation_matched", "validation_mismatched"):
        predicted, labels = predictions_of(model_folder(finished, "mnli"), data_dir, "mnli", split)
        accuracies.append(accuracy_score(labels, predicted))
        assert best["mnli"][f"{split}_accuracy"] == accuracies[-1]
    assert best_of(finished, "mnli")["score"] == statistics.mean(accuracies)
    predicted, labels = predictions_of(model_folder(finished, "stsb"), data_dir, "stsb", "validation")
    # Other batches, in float32.
    assert best["stsb"]["pearson"] == pytest.approx(pearsonr(predicted, labels).statistic, abs=1e-5)
    assert best["stsb"]["spearmanr"] == pytest.approx(spearmanr(predicted, labels).statistic, abs=1e-2)
    assert best_of(finished, "stsb")["score"] == pytest.approx(statistics.mean(best["stsb"].values()), abs=1e-12)


def test_transfer_takes_the_best_backbone_and_a_new_head(finished, flags, encoder, tmp_path):
    source, print_of_encoder = best_of(finished, "mnli"), model_fingerprint(str(encoder))
    for name, result in results_of(finished).items():
        assert result["start"] == (source["run"] if name.startswith("stsb") else print_of_encoder)
    mnli = model_folder(finished, "mnli")
    model, _ = load_classifier(GlueSettings(str(encoder), ["rte"], "unused"), TASKS["rte"], mnli)
    stored = load_file(mnli / "model.safetensors")
    for key, weight in model.state_dict().items():
        same = weight.shape == stored[key].shape and torch.equal(weight, stored[key])
        # Biases of a new head are zero, and might be in the old one.
        assert same == key.startswith("model.") or "bias" in key, key
    assert model.config.num_labels == model.classifier.out_features == 2
    # One model a task is kept, and no checkpoint.
    assert len(list((finished / "small" / "mnli").glob("*/model"))) == 1
    assert not list(finished.rglob("checkpoint-*")) and not list(finished.rglob("*.partial"))
    # Without MNLI's model in reach, nothing is trained unless it is switched off.
    with pytest.raises(CheckpointError, match="small/mnli .*--task mnli"):
        run_glue.main(flags(tmp_path, task="stsb"))
    run_glue.main(flags(tmp_path, task="stsb", transfer=False, max_steps=2))
    assert best_of(tmp_path, "stsb")["start"] == print_of_encoder


def test_the_report_has_the_papers_columns_and_rows(finished):
    text, content = (finished / "report.md").read_text(), json.loads((finished / "report.json").read_text())
    lines = text.splitlines()
    # Only what was run.
    assert lines[2] == "| Model | MNLI | SST | STS | Avg. |"
    assert "| NeoBERT 4096 (paper) | 89.0 | 95.6 | 91.8 | 92.1 |" in lines
    tasks, results = content["models"]["small"], results_of(finished)
    for task, entry in tasks.items():
        scores = [100 * result["score"] for result in results.values() if result["task"] == task]
        assert entry["score"] == pytest.approx(statistics.mean(scores), abs=1e-9) and entry["seeds"] == 2
        assert entry["std"] == pytest.approx(statistics.stdev(scores), abs=1e-9)
    cells = [f"{tasks[task]['score']:.1f} ± {tasks[task]['std']:.1f}" for task in ("mnli", "sst2", "stsb")]
    average = statistics.mean(tasks[task]["score"] for task in tasks)
    assert f"| **small** | {' | '.join(cells)} | {average:.1f} |" in lines


def test_the_report_has_the_gain_of_an_ablation_and_says_which_tasks_had_other_data(finished, tmp_path):
    for name in ("m1", "m2"):
        shutil.copytree(finished / "small", tmp_path / name)
    for file in (tmp_path / "m2").glob("*/*.json"):
        content = json.loads(file.read_text())
        if content["task"] == "stsb":
            content["settings"]["data"]["train"] = "other"
        file.write_text(json.dumps(content | {"score": 0.9 * content["score"]}))
    text = write_report(tmp_path, read_published(str(ROOT / "configs/glue/figure1.yaml")))
    assert "| **m2** over m1 | -10.0% | +3.6% | 3 |" in text and "| **m3**" not in text
    assert "same data for stsb: do not compare them on these." in text


def test_the_best_point_of_a_grid_is_that_of_the_best_mean():
    """Not that of the best seed."""
    runs = [(1e-5, 0.7), (1e-5, 0.9), (1e-4, 0.5), (1e-4, 1.0)]
    results = [
        {"hyperparameters": {"batch_size": 8, "learning_rate": rate, "weight_decay": 0.0}, "score": score}
        | {"metrics": {"accuracy": score}, "settings": {"data": {}}}
        for rate, score in runs
    ]
    found = summarize(results)
    assert (found["hyperparameters"], found["score"]) == ("bs8_lr1e-05_wd0", pytest.approx(80))
    assert (found["seeds"], found["runs"], found["metrics"]) == (2, 4, {"accuracy": pytest.approx(80)})


def test_a_task_of_ones_own(flags, data_dir, tmp_path):
    names = {"labels": ["class", "none"], "metrics": ["accuracy", "macro_f1"]}
    task = {"source": str(data_dir / "sst2"), "texts": ["sentence"]} | names
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task}))
    run_glue.main(flags(tmp_path, task="all", task_config=tmp_path / "tasks.yaml", data_dir=None))
    result = best_of(tmp_path, "mine")
    assert set(result["metrics"]) == {"accuracy", "macro_f1"} and result["score"] > 0.75
    assert AutoConfig.from_pretrained(model_folder(tmp_path, "mine")).id2label == {0: "class", 1: "none"}
    report = (tmp_path / "report.md").read_text()
    assert "| small | mine |" in report and "| **small** |" not in report and "(paper)" not in report


def test_an_encoder_whose_files_have_other_names_than_its_modules(flags, tokenizer, tmp_path):
    save_other_encoder("gte", tmp_path / "gte", tokenizer)
    run_glue.main(flags(tmp_path, model=tmp_path / "gte", classifier_dropout=0.25, max_steps=2))
    trained = model_folder(tmp_path, "sst2")
    stored = load_file(trained / "model.safetensors")
    settings = GlueSettings(str(tmp_path / "gte"), ["mnli"], "unused", classifier_dropout=0.25)
    model, _ = load_classifier(settings, TASKS["mnli"], trained)
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    backbone = {key: weight for key, weight in again.items() if key.startswith(f"{model.base_model_prefix}.")}
    assert len(backbone) > 10 and all(torch.equal(weight, stored[key]) for key, weight in backbone.items())
    assert [key for key, module in model.named_modules() if getattr(module, "p", 0) == 0.25] == ["dropout"]


# Interrupted, started again, divided among processes: the results are the same.


def assert_same_best_model(first: Path, second: Path) -> None:
    first, second = (load_file(model_folder(folder, "sst2") / "model.safetensors") for folder in (first, second))
    assert first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_patience_survives_an_interruption(flags, tmp_path):
    """Nothing is learned, so that the first evaluation stays the best."""
    still = {"learning_rate": 1e-12, "eval_steps": None, "early_stopping_patience": 3, "num_train_epochs": 10}
    run_glue.main(flags(tmp_path / "whole", **still))
    (result,) = results_of(tmp_path / "whole").values()
    assert result["best_step"] == 2 and [entry["step"] for entry in result["evaluations"]] == [2, 4, 6, 8]
    with interrupted_behind("checkpoint-6"):
        run_glue.main(flags(tmp_path / "run", **still))
    run_glue.main(flags(tmp_path / "run", **still))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")


def test_a_run_interrupted_in_its_second_epoch_reads_the_other_rows_of_it(flags, encoder, tmp_path):
    """20 steps are an epoch. The model has moved."""
    run_glue.main(flags(tmp_path / "whole"))
    with interrupted_behind("checkpoint-30"):
        run_glue.main(flags(tmp_path / "run"))
    run_glue.main(flags(tmp_path / "run", model=shutil.copytree(encoder, tmp_path / "moved")))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert_same_best_model(tmp_path / "whole", tmp_path / "run")


def run_as(process: int, processes: int, flags: list[str]) -> None:
    """Run as one of the processes of `accelerate launch`."""
    with pytest.MonkeyPatch.context() as patch:
        environment = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": processes, "CUDA_VISIBLE_DEVICES": ""}
        for name, value in environment.items():
            patch.setenv(name, str(value))
        run_glue.main(flags)


def test_processes_divide_the_grid(flags, tmp_path):
    grid = GRID | {"max_steps": 10}
    run_glue.main(flags(tmp_path / "whole", **grid))
    for process, number in ((1, 1), (0, 3), (2, 4)):
        run_as(process, 3, flags(tmp_path / "run", **grid))
        assert len(results_of(tmp_path / "run")) == number
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert_same_best_model(tmp_path / "run", tmp_path / "whole")


def test_a_task_waits_for_the_runs_of_others_that_it_starts_from(flags, tmp_path, monkeypatch):
    """The second process has STS-B; here, the first one does MNLI while the second waits."""
    changes, waits = flags(tmp_path, task="mnli stsb", max_steps=2), []

    def do_the_other(seconds):
        waits.append(seconds)
        run_as(0, 2, changes)

    monkeypatch.setattr(recipe.time, "sleep", do_the_other)
    run_as(1, 2, changes)
    assert len(waits) == 1 and best_of(tmp_path, "stsb")["start"] == best_of(tmp_path, "mnli")["run"]


def test_results_of_the_same_weights_and_data_elsewhere_are_taken(finished, flags, encoder, data_dir, tmp_path):
    """A path identifies nothing. Nor is a run repeated for a setting that changes no weights."""
    shutil.copytree(finished, tmp_path / "copy")
    before = results_of(tmp_path / "copy")
    moved = {"model": shutil.copytree(encoder, tmp_path / "moved" / "small" / "model"), "name": None}
    moved["data_dir"] = shutil.copytree(data_dir, tmp_path / "data")
    changes = {"task": "mnli stsb sst2", "seeds": "0 1", "per_device_eval_batch_size": 7}
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "copy" / "small").glob("*/*.json")}
    run_glue.main(flags(tmp_path / "copy", **changes, **moved))
    assert times == {file: file.stat().st_mtime_ns for file in times} and results_of(tmp_path / "copy") == before


@pytest.mark.parametrize(
    "name, changes",
    [
        ("max_length", {"max_length": 16}),
        ("transfer", {"task": "stsb", "transfer": False}),
        # Also of a further seed: the report would take their mean.
        ("schedule.max_steps", {"seeds": 7, "max_steps": 2}),
        ("lora_rank", {"lora_rank": 3}),
    ],
)
def test_results_of_other_settings_are_refused_by_name(finished, flags, name, changes):
    with pytest.raises(SettingsMismatch, match=f"\n  {name}: "):
        run_glue.main(flags(finished, **changes))


def test_results_of_other_data_or_weights_in_the_same_place_are_refused(finished, flags, data_dir, tokenizer, tmp_path):
    data = shutil.copytree(data_dir, tmp_path / "data")
    file = data / "sst2" / "validation.jsonl"
    file.write_text(file.read_text().replace('"label": 1', '"label": 0', 1))
    with pytest.raises(SettingsMismatch, match="\n  data.validation: "):
        run_glue.main(flags(finished, data_dir=data))
    # Nor on another task: two models would be one row of the report.
    other = save_encoder(tmp_path / "encoder", tokenizer, seed=1)
    shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "small" / "sst2")
    with pytest.raises(SettingsMismatch, match="mnli/.*(?s:.*)\n  model: "):
        run_glue.main(flags(tmp_path / "copy", model=other))
