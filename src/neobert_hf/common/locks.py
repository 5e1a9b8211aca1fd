"""A lock for each output folder, so that only one process writes it at a time; a second one fails at once."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


class FolderInUse(SystemExit):
    """Another run is writing the folder. Ends this process with a message that names the folder."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a folder for as long as the block runs.

    The lock is a file beside the folder, `.<name>.lock`, or inside it if the parent folder is not writable. It is
    released when its process ends, however that happens.

    Args:
        folder: need not exist; its parent folder is created.

    Raises:
        FolderInUse: if another process holds the lock.
        OSError: if the folder cannot be written.
    """
    folder = Path(folder).resolve()
    check_writable(folder)
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = _lock_file(folder)
    lock, process = FileLock(file), os.getpid()
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise FolderInUse(
            f"{folder} is being written by another run. Two at a time would damage it: wait for that one, or end it, "
            "or choose another folder."
        ) from None
    try:
        yield
    finally:
        # A forked process that leaves the block has not locked anything.
        if os.getpid() == process:
            file.unlink(missing_ok=True)
            lock.release()
            # After an error such as bad input, no empty folders are left behind.
            with suppress(OSError):
                for parent in missing:
                    parent.rmdir()


def check_free(folders: Iterable[Path]) -> None:
    """Check before work begins that no other process holds the locks of folders that will be written one by one.

    Raises:
        FolderInUse: if another process holds one of them.
    """
    for folder in folders:
        if _lock_file(Path(folder).resolve()).exists():
            with folder_lock(folder):
                pass


def check_writable(folder: Path) -> None:
    """Raises:
    OSError: if no file can be created in the folder or, if it does not exist, in the folder that will hold it.
    """
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        # If there is a file in place of the folder itself, the command that writes the folder reports it.
        with tempfile.TemporaryFile(dir=place.parent if place == folder.resolve() and place.is_file() else place):
            pass
    except OSError as error:
        raise OSError(error.errno, f"{place} is not writable ({error.strerror}): choose another folder") from error


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock") if os.access(folder.parent, os.W_OK) else folder / ".lock"
