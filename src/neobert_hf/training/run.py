"""A training run: its folder, its identity, and its checkpoints, of which only complete ones are used.

The Trainer writes checkpoints in place and resumes from the newest folder without checking it. If `optimizer.pt` is
missing, it silently restarts Adam. Here a folder counts as a checkpoint only once it holds `complete.json`, which is
written last and lists the other files.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from neobert_hf.common.files import write_json
from neobert_hf.common.run import Inputs, check_same_identity, identity_of, output_folder
from neobert_hf.training.arguments import result_settings


COMPLETE = "complete.json"
# The setting that names what a run starts from, by recipe, where it is not `model`.
STARTS = {"pretrain": "init_from", "distil": "student"}


@dataclass
class Run:
    """A training run.

    Attributes:
        folder: `output_dir`.
        identity: all that the trained weights depend on, by name, stored in checkpoints and compared on resume.
        checkpoint: from which an interrupted run goes on; None for a new run.
        start_setting: the setting that names what a run starts from.
    """

    folder: Path
    identity: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    start_setting: str = "model"

    @classmethod
    @contextmanager
    def start(
        cls,
        recipe: str,
        arguments: TrainingArguments,
        *settings: Any,
        inputs: Inputs,
        sources: Inputs | None = None,
        writes: Iterable[str] = (),
        leave_out: Iterable[str] = (),
    ) -> Iterator["Run"]:
        """Keep `output_dir` for this run while the block runs, and compare the settings with its newest checkpoint.

        The first of several processes locks the folder for all of them. What the weights depend on besides settings is
        added by `identify`, when data and models are known: a changed setting is found before they are read.

        Args:
            recipe: the name of the recipe, with which the folder is marked.
            settings: dataclasses of the recipe.
            inputs, sources: see `check_inputs`.
            writes: the names of what is written there besides checkpoints, the model and its log.
            leave_out: the names of settings that do not change the weights, or that `identify` gives their final value.

        Raises:
            SettingsMismatch: if the checkpoint is of a run with other settings.
            RuntimeError: if the processes that were started do not know of each other.
        """
        check_processes(arguments)
        folder, names = Path(arguments.output_dir), ("model", "checkpoint-*", "log.json", *writes)
        locked = output_folder(folder, recipe, names, inputs, sources)
        with nullcontext() if arguments.process_index else locked:
            identity = identity_of(*settings, result_settings(arguments), leave_out=leave_out)
            run = cls(folder, identity, newest_checkpoint(folder), STARTS.get(recipe, "model"))
            if run.checkpoint is not None:
                stored = read_progress(run.checkpoint).identity
                # What only `identify` knows is not compared yet.
                run.check_identity({name: value for name, value in stored.items() if name in identity})
            yield run

    def identify(self, **contents: Any) -> None:
        """Add what the weights depend on besides the settings, and compare all of it with the checkpoint.

        Args:
            contents: the fingerprints of data and models, and settings that follow from them.

        Raises:
            SettingsMismatch: if the checkpoint is of a run with others.
        """
        self.identity = identity_of(self.identity, **contents)
        if self.checkpoint is not None:
            self.check_identity(read_progress(self.checkpoint).identity)

    def check_identity(self, stored: dict[str, Any]) -> None:
        """Raises SettingsMismatch, if what the checkpoint stores is not the identity of this run."""
        advice = (
            "Resume with the same settings, or start a new run with another `output_dir`; to start it from this "
            f"checkpoint, give it as `{self.start_setting}`."
        )
        check_same_identity(self.checkpoint, stored, self.identity, advice)


def check_processes(arguments: TrainingArguments) -> None:
    """Raises:
    RuntimeError: if the processes that were started do not know of each other. If Accelerate finds no GPU, it silently
        lets each of them train by itself, and each would count as the first.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if arguments.world_size != started:
        raise RuntimeError(
            f"{started} processes were requested, but this process runs as one of {arguments.world_size} on "
            f"{arguments.device.type}. Several processes need a GPU each, or on a CPU configs/accelerate/cpu_ddp.yaml "
            "and ACCELERATE_USE_CPU=true."
        )


