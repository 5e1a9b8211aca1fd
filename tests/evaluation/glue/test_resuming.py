"""examples/run_glue.py interrupted, killed, started again and divided among processes: the results are the same."""

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
from neobert_hf.training.run_checkpoints import complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import GRID, best_of, model_folder, results_of, save_encoder
from tests.helpers.pretraining_runs import interrupted_behind


run_glue = load_example("run_glue")
# Nothing is learned, so that the first evaluation stays the best.
STILL = {"learning_rate": 1e-12, "eval_steps": None, "early_stopping_patience": 3, "num_train_epochs": 10}


def run_as(process: int, processes: int, flags: list[str]) -> None:
    """Run as one of the processes of `accelerate launch`."""
    with pytest.MonkeyPatch.context() as patch:
        environment = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": processes, "CUDA_VISIBLE_DEVICES": ""}
        for name, value in environment.items():
            patch.setenv(name, str(value))
        run_glue.main(flags)


@pytest.fixture(scope="module")
def stopped_early(flags, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("early")
    run_glue.main(flags(folder, **STILL))
    return results_of(folder)


def test_early_stopping_and_patience_that_survives_sigterm(flags, stopped_early, tmp_path):
    (result,) = stopped_early.values()
    assert (result["best_step"], result["last_step"]) == (2, 8)

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


def assert_same_best_model(first: Path, second: Path) -> None:
    first, second = (load_file(model_folder(folder, "sst2") / "model.safetensors") for folder in (first, second))
    assert first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_run_interrupted_in_its_second_epoch_reads_the_other_rows_of_it(flags, encoder, tmp_path):
    """20 steps are an epoch. The model has moved."""
    run_glue.main(flags(tmp_path / "whole"))
    with interrupted_behind("checkpoint-30"):
        run_glue.main(flags(tmp_path / "run"))
    run_glue.main(flags(tmp_path / "run", model=shutil.copytree(encoder, tmp_path / "moved")))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert_same_best_model(tmp_path / "whole", tmp_path / "run")


def test_processes_divide_the_grid(flags, tmp_path):
    grid = GRID | {"max_steps": 10}
    run_glue.main(flags(tmp_path / "whole", **grid))
    for process, number in ((1, 1), (0, 3), (2, 4)):
        run_as(process, 3, flags(tmp_path / "run", **grid))
        assert len(results_of(tmp_path / "run")) == number
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert_same_best_model(tmp_path / "run", tmp_path / "whole")


def test_a_task_waits_for_the_runs_of_others_that_it_starts_from(flags, tmp_path, monkeypatch):
    """The second process has RTE; here, the first one does MNLI while the second waits."""
    changes, waits = flags(tmp_path, task="mnli rte", max_steps=2), []

    def do_the_other(seconds):
        waits.append(seconds)
        run_as(0, 2, changes)

    monkeypatch.setattr(recipe.time, "sleep", do_the_other)
    run_as(1, 2, changes)
    assert len(waits) == 1 and best_of(tmp_path, "rte")["start"] == best_of(tmp_path, "mnli")["run"]


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
    # Nor on another task: two models would be one row of the report.
    shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "small" / "sst2")
    with pytest.raises(SettingsMismatch, match="mnli/.*(?s:.*)\n  model: "):
        run_glue.main(flags(tmp_path / "copy", model=other))
