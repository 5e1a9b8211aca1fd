"""The folder of a training run: one run writes it at a time, and of its checkpoints only complete ones are used.

The Trainer writes checkpoints in place and resumes from the newest folder without checking it. If `optimizer.pt` is
missing, it silently restarts Adam. Here a folder counts as a checkpoint only once it holds `complete.json`, which is
written last.
"""

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import TrainingArguments

from neobert_hf.common.files import Inputs, output_folder, write_json
from neobert_hf.common.fingerprints import check_same_settings


COMPLETE = "complete.json"
# What to do if a checkpoint depends on something else than this run.
ADVICE = (
    "Resume with the same settings, or start a new run with another `output_dir`; to start it from this checkpoint, "
    "give it as `init_from` to pretrain.py, or as `model` to any other recipe."
)


def training_folder(
    arguments: TrainingArguments, recipe: str, writes: Iterable[str], inputs: Inputs
) -> AbstractContextManager:
    """The `output_dir` of a training, which the first process locks for all processes; see `output_folder`.

    Args:
        writes: the names of what is written there besides checkpoints, the model and its log.

    Raises:
        RuntimeError: if the processes that were started do not know of each other. If Accelerate finds no GPU, it
            silently lets each of them train by itself, and each would count as the first.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if arguments.world_size != started:
        raise RuntimeError(
            f"{started} processes were requested, but this process runs as one of {arguments.world_size} on "
            f"{arguments.device.type}. Several processes need a GPU each, or on a CPU configs/accelerate/cpu_ddp.yaml "
            "and ACCELERATE_USE_CPU=true."
        )
    if arguments.process_index:
        return nullcontext()
    return output_folder(arguments.output_dir, recipe, ("model", "checkpoint-*", "log.json", *writes), inputs)


def check_alone(arguments: TrainingArguments) -> None:
    """Refuse several processes, for recipes that run in a single one."""
    # Without a GPU for each, Accelerate lets each process believe that it is alone.
    if (started := max(arguments.world_size, int(os.environ.get("WORLD_SIZE", 1)))) > 1:
        raise ValueError(f"{started} processes were started, but this recipe runs in one: start it with `python`.")


class CheckpointError(Exception):
    """A checkpoint is incomplete, or of another engine than this run."""


@dataclass
class Progress:
    """What `complete.json` holds.

    Attributes:
        engine: see `ResumableTrainer`.
        settings: every setting that the weights depend on.
        cursor: the position in the training data, if the recipe does not let the Trainer skip the rows already seen.
        stopped_early: whether training ended here without reaching its last step, since the score got no better.
    """

    engine: str
    settings: dict
    cursor: dict
    stopped_early: bool = False


def mark_complete(folder: Path, progress: Progress) -> None:
    """Flush every file of the folder to disk, then write `complete.json`."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    write_json(folder / COMPLETE, asdict(progress))


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>` that were written completely, oldest first. Not a user's `checkpoint-6-backup`."""
    folders = [each for each in output_dir.glob("checkpoint-*") if each.name.removeprefix("checkpoint-").isdigit()]
    return sorted((folder for folder in folders if (folder / COMPLETE).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def read_progress(folder: Path) -> Progress:
    """What a complete checkpoint stores.

    Raises:
        CheckpointError: if there is no `complete.json`.
    """
    if not (folder / COMPLETE).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it lacks {COMPLETE}. Use another one.")
    return Progress(**json.loads((folder / COMPLETE).read_text(encoding="utf-8")))


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


def newest_checkpoint(output_dir: Path, settings: dict) -> Path | None:
    """The newest complete checkpoint, from which to resume; None if there is none.

    Raises:
        SettingsMismatch: if it is of a run with other settings.
    """
    checkpoints = complete_checkpoints(output_dir)
    if not checkpoints:
        return None
    check_same_settings(checkpoints[-1], read_progress(checkpoints[-1]).settings, settings, ADVICE)
    return checkpoints[-1]


def delete_old(output_dir: Path, keep: int | None, best: int | None = None) -> None:
    """Keep the newest `keep` complete checkpoints, all if None, and that of step `best`."""
    checkpoints = complete_checkpoints(output_dir)
    for folder in checkpoints[:-keep] if keep else []:
        if step_of(folder) != best:
            delete_checkpoint(folder)


def delete_checkpoint(folder: Path) -> None:
    """Delete `complete.json` first, so that a half-deleted checkpoint does not count as complete."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)
