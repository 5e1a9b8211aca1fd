"""Atomic writes: files and folders are written under a temporary name and then moved, so they are never incomplete.

The temporary name ends in `.<process id>.partial`. Nothing reads such a file or folder, and a killed process leaves
its own behind.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """Where this process writes the new version of a folder; nothing is there yet."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    remove(partial)
    return partial


def replace_folder(partial: Path, folder: Path) -> None:
    """Move the completed folder `partial` to `folder`; an old version there is removed once the new one is in place."""
    old = folder.with_name(f"{folder.name}.{os.getpid()}.old.partial")
    remove(old)
    if os.path.lexists(folder):
        os.rename(folder, old)
    os.rename(partial, folder)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a folder or a symbolic link, which is never followed. It need not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
