"""Output of a command: files that are whole, in a folder that one run writes at a time, and nothing of the user's.

- A file or folder is written under another name, which ends in `.<process id>.partial`, and then moved.
- `output_folder` locks a folder, and marks it as the output of a recipe. A folder without the mark that holds something
  under a name that the recipe writes is refused: what is there was written by somebody else.
- No input of a run may lie where the run writes.
"""

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from datasets import Dataset
from filelock import FileLock, Timeout
from fsspec.core import url_to_fs


# The mark of an output folder: `{"recipe": "pretraining"}`. It is written before anything else.
MARKER = "neobert_hf.json"
# The settings that name inputs, each with one path, Hub id or pattern, or several.
Inputs = Mapping[str, str | Iterable[str] | None]


class FolderInUse(SystemExit):
    """Another run is writing the folder. Ends this process with a message that names the folder."""


@contextmanager
def output_folder(
    folder: str | Path,
    recipe: str,
    writes: Iterable[str],
    inputs: Inputs,
    sources: Inputs | None = None,
    setting: str = "output_dir",
) -> Iterator[None]:
    """Keep a folder for one run while the block runs; see `check_inputs`, `folder_lock` and `mark_folder`."""
    check_inputs(folder, writes, inputs, sources, setting)
    with folder_lock(folder):
        mark_folder(folder, recipe, writes, setting)
        try:
            yield
        finally:
            # After an error such as bad input, no folder with nothing in it is left behind.
            if os.listdir(folder) == [MARKER]:
                shutil.rmtree(folder)


def check_inputs(
    folder: str | Path,
    writes: Iterable[str],
    inputs: Inputs,
    sources: Inputs | None = None,
    setting: str = "output_dir",
) -> None:
    """Refuse inputs that the run would replace.

    Args:
        folder: where the run writes.
        writes: the names of what it writes there; they may hold `*`.
        inputs: see `Inputs`.
        sources: further inputs, of which folders are read whole, so that the output must not lie in them.
        setting: the setting that names the folder.

    Raises:
        ValueError: naming the setting of the input and that of the output.
    """
    output, sources = _place(folder), dict(_places(sources or {}))
    for path, name in (dict(_places(inputs)) | sources).items():
        if path == output or (path.is_relative_to(output) and _matches(path.relative_to(output).parts[0], writes)):
            raise ValueError(f"`{name}` is {str(path)!r}, which would be replaced: choose another `{setting}`.")
        if path in sources and path.is_dir() and output.is_relative_to(path):
            raise ValueError(f"`{setting}` {str(folder)!r} lies in `{name}` {str(path)!r}, all of which is read.")


def _place(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


def _places(inputs: Inputs) -> Iterator[tuple[Path, str]]:
    """The place of every input that exists locally, and its setting."""
    for name, given in inputs.items():
        for path in [given] if isinstance(given, (str, Path)) else given or []:
            expanded = os.path.expanduser(path)
            for found in [expanded] if os.path.exists(expanded) else glob.glob(expanded, recursive=True):
                yield _place(found), name


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def mark_folder(folder: str | Path, recipe: str, writes: Iterable[str], setting: str = "output_dir") -> None:
    """Mark a folder as the output of a recipe. It need not exist, and may have the mark already.

    Raises:
        ValueError: if the folder is the output of another recipe, or has no mark and holds one of the names that the
            recipe writes.
    """
    folder = Path(folder)
    if folder.is_file():
        raise NotADirectoryError(f"`{setting}` is {str(folder)!r}, which is a file: give a folder.")
    # Listed before the mark is looked for: another process of this recipe may be starting.
    found = sorted(path.name for path in folder.glob("*") if _matches(path.name, writes))
    marker = folder / MARKER
    if marker.exists():
        other = json.loads(marker.read_text(encoding="utf-8"))["recipe"]
        if other != recipe:
            raise ValueError(f"{folder} is the output of {other}: choose another `{setting}` for {recipe}.")
    elif found:
        raise ValueError(
            f"{folder / found[0]} was not written by {recipe}, and would be replaced: choose another `{setting}`."
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(marker, {"recipe": recipe})


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Keep other processes from writing a folder, which need not exist, for as long as the block runs.

    The lock is a file beside the folder, `.<name>.lock`, or inside it if the parent folder is not writable. The system
    releases it when the process ends, however that happens.

    Raises:
        FolderInUse: if another process holds the lock.
        OSError: if the folder cannot be written.
    """
    folder = _place(folder)
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
        yield partial
        os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def absolute(path: str) -> str:
    """A local path from the root. A URL stays as it is."""
    return path if "://" in path else os.path.abspath(path)


def write_whole(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file at a path or URL of fsspec, such as `s3://bucket/file`, that is whole or does not exist."""
    files, path = url_to_fs(path)
    # Another machine may be writing the same file, if this one was only cut off and taken for dead.
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.partial"
    with files.open(temporary, "wb") as file:
        write(file)
    files.mv(temporary, path)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_parquet(path: Path, rows: Dataset) -> None:
    """Write rows that `Dataset.from_parquet` reads; the folder is created if needed."""
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
