"""Training checkpoints, of which only complete and undamaged ones are used.

The Trainer writes checkpoints in place and resumes from the newest folder without checking it. If `optimizer.pt` is
missing, it silently restarts Adam. Here a folder counts as a checkpoint only once it holds a list of its files with
their sizes and checksums, which is written last. Checkpoints of older versions have sizes only.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.fingerprints import file_checksum, value_checksum
from neobert_hf.common.settings import differences, list_differences


COMPLETE = "complete.json"
# The keys of this file. Checkpoints of older versions lack the last three.
KEYS = {"files", "engine", "settings", "cursor", "totals", "checksums", "checksum"}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not fit the run."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, or was changed after it was written."""


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
    _write_complete(folder, {"files": files, **asdict(progress)})


def add_checksums(folder: Path) -> None:
    """Add the checksums of all files to `complete.json`.

    Since the files have just been written, they are read from the page cache. This takes a fifth of a second for 100
    million parameters. Call it in a thread, so that training can continue.
    """
    content = _read_complete(folder)
    _write_complete(folder, content | {"checksums": {name: file_checksum(folder / name) for name in content["files"]}})


def _write_complete(folder: Path, content: dict) -> None:
    with atomic_write(folder / COMPLETE) as partial:
        partial.write_text(json.dumps(content | {"checksum": value_checksum(content)}, indent=1), encoding="utf-8")
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
    """What a complete checkpoint stores. Only the sizes of its files are checked; see also `check_content`.

    Raises:
        DamagedCheckpoint: if a file is missing or has another size, or `complete.json` was changed.
        CheckpointError: if there is no `complete.json`.
    """
    content = _read_complete(folder)
    for name, size in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size:,} bytes" if file.is_file() else "missing"
            raise DamagedCheckpoint(f"{file} is {found}, but it was written with {size:,} bytes. {_advice(folder)}")
    return Progress(content["engine"], content["settings"], content["cursor"], content.get("totals", {}))


def stored_settings(output_dir: Path) -> dict:
    """The settings of the run that wrote the checkpoints of a folder, from the newest undamaged one; {} if none is."""
    for folder in reversed(complete_checkpoints(output_dir)):
        with suppress(DamagedCheckpoint):
            return read_progress(folder).settings
    return {}


def check_content(folder: Path) -> Progress:
    """Like `read_progress`, but also reads all files (2 to 8 GB a second) to verify their checksums, if there are any.

    Raises:
        DamagedCheckpoint: naming the first damaged file.
    """
    progress = read_progress(folder)
    checksums = _read_complete(folder).get("checksums", {})
    with ThreadPoolExecutor() as pool:
        found = pool.map(_checksum_or_error, [folder / name for name in checksums])
        for (name, written), (checksum, error) in zip(checksums.items(), found):
            if checksum != written:
                reason = error or "its content is not what was written (the checksums differ)"
                raise DamagedCheckpoint(f"{folder / name} is damaged: {reason}. {_advice(folder)}")
    return progress


def _checksum_or_error(file: Path) -> tuple[str | None, OSError | None]:
    try:
        return file_checksum(file), None
    except OSError as error:
        return None, error


def _read_complete(folder: Path) -> dict:
    file = folder / COMPLETE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sound = set(content) <= KEYS and all(isinstance(size, int) for size in content["files"].values())
        sound = sound and isinstance(content["settings"], dict) and isinstance(content["cursor"], dict)
        if sound and content.pop("checksum", None) in (None, value_checksum(content)):
            return content
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it lacks {COMPLETE}. Use another one.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DamagedCheckpoint(f"{file} is damaged: its content is not what was written. {_advice(folder)}")


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
            check_content(folder)
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