def check_alone(arguments: TrainingArguments) -> None:
    """Refuse several processes, for recipes that run in a single one."""
    # Without a GPU for each, Accelerate lets each process believe that it is alone.
    if (started := max(arguments.world_size, int(os.environ.get("WORLD_SIZE", 1)))) > 1:
        raise ValueError(f"{started} processes were started, but this recipe runs in one: start it with `python`.")


class CheckpointError(ValueError):
    """A checkpoint is incomplete, or of another engine than this run."""


@dataclass
class Progress:
    """What `complete.json` holds.

    Attributes:
        engine: see `ResumableTrainer`.
        identity: see `Run`.
        cursor: the position in the training data, if the recipe does not let the Trainer skip the rows already seen.
        files: the size of every other file of the checkpoint in bytes, by its path in the folder.
        stopped_early: whether training ended here without reaching its last step, since the score got no better.
        since_log: what was measured since the last log; see `ResumableTrainer.since_log`.
    """

    engine: str
    identity: dict
    cursor: dict
    files: dict[str, int]
    stopped_early: bool = False
    since_log: dict = field(default_factory=dict)


def mark_complete(folder: Path, engine: str, identity: dict, cursor: dict, **others: Any) -> None:
    """Flush every file of the folder to disk, then write `complete.json`.

    Args:
        others: further fields of `Progress`.
    """
    files = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        files[str(file.relative_to(folder))] = file.stat().st_size
    write_json(folder / COMPLETE, asdict(Progress(engine, identity, cursor, files, **others)))


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>`, also incomplete ones, oldest first. Not a user's `checkpoint-6-backup`."""
    folders = [each for each in output_dir.glob("checkpoint-*") if each.name.removeprefix("checkpoint-").isdigit()]
    return sorted(folders, key=step_of)


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Those that were written completely, oldest first."""
    return [folder for folder in checkpoints_of(output_dir) if (folder / COMPLETE).is_file()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def read_progress(folder: Path) -> Progress:
    """What a complete checkpoint stores.

    Raises:
        CheckpointError: if there is no `complete.json`, or it cannot be read.
    """
    if not (folder / COMPLETE).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it lacks {COMPLETE}. Use another one.")
    try:
        return Progress(**json.loads((folder / COMPLETE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / COMPLETE} cannot be read ({error}): delete the checkpoint.") from error


def check_files(folder: Path) -> None:
    """Refuse a checkpoint of which a file was lost or cut afterwards: training would go on with a fresh optimizer.

    Raises:
        CheckpointError: naming the file.
    """
    for name, size in read_progress(folder).files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"has {file.stat().st_size:,} bytes in place of {size:,}" if file.is_file() else "is missing"
            raise CheckpointError(
                f"{file} {found}: restore it, or delete the folder {folder} to go on from the checkpoint before it."
            )


def check_engine(folder: Path, engine: str) -> None:
    """Refuse a checkpoint that another engine wrote: Transformers would restart the optimizer.

    Raises:
        CheckpointError: naming both engines.
    """
    if (other := read_progress(folder).engine) != engine:
        raise CheckpointError(
            f"{folder} was written by the engine {other}, but this run uses {engine}, which stores weights and "
            "optimizer differently. Launch with the engine of the checkpoint; a single process and DDP are the same."
        )


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint, from which to resume; None if there is none.

    Raises:
        CheckpointError: if it has lost a file.
    """
    checkpoints = complete_checkpoints(output_dir)
    if not checkpoints:
        return None
    check_files(checkpoints[-1])
    return checkpoints[-1]


def delete_old(output_dir: Path, keep: int | None, best: int | None = None) -> None:
    """Keep the newest `keep` complete checkpoints, all if None, and that of step `best`.

    What a killed run left half-written or half-deleted, perhaps gigabytes, is deleted as well.
    """
    complete = complete_checkpoints(output_dir)
    old = [folder for folder in complete[:-keep] if step_of(folder) != best] if keep else []
    for folder in [*old, *(folder for folder in checkpoints_of(output_dir) if folder not in complete)]:
        delete_checkpoint(folder)


def delete_checkpoint(folder: Path) -> None:
    """Delete `complete.json` first, so that a half-deleted checkpoint does not count as complete."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)
