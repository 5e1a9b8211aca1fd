"""Training checkpoints, of which only complete ones are used.

The Trainer writes checkpoints in place and resumes from the newest folder without checking it. If `optimizer.pt` is
missing, it silently restarts Adam. Here a folder counts as a checkpoint only once it holds a list of its files with
their sizes, which is written last.
"""

import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.settings import differences, list_differences


COMPLETE = "complete.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not fit the run."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, or has another size than was written."""


@dataclass
class Progress:
    """What a checkpoint stores in addition to the Trainer's files.

    Args:
        engine: `plain` (one process or DDP), `FSDP` or `DeepSpeed`: it sets the format of weights and optimizer.
        settings: every setting that the result depends on, by name.
        cursor: the position in the data, if the recipe does not let the Trainer skip the rows already seen.
        totals: sums over past steps that the next logged numbers include.
    """

    engine: str
    settings: dict
    cursor: dict
    totals: dict = field(default_factory=dict)


def mark_complete(folder: Path, progress: Progress) -> None:
    """Flush every file of the folder to disk, then list them all in `complete.json`."""
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
    """Folders `checkpoint-<step>` that were written completely, oldest first."""
    return [folder for _, folder in sorted(_numbered(output_dir)) if (folder / COMPLETE).is_file()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """Folders `checkpoint-<step>` with their steps. Others, such as a user's `checkpoint-6-backup`, are left out."""
    folders = output_dir.glob("checkpoint-*")
    return [(step_of(folder), folder) for folder in folders if folder.name.removeprefix("checkpoint-").isdigit()]


def read_progress(folder: Path) -> Progress:
    """What a complete checkpoint stores, after a look at the sizes of its files.

    Raises:
        DamagedCheckpoint: if a file is missing or has another size.
        CheckpointError: if there is no `complete.json`.
    """
    content = _read_complete(folder)
    for name, size in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size:,} bytes" if file.is_file() else "missing"
            raise DamagedCheckpoint(f"{file} is {found}, but it was written with {size:,} bytes. {_advice(folder)}")
    return Progress(content["engine"], content["settings"], content["cursor"], content["totals"])


def stored_settings(output_dir: Path) -> dict:
    """The settings of the run that wrote the checkpoints of a folder, from the newest undamaged one; {} if none is."""
    for folder in reversed(complete_checkpoints(output_dir)):
        with suppress(DamagedCheckpoint):
            return read_progress(folder).settings
    return {}


def _read_complete(folder: Path) -> dict:
    file = folder / COMPLETE
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it lacks {COMPLETE}. Use another one.") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{file} is not valid JSON ({error}). {_advice(folder)}") from error


def _advice(folder: Path) -> str:
    return f"Restore the file; or delete {folder}, to resume from the checkpoint before it."


def check_engine(folder: Path, progress: Progress, engine: str) -> None:
    """Raises:
    CheckpointError: if another engine wrote the checkpoint. Transformers would restart the optimizer.
    """
    if progress.engine != engine:
        raise CheckpointError(
            f"{folder} was written by the engine {progress.engine}, but this run uses {engine}, which stores weights "
            "and optimizer differently. Launch with the engine of the checkpoint; a single process and DDP count as "
            "the same."
        )


def check_settings(folder: Path, stored: dict, current: dict) -> None:
    """Raises:
    CheckpointError: naming each setting in which the run of the checkpoint and this one differ.
    """
    if differing := differences(stored, current):
        raise CheckpointError(
            f"{folder} was written by a run with other settings:\n{list_differences(differing)}\nResume with the same "
            "settings, or start a new run with another `output_dir`. To start it from the weights of this checkpoint, "
            "give the checkpoint as `init_from` to pretrain.py, or as `model` to any other recipe."
        )


def newest_checkpoint(output_dir: Path, settings: dict) -> tuple[Path, Progress] | tuple[None, None]:
    """The newest undamaged checkpoint, from which to resume, and what it stores; None twice if there is none.

    Raises:
        CheckpointError: if it is of a run with other settings, its folder has another step in its name than the
            Trainer's state, or all checkpoints are damaged.
    """
    damages = []
    for folder in reversed(complete_checkpoints(output_dir)):
        try:
            progress = read_progress(folder)
            check_settings(folder, progress.settings, settings)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            continue
        check_step(folder)
        for damage in damages:
            print(f"warning: {damage}\nwarning: {folder}, which is undamaged, is used instead.", file=sys.stderr)
        return folder, progress
    if damages:
        raise CheckpointError("\n".join([*damages, "All checkpoints are damaged: delete them to start from scratch."]))
    return None, None


def check_step(folder: Path) -> None:
    """Raises:
    CheckpointError: if the Trainer's state in a folder `checkpoint-<step>` is of another step.
    """
    file = folder / "trainer_state.json"
    try:
        step = json.loads(file.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a state of the Trainer ({error!r}). {_advice(folder)}") from error
    if step != step_of(folder):
        raise CheckpointError(f"{file} is of step {step}, but its folder is called {folder.name}: rename the folder.")


def delete_old(output_dir: Path, keep: int | None, best: int | None = None) -> None:
    """Keep the newest `keep` complete checkpoints and that of step `best`; delete older ones, also incomplete ones."""
    complete = complete_checkpoints(output_dir)
    if keep is None or len(complete) <= keep:
        return
    for step, folder in _numbered(output_dir):
        if step < step_of(complete[-keep]) and step != best:
            delete_checkpoint(folder)


def delete_checkpoint(folder: Path) -> None:
    """Delete `complete.json` first, so that a half-deleted checkpoint does not count as complete."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)
