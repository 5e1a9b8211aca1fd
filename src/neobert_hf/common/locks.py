"""Locks so that only one process writes a folder at a time; a second one fails at once and names the first."""

import errno
import hashlib
import json
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout

from neobert_hf.common.atomic_writes import tidy_folder


# The error numbers by which a file system reports that it has no locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class FolderInUse(SystemExit):
    """Another process is writing the folder. Ends this process with a message that names the other one."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a folder for as long as the block runs.

    The lock is one of the operating system (`flock`) on a file beside the folder, `.<name>.lock`. It is released when
    its process ends, however that happens: a leftover file locks nothing. The file lies inside the folder if the folder
    is a mount point, since other machines mount it elsewhere, or if the parent folder is not writable. Forked processes
    do not inherit the lock, so data loader workers that briefly outlive a killed parent do not hold it.

    On network disks, NFS (Linux), Lustre with the mount option `flock`, and others share locks between machines, so
    that processes on other machines are noticed as well. If a disk has no locks, a lock file in this machine's
    temporary folder is used instead, and a warning says that processes on other machines go unnoticed. Some disks keep
    locks local to each machine without reporting it, and cannot be recognised. Therefore a warning is printed if a
    process on another machine has not finished its work. The block still runs: in nearly all cases that process was
    killed, and the run may have moved to this machine.

    Args:
        folder: need not exist; its parent folder is created.

    Raises:
        FolderInUse: if another process holds the lock; the message has its machine, process id and command.
        OSError: if the folder cannot be written.
    """
    folder = Path(folder).resolve()
    check_writable(folder)
    missing = [parent for parent in folder.parents if not parent.exists()]
    file, lock = _lock(folder)
    process = os.getpid()
    try:
        _warn_of_other_machine(file, folder)
        file.write_text(json.dumps(_describe_process()), encoding="utf-8")
        tidy_folder(folder)
        yield
    finally:
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
    if folder.is_mount() or not os.access(folder.parent, os.W_OK):
        return folder / ".lock"
    return folder.with_name(f".{folder.name}.lock")


def _lock(folder: Path, tries: int = 3) -> tuple[Path, FileLock]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = _lock_file(folder)
    try:
        return file, _take(file, folder)
    except FileNotFoundError:
        # Another process has removed the parent, which was empty.
        if tries == 1:
            raise
        return _lock(folder, tries - 1)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: the disk of {folder} has no locks ({error}). If another process on {socket.gethostname()} "
            "writes it, this is noticed, but not if a process on another machine does: make sure that there is none.",
            file=sys.stderr,
        )
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        file = Path(tempfile.gettempdir()) / f"neobert_hf-{name}.lock"
        return file, _take(file, folder)


def _take(file: Path, folder: Path) -> FileLock:
    lock = FileLock(file, fallback_to_soft=False, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = _read_note(file)
        who = "{command} (process {process} on {host}, since {since})".format_map(holder) if holder else "a process"
        raise FolderInUse(
            f"{folder} is being written by {who}. Two processes at a time would damage it: wait for that one, or end "
            "it, or choose another folder."
        ) from None
    return lock


def _describe_process() -> dict[str, str | int]:
    # Flags may hold secrets, such as a token.
    words = [sys.argv[0], *takewhile(lambda word: not word.startswith("-"), sys.argv[1:])]
    since = datetime.now(timezone.utc).isoformat(" ", "seconds")
    return {"command": shlex.join(words), "process": os.getpid(), "host": socket.gethostname(), "since": since}


def _read_note(file: Path) -> dict | None:
    """What the holder of a lock wrote about itself; None if it has not written it yet."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
        return note if note.keys() == _describe_process().keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _warn_of_other_machine(file: Path, folder: Path) -> None:
    note = _read_note(file)
    if note is not None and note["host"] != socket.gethostname():
        print(
            f"warning: {folder} was last written by {note['command']} (process {note['process']} on {note['host']}), "
            "which did not end normally. If it still runs there, this disk does not share locks between machines: end "
            "one of the two processes.",
            file=sys.stderr,
        )
