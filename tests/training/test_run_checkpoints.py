"""Which checkpoints of a run are used, without a training."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.training.run import (
    COMPLETE,
    CheckpointError,
    Run,
    check_alone,
    check_processes,
    delete_old,
    mark_complete,
    newest_checkpoint,
)


IDENTITY = {"seed": 0, "data": {"train": "a"}}


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with the checkpoints of steps 3, 6 and 10."""
    for step in (3, 6, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "optimizer.pt").write_bytes(b"moments")
        mark_complete(folder, "plain", IDENTITY, {"micro_batches": 10 * step}, stopped_early=False)
    return tmp_path


def test_the_newest_whole_checkpoint_is_used(run):
    assert newest_checkpoint(run).name == "checkpoint-10"
    # Without its mark, a checkpoint was never whole.
    (run / "checkpoint-10" / COMPLETE).unlink()
    assert newest_checkpoint(run).name == "checkpoint-6"
    assert newest_checkpoint(run / "other") is None
    started = Run(run, {"seed": 0}, newest_checkpoint(run))
    started.identify(data={"train": "a"})
    with pytest.raises(SettingsMismatch, match="checkpoint-6 was(?s:.)*  data.train: 'a' there, 'b' now\nResume"):
        started.identify(data={"train": "b"})


@pytest.mark.parametrize("content", [None, b"", b"mom"])
def test_a_file_that_a_checkpoint_has_lost_is_named(run, content):
    """Training would go on with a fresh optimizer, and end with other weights."""
    file = run / "checkpoint-10" / "part" / "optimizer.pt"
    file.unlink() if content is None else file.write_bytes(content)
    found = "is missing" if content is None else f"has {len(content)} bytes in place of 7"
    with pytest.raises(CheckpointError, match=f"checkpoint-10/part/optimizer.pt {found}"):
        newest_checkpoint(run)


def test_old_checkpoints_go_and_a_copy_of_one_stays(run):
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-3-backup")
    delete_old(run, 1, best=3)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-10", "checkpoint-3", "checkpoint-3-backup"]


def test_what_a_killed_run_left_of_a_checkpoint_goes_with_the_old_ones(run):
    """Killed while it deleted step 6, and while it wrote step 8."""
    (run / "checkpoint-6" / COMPLETE).unlink()
    (run / "checkpoint-8").mkdir()
    delete_old(run, None)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-10", "checkpoint-3"]


def test_processes_that_do_not_know_of_each_other_train_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="ACCELERATE_USE_CPU"):
        check_processes(alone)
    with pytest.raises(ValueError, match="2 processes"):
        check_alone(alone)
