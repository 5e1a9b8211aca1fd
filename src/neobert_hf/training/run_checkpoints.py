"""Training checkpoints that are whole or not used.

The Trainer writes checkpoints in place and resumes from the newest folder unchecked; where `optimizer.pt` is missing it
starts Adam anew without a word. Here a folder counts once it holds a list of its files with their sizes and checksums,
written last. Those of before had sizes only.
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
# What it holds; the last three are younger.
KEYS = {"files", "engine", "settings", "cursor", "totals", "checksums", "checksum"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit the run."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is not what was written."""


@dataclass
class Progress:
    """What a checkpoint stores beside the Trainer's files.

    Args:
        engine: `plain` (one process or DDP), `FSDP` or `DeepSpeed`: the form that weights and optimizer have.
        settings: every setting that the result depends on, by name.
        cursor: where the data stand, if the recipe does not let the Trainer skip them.
        totals: of the steps before, what the next logged numbers count beside the steps to come.
    """

    engine: str
    settings: dict
    cursor: dict
    totals: dict = field(default_factory=dict)


def mark_complete(folder: Path, progress: Progress) -> None:
    """Flush every file of the folder to disk, then name them all in `complete.json`."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            _flush(file)
            files[str(file.relative_to(folder))] = file.stat().st_size
    _write_complete(folder, {"files": files, **asdict(progress)})


def add_checksums(folder: Path) -> None:
    """Add the checksums of all files to `complete.json`. They have just been written, and are read from memory still.

    A fifth of a second for 100 million parameters, in which training can go on: call it in a thread.
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
    """Folders `checkpoint-<step>` that were written to the end, oldest first."""
    return [folder for _, folder in sorted(_numbered(output_dir)) if (folder / COMPLETE).is_file()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """Not `checkpoint-6-backup`, which somebody may keep there."""
    folders = output_dir.glob("checkpoint-*")
    return [(step_of(folder), folder) for folder in folders if folder.name.removeprefix("checkpoint-").isdigit()]


def read_progress(folder: Path) -> Progress:
    """What a complete checkpoint stores, after a look at the sizes of its files; see `check_content`.

    Raises:
        DamagedCheckpoint: if a file is gone or has another size, or `complete.json` is not what was written.
        CheckpointError: if there is no `complete.json`.
    """
    content = _read_complete(folder)
    for name, size in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size:,} bytes" if file.is_file() else "missing"
            raise DamagedCheckpoint(f"{file} is {found}; it was written with {size:,} bytes. {_advice(folder)}")
    return Progress(content["engine"], content["settings"], content["cursor"], content.get("totals", {}))


def stored_settings(output_dir: Path) -> dict:
    """The settings of the run whose checkpoints a folder holds, from the newest that is not damaged; {} without one."""
    for folder in reversed(complete_checkpoints(output_dir)):
        with suppress(DamagedCheckpoint):
            return read_progress(folder).settings
    return {}


def check_content(folder: Path) -> Progress:
    """As `read_progress`; and read all files, 2 to 8 GB a second, to compare their checksums, if there are any.

    Raises:
        DamagedCheckpoint: naming the first file that is not what was written.
    """
    progress = read_progress(folder)
    checksums = _read_complete(folder).get("checksums", {})
    with ThreadPoolExecutor() as pool:
        found = pool.map(_checksum_or_error, [folder / name for name in checksums])
        for (name, written), (checksum, error) in zip(checksums.items(), found):
            if checksum != written:
                reason = error or "its bytes are not those that were written (their checksums differ)"
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
        raise CheckpointError(f"{folder} is no complete checkpoint: it lacks {COMPLETE}. Take another one.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DamagedCheckpoint(f"{file} is damaged: it is not what was written. {_advice(folder)}")


def _advice(folder: Path) -> str:
    return f"Restore the file; or delete {folder}, to resume from the checkpoint before it."


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
            "settings, or start anew with another `output_dir`. To train on from its weights, name it as the start of "
            "that: `init_from` of pretrain.py, `model` of every other recipe."
        )


def newest_checkpoint(output_dir: Path, settings: dict) -> tuple[Path, Progress] | tuple[None, None]:
    """The checkpoint to resume from and what it stores, if there is one: the newest that is not damaged.

    Raises:
        CheckpointError: if it is of a run with other settings or of another step, or if all are damaged.
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
            print(f"warning: {damage}\nwarning: {folder}, which is whole, is taken instead.", file=sys.stderr)
        return folder, progress
    if damages:
        raise CheckpointError("\n".join([*damages, "No other checkpoint is whole: delete them all to start anew."]))
    return None, None


def check_step(folder: Path) -> None:
    """Raises:
    CheckpointError: if the Trainer's state in a folder `checkpoint-<step>` is not of that step.
    """
    file = folder / "trainer_state.json"
    try:
        step = json.loads(file.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is no state of the Trainer ({error!r}). {_advice(folder)}") from error
    if step != step_of(folder):
        raise CheckpointError(f"{file} is of step {step}, and its folder is called {folder.name}: rename the folder.")


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
