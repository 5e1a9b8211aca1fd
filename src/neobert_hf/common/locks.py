"""One process at a time writes a folder; a second one is told at once which process does."""

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


# What a file system answers that has no locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class FolderInUse(SystemExit):
    """Another process writes the folder. Ends this one with a message that names it."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a folder for as long as the block runs.

    The lock is one of the operating system's (`flock`) on a file beside the folder, `.<name>.lock`. It dies with its
    process, however that ends: a file that is left over locks nothing. It lies inside the folder where that is a mount
    point, since other machines mount it elsewhere, or where the parent cannot be written. Forked processes do not
    inherit it, so loader workers that outlive a killed parent for a moment do not keep it.

    Network disks: NFS (Linux), Lustre with the mount option `flock`, and others pass locks on, and processes on other
    machines are seen there as well. Where a disk has no locks, one in the temporary folder of this machine is taken
    instead, and a warning says that other machines are not seen. A disk that keeps locks to each machine without
    saying so cannot be told from others; so a warning is printed where a process on another machine has not ended its
    work. It goes on, since that process was killed in nearly all cases, and the run may have moved to this machine.

    Args:
        folder: it need not exist; the folder that it is in is made.

    Raises:
        FolderInUse: if another process holds the lock, with its machine, number and command.
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
            # Bad input leaves nothing behind.
            with suppress(OSError):
                for parent in missing:
                    parent.rmdir()


def check_free(folders: Iterable[Path]) -> None:
    """Before work begins, ask for the locks of folders that are to be written one by one.

    Raises:
        FolderInUse: if another process holds one of them.
    """
    for folder in folders:
        if _lock_file(Path(folder).resolve()).exists():
            with folder_lock(folder):
                pass


def check_writable(folder: Path) -> None:
    """Raises:
    OSError: if no file can be made in the folder or, if it does not exist, where it is to be.
    """
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        # A file in the place of the folder itself is for its command to name.
        with tempfile.TemporaryFile(dir=place.parent if place == folder.resolve() and place.is_file() else place):
            pass
    except OSError as error:
        raise OSError(error.errno, f"{place} cannot be written ({error.strerror}): choose another folder") from error


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
            f"warning: the disk of {folder} has no locks ({error}). Another process on {socket.gethostname()} that "
            "writes it would be noticed, one on another machine would not: see to it that there is none.",
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
            f"{folder} is being written by {who}. Two at a time would damage it: wait for that one, or end it, or "
            "choose another folder."
        ) from None
    return lock


def _describe_process() -> dict[str, str | int]:
    # Flags may hold secrets, such as a token.
    words = [sys.argv[0], *takewhile(lambda word: not word.startswith("-"), sys.argv[1:])]
    since = datetime.now(timezone.utc).isoformat(" ", "seconds")
    return {"command": shlex.join(words), "process": os.getpid(), "host": socket.gethostname(), "since": since}


def _read_note(file: Path) -> dict | None:
    """What the holder of a lock wrote about itself; None if it has not come to that."""
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
            "which did not end by itself. If it still runs there, the disk does not pass locks on: end one of the two.",
            file=sys.stderr,
        )
