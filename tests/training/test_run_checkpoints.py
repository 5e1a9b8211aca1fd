"""Which checkpoints of a run are used, without a training."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.training.run import (
    COMPLETE,
    Progress,
    check_alone,
    delete_old,
    mark_complete,
    newest_checkpoint,
    training_folder,
)


SETTINGS = {"seed": 0, "data": {"train": "a"}}


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with the checkpoints of steps 3, 6 and 10."""
    for step in (3, 6, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "optimizer.pt").write_bytes(b"moments")
        mark_complete(folder, Progress("plain", SETTINGS, {"micro_batches": 10 * step}))
    return tmp_path


def test_the_newest_whole_checkpoint_is_used(run):
    assert newest_checkpoint(run, SETTINGS).name == "checkpoint-10"
    # Without its mark, a checkpoint was never whole.
    (run / "checkpoint-10" / COMPLETE).unlink()
    assert newest_checkpoint(run, SETTINGS).name == "checkpoint-6"
    with pytest.raises(SettingsMismatch, match="checkpoint-6 was(?s:.)*  data.train: 'a' there, 'b' now\nResume"):
        newest_checkpoint(run, SETTINGS | {"data": {"train": "b"}})
    assert newest_checkpoint(run / "other", SETTINGS) is None


def test_old_checkpoints_go_and_a_copy_of_one_stays(run):
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-3-backup")
    delete_old(run, 1, best=3)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-10", "checkpoint-3", "checkpoint-3-backup"]


def test_processes_that_do_not_know_of_each_other_train_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(world_size=1, process_index=0, device=torch.device("cpu"), output_dir=str(tmp_path / "run"))
    with pytest.raises(RuntimeError, match="ACCELERATE_USE_CPU"):
        training_folder(alone, "a recipe", (), {})
    with pytest.raises(ValueError, match="2 processes"):
        check_alone(alone)
