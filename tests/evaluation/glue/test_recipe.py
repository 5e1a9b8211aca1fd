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
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.run import SettingsMismatch
from neobert_hf.evaluation.glue.recipe import GlueTexts
from neobert_hf.evaluation.glue.report import best_trials, read_published, score_cell, write_report
from neobert_hf.evaluation.glue.tasks import load_task
from neobert_hf.evaluation.glue.trials import best_first
from neobert_hf.training.fine_tuning import load_for_task
from neobert_hf.training.run import CheckpointError
from tests.helpers.examples import load_example, to_flags
from tests.helpers.glue_runs import SMALL, TASKS, write_rows
from tests.helpers.models import ROOT, save_encoder
from tests.helpers.small_tokenizer import small_tokenizer


run_glue = load_example("run_glue")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), small_tokenizer())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def flags(data_dir, encoder):
    """The command line of a run in `output_dir`, with changes."""

    def build(output_dir, **changes) -> list[str]:
        settings = {"output_dir": output_dir, "model": encoder, "data_dir": data_dir, "task": "sst2"}
        return to_flags(settings | SMALL | changes)

    return build


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """Three tasks, one with transfer, two seeds each."""
    folder = tmp_path_factory.mktemp("finished")
    run_glue.main(flags(folder, task="stsb sst2 mnli", seeds="0 1"))
    return folder


def results_of(folder: Path) -> dict[str, dict]:
    """The results of all runs, by run."""
    results = [json.loads(file.read_text()) for file in sorted((folder / "small").glob("*/*.json"))]
    return {result["run"]: result for result in results}


def best_of(folder: Path, task: str) -> dict:
    return best_first(folder / "small", task)[0]


def model_folder(folder: Path, task: str) -> Path:
    return folder / "small" / best_of(folder, task)["run"] / "model"


