"""examples/run_glue.py on small data in GLUE's form: what it trains, and what it reports."""

import json
import shutil
import statistics

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score
from transformers import AutoConfig

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.evaluation.glue.recipe import build_classifier
from neobert_hf.evaluation.glue.report import read_published, summarize, write_report
from neobert_hf.training.fine_tuning import StartingPoint
from neobert_hf.training.run_checkpoints import CheckpointError
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import (
    GRID,
    TASKS,
    best_of,
    model_folder,
    predictions_of,
    results_of,
)
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder


run_glue = load_example("run_glue")


def test_tasks_run_in_dependency_order_and_learn(finished):
    results = results_of(finished)
    assert len(results) == 8
    times = {name: (finished / "small" / f"{name}.json").stat().st_mtime_ns for name in results}
    assert max(times[name] for name in times if name.startswith("mnli")) < min(
        times[name] for name in times if name.startswith(("rte", "stsb"))
    )
    chance = {"mnli": 0.34, "rte": 0.5, "sst2": 0.5, "stsb": 0.0}
    for name, result in results.items():
        assert result["score"] > chance[result["task"]] + 0.25, name
        assert result["score"] == max(entry["score"] for entry in result["evaluations"])
        steps = [entry["step"] for entry in result["evaluations"]]
        assert steps == list(range(10, 2 * (200 if result["task"] == "mnli" else 160) // 8 + 1, 10))


def test_results_are_those_of_the_saved_models(finished, data_dir):
    best = {task: best_of(finished, task)["metrics"] for task in ("mnli", "sst2", "stsb")}
    accuracies = []
    for split in ("validation_matched", "validation_mismatched"):
        predicted, labels = predictions_of(model_folder(finished, "mnli"), data_dir, "mnli", split)
        accuracies.append(accuracy_score(labels, predicted))
        assert best["mnli"][f"{split}_accuracy"] == accuracies[-1]
    assert best_of(finished, "mnli")["score"] == statistics.mean(accuracies)
    predicted, labels = predictions_of(model_folder(finished, "sst2"), data_dir, "sst2", "validation")
    assert best["sst2"] == {"accuracy": accuracy_score(labels, predicted)}
    predicted, labels = predictions_of(model_folder(finished, "stsb"), data_dir, "stsb", "validation")
    # Other batches, in float32.
    assert best["stsb"]["pearson"] == pytest.approx(pearsonr(predicted, labels).statistic, abs=1e-5)
    assert best["stsb"]["spearmanr"] == pytest.approx(spearmanr(predicted, labels).statistic, abs=1e-2)
    both = statistics.mean(best["stsb"].values())
    assert best_of(finished, "stsb")["score"] == pytest.approx(both, abs=1e-12)


def test_transfer_takes_the_best_backbone_and_a_new_head(finished, flags, encoder, tmp_path):
    source, print_of_encoder = best_of(finished, "mnli"), model_fingerprint(str(encoder))
    for name, result in results_of(finished).items():
        assert result["start"] == (source["run"] if name.startswith(("rte", "stsb")) else print_of_encoder)
    mnli = model_folder(finished, "mnli")
    for task, labels in (("rte", 2), ("stsb", 1)):
        torch.manual_seed(0)
        model = build_classifier(StartingPoint(str(encoder), backbone=mnli), TASKS[task], 0.1)
        stored, state = load_file(mnli / "model.safetensors"), model.state_dict()
        for key, weight in state.items():
            same = weight.shape == stored[key].shape and torch.equal(weight, stored[key])
            # Biases of a new head are zero, and might be in the old one.
            assert same == key.startswith("model.") or "bias" in key, key
        assert state["classifier.weight"].shape[0] == labels and model.config.num_labels == labels
    # One model a task is kept, and no checkpoint.
    assert len(list((finished / "small" / "mnli").glob("*/model"))) == 1
    assert not list(finished.rglob("checkpoint-*")) and not list(finished.rglob("*.partial"))
    # Without MNLI's model in reach, nothing is trained unless it is switched off.
    with pytest.raises(CheckpointError, match="small/mnli .*--task mnli"):
        run_glue.main(flags(tmp_path, task="rte"))
    run_glue.main(flags(tmp_path, task="rte", transfer=False, max_steps=2))
    assert best_of(tmp_path, "rte")["start"] == print_of_encoder


def test_the_report_has_the_papers_columns_and_rows(finished):
    text, content = (finished / "report.md").read_text(), json.loads((finished / "report.json").read_text())
    lines = text.splitlines()
    # Only what was run.
    assert lines[2] == "| Model | MNLI | RTE | SST | STS | Avg. |"
    assert "| NeoBERT 4096 (paper) | 89.0 | 91.3 | 95.6 | 91.8 | 91.9 |" in lines
    tasks, results = content["models"]["small"], results_of(finished)
    for task, entry in tasks.items():
        scores = [100 * result["score"] for result in results.values() if result["task"] == task]
        assert entry["score"] == pytest.approx(statistics.mean(scores), abs=1e-9) and entry["seeds"] == 2
        assert entry["std"] == pytest.approx(statistics.stdev(scores), abs=1e-9)
    cells = [f"{tasks[task]['score']:.1f} ± {tasks[task]['std']:.1f}" for task in ("mnli", "rte", "sst2", "stsb")]
    average = statistics.mean(tasks[task]["score"] for task in tasks)
    assert f"| **small** | {' | '.join(cells)} | {average:.1f} |" in lines


def test_the_report_has_the_gain_of_an_ablation_beside_the_papers(finished, tmp_path):
    for name in ("m1", "m2"):
        shutil.copytree(finished / "small", tmp_path / name)
    for file in (tmp_path / "m2").glob("*/*.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"score": 0.9 * content["score"]}))
    lines = write_report(tmp_path, read_published(str(ROOT / "configs/glue/figure1.yaml"))).splitlines()
    assert "| **m2** over m1 | -10.0% | +3.6% | 4 |" in lines
    assert not any(line.startswith("| **m3**") for line in lines)


def test_the_report_says_which_tasks_had_other_data(finished, tmp_path):
    shutil.copytree(finished / "small", tmp_path / "small")
    shutil.copytree(finished / "small", tmp_path / "second")
    assert "the same data" not in write_report(tmp_path, None)
    for file in (tmp_path / "second" / "rte").glob("*.json"):
        content = json.loads(file.read_text())
        content["settings"]["data"]["train"] = "other"
        file.write_text(json.dumps(content))
    assert "same data for rte: do not compare them on these." in write_report(tmp_path, None)


def test_a_setting_with_which_seeds_diverged_does_not_win():
    """The mean of the seeds that are left would be too good."""
    runs = [(1e-5, seed, 0.8) for seed in range(5)] + [(1e-3, seed, None if seed else 0.81) for seed in range(5)]
    results = [
        {"hyperparameters": {"batch_size": 8, "learning_rate": rate, "weight_decay": 0.0}, "score": score}
        | {"metrics": {"accuracy": score}, "run": f"{rate:g}_{seed}", "settings": {"data": {}}}
        for rate, seed, score in runs
    ]
    found = summarize(results)
    assert (found["score"], found["std"], found["seeds"], found["runs"]) == (pytest.approx(80), 0, 5, 10)
    assert summarize([result for result in results if result["score"] is None]) is None


def test_a_point_of_a_grid_that_diverges_is_recorded_and_left_out(flags, tmp_path):
    grid = GRID | {"num_train_epochs": 1, "batch_sizes": "8", "learning_rates": "1e30 0.003"}
    run_glue.main(flags(tmp_path / "grid", **grid))
    results = results_of(tmp_path / "grid")
    (name,) = (name for name in results if "1e+30" in name)
    assert results[name]["score"] is None and "nan at step 10" in results[name]["error"] and len(results) == 2
    report = json.loads((tmp_path / "grid" / "report.json").read_text())
    assert report["diverged"] == [f"small/{name}"]
    assert report["models"]["small"]["sst2"]["hyperparameters"] == "bs8_lr0.003_wd0.01"
    assert f"Diverged, and not part of any mean: small/{name}." in (tmp_path / "grid" / "report.md").read_text()
    assert not list(tmp_path.rglob("checkpoint-*"))
    run_glue.main(flags(tmp_path / "grid", **grid))
    assert results_of(tmp_path / "grid") == results
    # By itself it is an error.
    with pytest.raises(FloatingPointError, match="nan at step 10"):
        run_glue.main(flags(tmp_path / "alone", num_train_epochs=1, learning_rate=1e30))
    assert not results_of(tmp_path / "alone")


def test_a_task_of_ones_own(flags, data_dir, tmp_path):
    task = {
        "source": str(data_dir / "sst2"),
        "texts": ["sentence"],
        "labels": ["class", "none"],
        "metrics": ["accuracy", "macro_f1"],
    }
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task}))
    run_glue.main(flags(tmp_path, task="all", task_config=tmp_path / "tasks.yaml", data_dir=None))
    result = best_of(tmp_path, "mine")
    assert set(result["metrics"]) == {"accuracy", "macro_f1"} and result["score"] > 0.75
    assert result["score"] == pytest.approx(statistics.mean(result["metrics"].values()), abs=1e-12)
    assert AutoConfig.from_pretrained(model_folder(tmp_path, "mine")).id2label == {0: "class", 1: "none"}
    report = (tmp_path / "report.md").read_text()
    assert "| small | mine |" in report and "| **small** |" not in report and "(paper)" not in report


# One whose files have other names and shapes than its modules; tests of tasks have the others.
@pytest.mark.parametrize("name", ["bert", "gte"])
def test_it_works_for_other_encoders(flags, tokenizer, tmp_path, name):
    save_other_encoder(name, tmp_path / name, tokenizer)
    changes = {"model": tmp_path / name, "classifier_dropout": 0.25, "max_steps": 2}
    run_glue.main(flags(tmp_path, **changes))
    trained = model_folder(tmp_path, "sst2")
    stored = load_file(trained / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    model = build_classifier(StartingPoint(str(tmp_path / name), backbone=trained), TASKS["mnli"], 0.25)
    prefix = f"{model.base_model_prefix}."
    # Stored, since files have other names and shapes than the modules of some.
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    backbone = {key: weight for key, weight in again.items() if key.startswith(prefix)}
    assert len(backbone) > 10 and all(torch.equal(weight, stored[key]) for key, weight in backbone.items())
    # Before the classifier, and nowhere else.
    modules = model.named_modules()
    dropouts = [key for key, module in modules if 0.25 in (getattr(module, "p", 0), getattr(module, "drop_prob", 0))]
    assert len(dropouts) == 1 and not dropouts[0].startswith(prefix)
