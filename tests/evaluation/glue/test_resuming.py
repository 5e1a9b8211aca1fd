"""examples/run_glue.py interrupted, killed, started again and split into shards: the results are the same."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.evaluation.glue import recipe
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import GRID, best_of, model_folder, results_of, save_encoder
from tests.helpers.pretraining_runs import interrupted_behind


run_glue = load_example("run_glue")


# Nothing is learned, so that the first evaluation stays the best.
STILL = {"learning_rate": 1e-12, "eval_steps": None, "early_stopping_patience": 3, "num_train_epochs": 10}


@pytest.fixture(scope="module")
def stopped_early(flags, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("early")
    run_glue.main(flags(folder, **STILL))
    return results_of(folder)


def test_early_stopping(stopped_early):
    (result,) = stopped_early.values()
    assert (result["best_step"], result["last_step"]) == (2, 8)


def test_patience_survives_sigterm(flags, stopped_early, tmp_path):
    def stop():
        for _ in range(6000):
            if list(tmp_path.rglob("checkpoint-4/complete.json")):
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        run_glue.main(flags(tmp_path, **STILL))
    thread.join()
    assert ended.value.code == 143
    # The best, of step 2, and the newest.
    kept = [complete_checkpoints(folder) for folder in (tmp_path / "small" / "sst2").iterdir()]
    assert [folder.name for folder in kept[0]] in (["checkpoint-2", f"checkpoint-{step}"] for step in range(4, 9))
    run_glue.main(flags(tmp_path, **STILL))
    assert results_of(tmp_path) == stopped_early


def test_a_run_killed_before_its_result_does_not_train_on(flags, stopped_early, tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "write_json", fail)
        with pytest.raises(KeyboardInterrupt):
            run_glue.main(flags(tmp_path, **STILL))
    assert not results_of(tmp_path) and list(tmp_path.rglob("checkpoint-8/complete.json"))
    run_glue.main(flags(tmp_path, **STILL))
    assert results_of(tmp_path) == stopped_early


def test_a_run_interrupted_in_its_second_epoch_reads_the_other_rows_of_it(flags, encoder, tmp_path):
    """20 steps are an epoch. The model has moved."""
    run_glue.main(flags(tmp_path / "whole"))
    with interrupted_behind("checkpoint-30"):
        run_glue.main(flags(tmp_path / "run"))
    run_glue.main(flags(tmp_path / "run", model=shutil.copytree(encoder, tmp_path / "moved")))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert_same_best_model(tmp_path / "whole", tmp_path / "run", "sst2")


@pytest.fixture(scope="module")
def whole_grid(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    run_glue.main(flags(folder, **GRID))
    return folder


def assert_same_best_model(first: Path, second: Path, task: str) -> None:
    first, second = (load_file(model_folder(folder, task) / "model.safetensors") for folder in (first, second))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_shards_are_the_grid(flags, whole_grid, tmp_path):
    for shard, number in (("2/3", 1), ("1/3", 3), ("3/3", 4)):
        run_glue.main(flags(tmp_path, **GRID, shard=shard))
        assert len(results_of(tmp_path)) == number
    assert results_of(tmp_path) == results_of(whole_grid)
    assert_same_best_model(tmp_path, whole_grid, "sst2")
    summary = json.loads((tmp_path / "report.json").read_text())["models"]["small"]["sst2"]
    assert (summary["runs"], summary["seeds"]) == (4, 1)
    assert summary["score"] == 100 * max(result["score"] for result in results_of(tmp_path).values())


def test_results_of_the_same_weights_and_data_elsewhere_are_taken(finished, flags, encoder, data_dir, tmp_path):
    """A path identifies nothing. Nor is a run repeated for a setting that changes no weights."""
    shutil.copytree(finished, tmp_path / "copy")
    before = results_of(tmp_path / "copy")
    moved = {"model": shutil.copytree(encoder, tmp_path / "moved" / "small" / "model"), "name": None}
    moved["data_dir"] = shutil.copytree(data_dir, tmp_path / "data")
    changes = {"task": "mnli rte stsb sst2", "seeds": "0 1", "per_device_eval_batch_size": 7}
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "copy" / "small").glob("*/*.json")}
    run_glue.main(flags(tmp_path / "copy", **changes, **moved))
    assert times == {file: file.stat().st_mtime_ns for file in times} and results_of(tmp_path / "copy") == before


@pytest.mark.parametrize(
    "name, changes",
    [
        ("max_length", {"max_length": 16}),
        ("transfer", {"task": "rte", "transfer": False}),
        # Also of a further seed: the report would take their mean.
        ("schedule.max_steps", {"seeds": 7, "max_steps": 2}),
        ("label_smoothing_factor", {"label_smoothing_factor": 0.1}),
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
    other = save_encoder(tmp_path / "encoder", tokenizer, seed=1)
    with pytest.raises(SettingsMismatch, match="\n  model: "):
        run_glue.main(flags(finished, model=other))
    # Nor on another task: two models would be one row of the report.
    shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "small" / "sst2")
    with pytest.raises(SettingsMismatch, match="mnli/.*(?s:.*)\n  model: "):
        run_glue.main(flags(tmp_path / "copy", model=other))


def test_a_better_source_leaves_finished_runs_as_they_are(finished, flags, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    best = best_of(finished, "mnli")
    name = best["run"].replace(f"seed{best['seed']}", "seed2")
    (tmp_path / "copy" / "small" / f"{name}.json").write_text(json.dumps(best | {"run": name, "score": 1.0}))
    # It has no model, and is not asked for one.
    run_glue.main(flags(tmp_path / "copy", task="rte stsb", seeds="0 1"))
    with pytest.raises(CheckpointError, match="small/mnli "):
        run_glue.main(flags(tmp_path / "copy", task="rte", seeds="2"))


def test_a_dependent_task_waits_for_the_runs_of_others(flags, data_dir, tmp_path, monkeypatch):
    """The second shard has RTE; here, the first one does MNLI while the second waits."""
    changes = {"task": "mnli rte", "max_steps": 2}
    waits = []

    def do_the_other(seconds):
        waits.append(seconds)
        run_glue.main(flags(tmp_path, **changes, shard="1/2"))

    monkeypatch.setattr(recipe.time, "sleep", do_the_other)
    run_glue.main(flags(tmp_path, **changes, shard="2/2"))
    assert len(waits) == 1 and best_of(tmp_path, "rte")["start"] == best_of(tmp_path, "mnli")["run"]
