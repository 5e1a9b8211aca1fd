"""Output that is whole: a file or folder is written under another name, `<name>.<process id>.partial`, and then moved.

A folder can be locked, so that one process writes it at a time.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from fsspec.core import url_to_fs


# The names under which files and folders are written; `replace_folder` adds `old`.
PARTIAL = re.compile(r".+\.\d+(\.old)?\.partial")
# What the libraries that write say of a full disk, a quota or a limit of the system: not all raise an OSError.
NO_ROOM = re.compile(
    r"no space left|disk quota|file too large|os error (28|122|27)\b|file write failed|unexpected pos", re.IGNORECASE
)


class FolderInUse(OSError):
    """Another run is writing the folder, which the message names."""


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Keep other processes from writing a folder, which need not exist, for as long as the block runs.

    The lock is a file beside the folder, `.<name>.lock`, or inside it if the parent folder is not writable. The system
    releases it when the process ends, however that happens.

    Raises:
        FolderInUse: if another process holds the lock.
        OSError: if the folder cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = os.access(folder.parent, os.W_OK)
        file = folder.with_name(f".{folder.name}.lock") if beside else folder / ".lock"
        lock = FileLock(file)
        lock.acquire(blocking=False)
    except Timeout:
        raise FolderInUse(f"{folder} is being written by another run: wait for it, or choose another folder.") from None
    except OSError as error:
        raise OSError(error.errno, f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an exception."""
    # Of two processes that write the same file, each has its own: the name has the process id.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with saying_if_full(path):
            yield partial
            os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise


@contextmanager
def saying_if_full(path: str | Path) -> Iterator[None]:
    """Raise an OSError that names the path if the block fails since there is no room on the disk."""
    try:
        yield
    except Exception as error:
        if not NO_ROOM.search(str(error)):
            raise
        raise OSError(errno.ENOSPC, f"{path} could not be written: the disk is full. Make room on it") from error


def remove_partials(folder: Path) -> None:
    """Remove what killed processes have left half-written in a folder, which must be ours and locked."""
    for path in [path for path in folder.rglob("*.partial") if PARTIAL.fullmatch(path.name)]:
        remove(path)


def check_writable(path: str | Path) -> None:
    """Refuse a place for output, which need not exist, where this user may not write, before any work.

    Raises:
        PermissionError: naming the path.
    """
    place = Path(path).absolute()
    if not os.access(next(each for each in (place, *place.parents) if each.exists()), os.W_OK):
        raise PermissionError(f"{path} cannot be written (Permission denied): choose another folder.")


def absolute(path: str) -> str:
    """A local path from the root. A URL stays as it is."""
    return path if "://" in path else os.path.abspath(path)


def write_whole(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file at a path or URL of fsspec, such as `s3://bucket/file`, that is whole or does not exist."""
    files, path = url_to_fs(path)
    # Another machine may be writing the same file, if this one was only cut off and taken for dead.
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.partial"
    with saying_if_full(path):
        with files.open(temporary, "wb") as file:
            write(file)
        files.mv(temporary, path)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_parquet(path: Path, rows: Any) -> None:
    """Write a `Dataset`, which `Dataset.from_parquet` reads; the folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        rows.to_parquet(partial)


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
        with saying_if_full(folder):
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
