"""Training checkpoints that are whole or not used.

The Trainer writes checkpoints in place and resumes from the newest folder unchecked; where `optimizer.pt` is missing it
starts Adam anew without a word. Here a folder counts once it holds a list of its files with their sizes, written last.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path


COMPLETE = "complete.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit the run."""


@dataclass
class Progress:
    """What a checkpoint stores beside the Trainer's files.

    Args:
        settings: every setting that the result depends on, by name.
        cursor: the position of `MLMBatchSampler`.
    """

    settings: dict
    cursor: dict


def mark_complete(folder: Path, progress: Progress) -> None:
    """Flush every file of the folder to disk, then name them all in `complete.json`."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            files[str(file.relative_to(folder))] = file.stat().st_size
    content = {"files": files, "settings": progress.settings, "cursor": progress.cursor}
    partial = folder / (COMPLETE + ".partial")
    with open(partial, "w", encoding="utf-8") as handle:
        json.dump(content, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, folder / COMPLETE)


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>` that were written to the end, oldest first."""
    folders = [folder for folder in output_dir.glob("checkpoint-*") if (folder / COMPLETE).is_file()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))


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
    return Progress(content["settings"], content["cursor"])


def check_settings(folder: Path, stored: dict, current: dict) -> None:
    """Raises:
    CheckpointError: naming each setting in which the checkpoint's run and this one differ.
    """
    names = sorted(name for name in stored.keys() | current.keys() if stored.get(name) != current.get(name))
    if names:
        differences = "\n".join(f"  {name}: {stored.get(name)!r} there, {current.get(name)!r} now" for name in names)
        raise CheckpointError(
            f"{folder} was written by a run with other settings:\n{differences}\nResume with the same settings, or "
            "start anew with another `output_dir`. To train on from its weights, set `init_from` to it."
        )


def delete_old(output_dir: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` complete checkpoints, and the incomplete ones that are older."""
    complete = complete_checkpoints(output_dir)
    if keep is None or len(complete) <= keep:
        return
    oldest_kept = int(complete[-keep].name.removeprefix("checkpoint-"))
    for folder in output_dir.glob("checkpoint-*"):
        step = folder.name.removeprefix("checkpoint-")
        if step.isdigit() and int(step) < oldest_kept:
            shutil.rmtree(folder)
