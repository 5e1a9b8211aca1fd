"""Training checkpoints that are whole or not used.

The Trainer writes checkpoints in place and resumes from the newest folder unchecked; where `optimizer.pt` is missing it
starts Adam anew without a word. Here a folder counts once it holds a list of its files with their sizes, written last.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.settings import differences, list_differences


COMPLETE = "complete.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit the run."""


@dataclass
class Progress:
    """What a checkpoint stores beside the Trainer's files.

    Args:
        engine: `plain` (one process or DDP), `FSDP` or `DeepSpeed`: the form that weights and optimizer have.
        settings: every setting that the result depends on, by name.
        cursor: where the data stand, if the recipe does not let the Trainer skip them.
    """

    engine: str
    settings: dict
    cursor: dict


def mark_complete(folder: Path, progress: Progress) -> None:
    """Flush every file of the folder to disk, then name them all in `complete.json`."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            _flush(file)
            files[str(file.relative_to(folder))] = file.stat().st_size
    with atomic_write(folder / COMPLETE) as partial:
        partial.write_text(json.dumps({"files": files, **asdict(progress)}, indent=1), encoding="utf-8")
        _flush(partial)


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>` that were written to the end, oldest first."""
    return [folder for _, folder in sorted(_numbered(output_dir)) if (folder / COMPLETE).is_file()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """Not `checkpoint-6-backup`, which somebody may keep there."""
    folders = output_dir.glob("checkpoint-*")
    return [(step_of(folder), folder) for folder in folders if folder.name.removeprefix("checkpoint-").isdigit()]


def read_progress(folder: Path) -> Progress:
    """Check the files of a complete checkpoint and return what it stores.

    Raises:
        CheckpointError: if a file is gone or has another size.
    """
    try:
        content = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it lacks {COMPLETE}. Take another one.") from None
    for name, size in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size:,} bytes" if file.is_file() else "missing"
            raise CheckpointError(
                f"{file} is {found}; it was written with {size:,} bytes. Delete {folder} to resume from the checkpoint "
                "before it, or restore the file."
            )
    return Progress(content["engine"], content["settings"], content["cursor"])


def check_engine(folder: Path, progress: Progress, engine: str) -> None:
    """Raises:
    CheckpointError: if another engine wrote the checkpoint. Transformers would start the optimizer anew.
    """
    if progress.engine != engine:
        raise CheckpointError(
            f"{folder} was written by the engine {progress.engine}, and this run has {engine}: its weights and "
            "optimizer have another form. Launch with the engine of the checkpoint; one process and DDP are the same."
        )


def check_settings(folder: Path, stored: dict, current: dict) -> None:
    """Raises:
    CheckpointError: naming each setting in which the checkpoint's run and this one differ.
    """
    if differing := differences(stored, current):
        raise CheckpointError(
            f"{folder} was written by a run with other settings:\n{list_differences(differing)}\nResume with the same "
            "settings, or start anew with another `output_dir`. To train on from its weights, set `init_from` to it."
        )


def newest_checkpoint(output_dir: Path, settings: dict) -> tuple[Path, Progress] | tuple[None, None]:
    """The checkpoint to resume from and what it stores, if there is one.

    Raises:
        CheckpointError: if it is damaged or of a run with other settings.
    """
    checkpoints = complete_checkpoints(output_dir)
    if not checkpoints:
        return None, None
    progress = read_progress(checkpoints[-1])
    check_settings(checkpoints[-1], progress.settings, settings)
    return checkpoints[-1], progress


def delete_old(output_dir: Path, keep: int | None, best: int | None = None) -> None:
    """Delete all but the newest `keep` complete checkpoints and that of the step `best`; incomplete ones if older."""
    complete = complete_checkpoints(output_dir)
    if keep is None or len(complete) <= keep:
        return
    for step, folder in _numbered(output_dir):
        if step < step_of(complete[-keep]) and step != best:
            delete_checkpoint(folder)


def delete_checkpoint(folder: Path) -> None:
    """Its mark first: what is half deleted is not complete."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)