def test_tasks_learn_and_results_are_those_of_the_saved_models(finished, data_dir):
    results = results_of(finished)
    chance = {"mnli": 0.34, "sst2": 0.5, "stsb": 0.0}
    for name, result in results.items():
        assert result["score"] > chance[result["task"]] + 0.25, name
        assert result["score"] == max(entry["score"] for entry in result["evaluations"])
        steps = [entry["step"] for entry in result["evaluations"]]
        assert steps == list(range(10, 2 * (200 if result["task"] == "mnli" else 160) // 8 + 1, 10))

    @torch.no_grad()
    def logits_of(task: str, split: str) -> tuple[torch.Tensor, list]:
        """With Transformers alone, in other batches; and the labels."""
        folder = model_folder(finished, task)
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        *texts, labels = load_task(TASKS[task], str(data_dir))[split][:].values()
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        return model(**inputs).logits, labels

    best = best_of(finished, "mnli")
    for split in ("validation_matched", "validation_mismatched"):
        logits, labels = logits_of("mnli", split)
        assert best["metrics"][f"{split}_accuracy"] == accuracy_score(labels, logits.argmax(-1))
    assert best["score"] == statistics.mean(best["metrics"].values())
    best, (logits, labels) = best_of(finished, "stsb"), logits_of("stsb", "validation")
    assert best["metrics"]["pearson"] == pytest.approx(pearsonr(logits[:, 0], labels).statistic, abs=1e-5)
    assert best["metrics"]["spearmanr"] == pytest.approx(spearmanr(logits[:, 0], labels).statistic, abs=1e-2)
    assert best["score"] == pytest.approx(statistics.mean(best["metrics"].values()), abs=1e-12)


def test_transfer_takes_the_best_backbone_and_a_new_head(finished, flags, encoder, tmp_path):
    source, print_of_encoder = best_of(finished, "mnli"), model_fingerprint(str(encoder))
    for name, result in results_of(finished).items():
        assert result["start"] == (source["run"] if name.startswith("stsb") else print_of_encoder)
    mnli = model_folder(finished, "mnli")
    model, _ = load_for_task(str(encoder), AutoModelForSequenceClassification, TASKS["rte"].labels, backbone=mnli)
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


def test_the_report_has_the_papers_columns_and_rows_and_the_gains_of_ablations(finished, tmp_path):
    lines = (finished / "report.md").read_text().splitlines()
    # Only what was run.
    assert lines[2] == "| Model | MNLI | SST | STS | Avg. |"
    assert "| NeoBERT 4096 (paper) | 89.0 | 95.6 | 91.8 | 92.1 |" in lines
    scores = {task: [] for task in ("mnli", "sst2", "stsb")}
    for result in results_of(finished).values():
        scores[result["task"]].append(100 * result["score"])
    cells = [f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}" for found in scores.values()]
    average = statistics.mean(map(statistics.mean, scores.values()))
    assert f"| **small** | {' | '.join(cells)} | {average:.1f} |" in lines
    for name in ("m1", "m2"):
        shutil.copytree(finished / "small", tmp_path / name)
    for file in (tmp_path / "m2").glob("*/*.json"):
        result = json.loads(file.read_text())
        file.write_text(json.dumps(result | {"score": 0.9 * result["score"]}))
    text = write_report(tmp_path, read_published(str(ROOT / "configs/glue/figure1.yaml")))
    assert "| **m2** over m1 | -10.0% | +3.6% | 3 |" in text and "| **m3**" not in text


def test_the_best_point_of_a_grid_is_that_of_the_best_mean():
    """Not that of the best seed, nor one with which a seed has no score."""
    points = {"a": [0.7, 0.9], "b": [0.5, 1.0], "c": [1.0, None]}
    results = [{"hyperparameters": point, "score": score} for point, scores in points.items() for score in scores]
    best = best_trials(results)
    assert [run["hyperparameters"] for run in best] == ["a", "a"] and score_cell(best) == "80.0 ± 14.1"
    assert best_trials(results[4:]) == []


def test_a_point_that_diverges_does_not_end_the_grid(flags, tmp_path, monkeypatch):
    """It has the score of its evaluations until then, or none, and is not trained again."""
    grid = {"grid": True, "learning_rate": None, "learning_rates": "0.003 1e30", "max_steps": 30}
    predict, calls = GlueTexts.predict, []

    def diverge_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise FloatingPointError("not finite")
        return predict(*args)

    monkeypatch.setattr(GlueTexts, "predict", diverge_once)
    run_glue.main(flags(tmp_path, **grid))
    later, never = results_of(tmp_path).values()
    assert (later["best_step"], later["diverged"]) == (10, 20)
    assert later["score"] == later["evaluations"][0]["score"] and len(later["evaluations"]) == 1
    assert (never["score"], never["diverged"], never["evaluations"]) == (None, 10, [])
    assert list((tmp_path / "small").rglob("*.safetensors")) == [model_folder(tmp_path, "sst2") / "model.safetensors"]
    assert "| 1 of 2, 2 diverged |" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(GlueTexts, "encode", lambda *args: pytest.fail("trained again"))
    run_glue.main(flags(tmp_path, **grid))


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


def test_results_of_other_data_or_weights_in_the_same_place_are_refused(finished, flags, data_dir, tmp_path):
    data = shutil.copytree(data_dir, tmp_path / "data")
    file = data / "sst2" / "validation.jsonl"
    file.write_text(file.read_text().replace('"label": 1', '"label": 0', 1))
    with pytest.raises(SettingsMismatch, match="\n  data.validation: "):
        run_glue.main(flags(finished, data_dir=data))
    # Nor on another task: two models would be one row of the report.
    other = save_encoder(tmp_path / "encoder", small_tokenizer(), seed=1)
    shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "small" / "sst2")
    with pytest.raises(SettingsMismatch, match="mnli/.*(?s:.*)\n  model: "):
        run_glue.main(flags(tmp_path / "copy", model=other))


def test_a_length_that_leaves_nothing_of_the_texts_is_refused(flags, tmp_path):
    # STS-B has pairs, which have three special tokens.
    for task, length in (("sst2", 2), ("stsb", 4)):
        with pytest.raises(ValueError, match=f"`max_length` is {length}"):
            run_glue.main(flags(tmp_path, task=task, max_length=length, transfer=False))


@pytest.mark.parametrize(
    "change, name",
    [
        ({"task": "mnl"}, "mnl.*mnli"),
        ({"learning_rate": None}, "sst2 has no learning_rate"),
        ({"grid": True, "weight_decay": None}, "sst2 has no weight_decay"),
        ({"seed": 3}, "seeds"),
    ],
)
def test_bad_settings_are_refused_before_training(flags, tmp_path, change, name):
    with pytest.raises(ValueError, match=name):
        run_glue.main(flags(tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()
