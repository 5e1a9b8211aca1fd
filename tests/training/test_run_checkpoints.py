"""Checkpoints whose files are not those that were written, without a training."""

import json
from pathlib import Path

import pytest

from neobert_hf.training.run_checkpoints import (
    COMPLETE,
    CheckpointError,
    Progress,
    mark_complete,
    newest_checkpoint,
)


SETTINGS = {"seed": 0, "learning_rate": 1e-3}


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with the checkpoints of steps 3 and 6."""
    for step in (3, 6):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "part").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights" * step)
        (folder / "part" / "optimizer.pt").write_bytes(b"moments")
        (folder / "empty").write_bytes(b"")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        mark_complete(folder, Progress("plain", SETTINGS, {"micro_batches": 10 * step}, {"loss": 0.1}))
        assert newest_checkpoint(tmp_path, SETTINGS)[0] == folder
    return tmp_path


def newest(run: Path) -> tuple[str, dict]:
    folder, progress = newest_checkpoint(run, SETTINGS)
    return folder.name, progress.cursor


@pytest.mark.parametrize("content", [None, b"", b"half", b"\0" * 40])
def test_a_file_that_is_lost_or_cut_is_damage(run, capsys, content):
    for name in ("model.safetensors", COMPLETE):
        file = run / "checkpoint-6" / name
        written = file.read_bytes()
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        assert newest(run)[0] == "checkpoint-3"
        # Without its mark, a checkpoint was never whole.
        assert name in capsys.readouterr().err or (content is None and name == COMPLETE)
        file.write_bytes(written)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(run):
    for step in (3, 6):
        (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="checkpoint-6/model(?s:.)*checkpoint-3/model(?s:.)*start from scratch"):
        newest(run)


def test_the_step_is_what_the_folder_says(run):
    (run / "checkpoint-6").rename(run / "checkpoint-7")
    with pytest.raises(CheckpointError, match="trainer_state.json is of step 6, but its folder is called checkpoint-7"):
        newest(run)
