"""Atomic writes: files and folders are written under a temporary name and then renamed, so they are never incomplete.

A killed process leaves `*.partial` behind: unfinished files and folders and, on file systems that cannot exchange two
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


# Constants of renameat2 (Linux): paths are relative to the working directory; the two are exchanged.
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an exception."""
    # The name has the process id, since a worker that briefly outlives its killed parent may be writing the same file.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    # If there is a symbolic link of this name, writing would follow it.
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
    """Write a matplotlib figure."""
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
    """Where this process writes the new version of a folder. Leftovers of earlier processes are removed."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    remove(partial)
    for other in folder.parent.glob(f"{glob.escape(folder.name)}.*.partial"):
        if _is_left_over(other):
            remove(other)
    return partial


def replace_folder(partial: Path, folder: Path) -> None:
    """Move the completed folder `partial` to `folder`, which may exist already.

    Linux exchanges the two in one step, so that either the old or the new one is there at any moment. If the file
    system cannot do this, the old one is set aside while the new one is renamed; if the process is killed at that
    point, `tidy_folder` restores the old one.
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
    """Exchange two folders in one step; False if the operating system or the file system cannot do that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    return renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced.partial")


def _restore(aside: Path) -> None:
    """Put a folder that was set aside back in its place; remove it if its new version is there."""
    folder = aside.with_name(aside.name.removesuffix(".replaced.partial"))
    if os.path.lexists(aside) and not os.path.lexists(folder):
        os.rename(aside, folder)
    remove(aside)


def tidy_folder(folder: Path) -> None:
    """Restore or remove what killed processes left in a folder and below. `folder_lock` calls this when it is taken."""
    for partial in sorted(folder.rglob("*.partial")):
        if partial.name.endswith(".replaced.partial"):
            _restore(partial)
        elif _is_left_over(partial):
            remove(partial)


def _is_left_over(partial: Path) -> bool:
    """Whether the process that wrote it has ended. A path without a process id in its name is not ours."""
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
    """Remove a file, a folder or a symbolic link, which is never followed. It need not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
