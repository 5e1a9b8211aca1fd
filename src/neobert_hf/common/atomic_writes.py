"""Files and folders that are written whole or not at all: under a temporary name, then renamed."""

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
    # A name of the process's own: a worker that outlives its killed parent for a moment may be writing the same file.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
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


def replace_folder(partial: Path, folder: Path) -> None:
    """Let a folder that is complete take the place of another, or of none."""
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(partial, folder)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its place when the block ends without an exception."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
