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

from neobert_hf.evaluation.glue import recipe, report
from neobert_hf.training.run_checkpoints import complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import GRID, model_folder, results_of
from tests.helpers.pretraining_runs import interrupted_behind


run_glue = load_example("run_glue")


@pytest.fixture(autouse=True, scope="module")
def no_plots():
    """They take half a second, and test_recipe.py looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plot_lines", lambda *arguments, **options: None)
        yield


# Nothing is learned, so that the first evaluation stays the best.
STILL = {"learning_rate": 1e-12, "eval_steps": None, "early_stopping_patience": 3, "num_train_epochs": 10}


@pytest.fixture(scope="module")
def stopped_early(flags, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("early")
    run_glue.main(flags(folder, **STILL))
    return results_of(folder)


def test_early_stopping(stopped_early):
    (result,) = stopped_early.values()
    assert (result["best_step"], result["last_step"]) == (2, 8) and result["settings"]["max_steps"] == 200


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


@pytest.mark.parametrize("changes", [{}, {"train_sampling_strategy": "group_by_length"}])
def test_a_run_interrupted_in_its_second_epoch_reads_the_other_rows_of_it(flags, encoder, tmp_path, changes):
    """20 steps are an epoch. Transformers' own groups of about one length would be drawn anew. The model has moved."""
    run_glue.main(flags(tmp_path / "whole", **changes))
    with interrupted_behind("checkpoint-30"):
        run_glue.main(flags(tmp_path / "run", **changes))
    run_glue.main(flags(tmp_path / "run", **changes, model=shutil.copytree(encoder, tmp_path / "moved")))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert_same_best_model(tmp_path / "whole", tmp_path / "run", "sst2")


def test_an_evaluation_at_the_start_is_not_repeated(flags, stopped_early, tmp_path):
    """It would cost one of the evaluations that early stopping waits."""
    changes = STILL | {"eval_on_start": True}
    run_glue.main(flags(tmp_path / "whole", **changes))
    with interrupted_behind("checkpoint-4"):
        run_glue.main(flags(tmp_path / "run", **changes))
    run_glue.main(flags(tmp_path / "run", **changes))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")


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
    assert (summary["runs"], summary["searched"], summary["seeds"]) == (4, 4, 1)
    assert summary["score"] == 100 * max(result["score"] for result in results_of(tmp_path).values())
