"""Files and folders that are written whole or not at all: under a temporary name, then renamed.

A killed process leaves `*.partial` behind: what it had not finished, and, on file systems that cannot exchange two
folders, the old folder as `<name>.replaced.partial`. `tidy_folder` cleans up at the next start.
"""

import ctypes
import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# Of renameat2 (Linux): paths are relative to the working directory; exchange the two.
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an exception."""
    # A name of the process's own: a worker that outlives its killed parent for a moment may be writing the same file.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    # Writing would follow a symbolic link.
    remove(partial)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_png(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib."""
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=150, format="png")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its place when the block ends without an exception."""
    partial = partial_folder(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(partial, folder)
    finally:
        remove(partial)


def partial_folder(folder: Path) -> Path:
    """Where this process is to write the successor of a folder. What earlier ones left there is removed."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    remove(partial)
    for other in folder.parent.glob(f"{glob.escape(folder.name)}.*.partial"):
        if _is_left_over(other):
            remove(other)
    return partial


def replace_folder(partial: Path, folder: Path) -> None:
    """Let a folder that is complete take the place of another, or of none.

    Linux exchanges the two in one step, so that the old or the new one is there at any moment. Where the file system
    cannot, the old one is set aside for the time of a rename; after a kill at that point `tidy_folder` restores it.
    """
    aside = _aside(folder)
    _restore(aside)
    if not os.path.lexists(folder):
        os.rename(partial, folder)
    elif _exchange(partial, folder):
        remove(partial)
    else:
        os.rename(folder, aside)
        try:
            os.rename(partial, folder)
        finally:
            _restore(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    return renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced.partial")


def _restore(aside: Path) -> None:
    """Put a folder that was set aside back where it was, unless its successor is there."""
    folder = aside.with_name(aside.name.removesuffix(".replaced.partial"))
    if os.path.lexists(aside) and not os.path.lexists(folder):
        os.rename(aside, folder)
    remove(aside)


def tidy_folder(folder: Path) -> None:
    """Restore and remove what killed processes left in a folder and below. `folder_lock` does it at each start."""
    for partial in sorted(folder.rglob("*.partial")):
        if partial.name.endswith(".replaced.partial"):
            _restore(partial)
        elif _is_left_over(partial):
            remove(partial)


def _is_left_over(partial: Path) -> bool:
    """Whether no process writes it any more. What has no process in its name is somebody else's."""
    process = partial.stem.rpartition(".")[2]
    if not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def remove(path: Path) -> None:
    """Remove a file, a folder, or a symbolic link, which is never followed; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
