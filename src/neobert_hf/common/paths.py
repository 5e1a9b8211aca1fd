"""The one place that trusts no path: names that a file or a user gives stay inside the folder that they are meant for.

A model's folder may come from anybody. Its `modules.json`, its index of shards and its symbolic links could otherwise
make a command read, copy and publish files of the user that lie elsewhere.
"""

import difflib
import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from transformers.utils.hub import cached_file


# Linux and macOS allow names of 255 bytes; endings such as `.json` and `.1234.partial` come on top.
LONGEST_NAME = 200
# Separators of any system, and characters that nobody sees.
NOT_IN_A_NAME = re.compile(r"[/\\\x00-\x1f\x7f]")
# What ends in one of these is a file with rows, and no repository of the Hub.
DATA_FILE = re.compile(r"\.(csv|tsv|jsonl?|parquet|txt|md|conllu?|bio|iob2?)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
# Of a Hub repository in the cache: `models--OWNER--NAME/snapshots/COMMIT`, full of links to `../../blobs`.
CACHED = ("models--", "datasets--")


def path_inside(folder: Path, name: object, where: object) -> Path:
    """The path that a file names relative to its folder.

    Args:
        folder: what the path must stay in.
        name: what the file says; of any type, since a file may say anything.
        where: the file and the key, for the message.

    Raises:
        ValueError: if the name is no text, is absolute or holds `..`, or a symbolic link leads out of the folder.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ("..",)
    # Windows takes a backslash for a separator and a colon for the end of a drive.
    if ".." in parts or str(name).startswith("/") or re.search(r"[\\:\x00-\x1f]", str(name)):
        raise ValueError(f"{where} is {name!r}; it must be a path inside {folder}: relative, and without `..`.")
    path = folder / str(name)
    check_links(folder, [path])
    return path


def check_links(folder: Path, paths: Iterable[Path] | None = None) -> None:
    """Refuse symbolic links that lead out of a folder, and what is no file, as a pipe, from which reading never ends.

    In the Hub's cache links may lead into the same repository.

    Args:
        folder: may be a link itself; what it is called is the user's choice.
        paths: of its files; everything in it if None.

    Raises:
        ValueError: naming the first one.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith(CACHED):
        home = home.parent.parent
    for path in folder.rglob("*") if paths is None else paths:
        # Every folder on the way may be a link. Unlike `Path.resolve`, this has an answer for a link to itself. Links
        # to nothing inside the folder do no harm.
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(home):
            raise ValueError(
                f"{path} is or lies behind a symbolic link that leads out of {folder}, to {target}. Put a copy of the "
                "file in its place, or delete the link."
            )
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is a pipe or a device, no file. Delete it.")


def check_file_name(name: object, what: str) -> str:
    """The name as it is, if files and folders can be called by it.

    Args:
        what: what bears the name, for the message.

    Raises:
        ValueError: if it is no text, is empty or too long, or would lead to another folder.
    """
    sound = isinstance(name, str) and name.strip(" .") and not NOT_IN_A_NAME.search(name)
    if not sound or len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"{what} is {name!r}; files are called by it, so it must be 1 to {LONGEST_NAME} bytes long, "
            "hold no slashes and control characters, and be more than dots and spaces."
        )
    return name


def can_be_id(name: str) -> bool:
    """Whether a name has the form of an id of the Hub, `name` or `owner/name`, and not that of a file with rows."""
    parts = name.split("/")
    formed = len(parts) < 3 and all(parts) and parts[0][0] not in ".~" and not set("*?[\\") & set(name)
    return formed and not DATA_FILE.search(name)


def looks_like_path(name: str) -> bool:
    """Whether a name can be no id of the Hub, or is or begins with a folder that is here."""
    first, slash, _ = name.partition("/")
    return not can_be_id(name) or Path(name).exists() or (bool(slash) and Path(first).is_dir())


def beside_file(file: str | Path, name: str, setting: str, or_id: bool) -> str:
    """The path that a YAML file names: relative to that file, wherever one stands.

    Args:
        setting: what names it, for the message.
        or_id: whether it may be an id of the Hub as well, which it is if nothing of that name lies beside the file.

    Raises:
        ValueError: if nothing lies there, and something where one stands.
    """
    if not name or os.path.isabs(os.path.expanduser(name)):
        return os.path.expanduser(name)
    path = os.path.normpath(os.path.join(os.path.dirname(file), name))
    if os.path.exists(path) or glob.glob(path, recursive=True):
        return path
    if not name.startswith(".") and (os.path.exists(name) or glob.glob(name, recursive=True)):
        from_file = os.path.relpath(name, os.path.dirname(file) or ".")
        raise ValueError(
            f"{file}: `{setting}` is {name!r}. Paths in a file are relative to the file, and {path} does not exist: "
            f"write {from_file} if you mean the one in {os.getcwd()}, and ./{name} if the other one."
        )
    return name if or_id and can_be_id(name) else path


def check_exists(name: str, setting: str) -> None:
    """Refuse a path that does not exist, where Transformers would look for a repository of that name on the Hub.

    Args:
        name: a path, or the id of a repository.
        setting: what named it, for the message.

    Raises:
        FileNotFoundError: naming the nearest path that exists.
    """
    path = Path(name).expanduser()
    if path.exists() or not looks_like_path(name):
        return
    folder = next(parent for parent in path.parents if parent.exists())
    found = sorted(file.name for file in folder.glob("*"))
    near = difflib.get_close_matches(path.relative_to(folder).parts[0], found, n=1)
    advice = (
        f"did you mean {str(folder / near[0])!r}?" if near else f"{folder.absolute()} holds {', '.join(found[:8])}."
    )
    raise FileNotFoundError(f"`{setting}` is {name!r}, and there is no such file or folder; {advice}")


def check_model_exists(name: str, setting: str) -> None:
    """Refuse a model that is neither here nor on the Hub, in words that fit both.

    `runs/model` has the form of an id. Where it does not exist Transformers would speak of the Hub alone, as of a
    connection that failed.

    Args:
        name, setting: as of `check_exists`.

    Raises:
        OSError: saying that nothing is here, and what the Hub said.
    """
    check_exists(name, setting)
    if (folder := Path(name).expanduser()).exists():
        if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
            raise FileNotFoundError(
                f"`{setting}` is {name!r}, the folder of a run; did you mean {str(folder / 'model')!r}?"
            )
        return
    try:
        # Few repositories lack all of these. The last call says why there is none.
        for file in ("config.json", "modules.json", "tokenizer.json"):
            if cached_file(name, file, _raise_exceptions_for_missing_entries=False):
                return
        cached_file(name, "config.json")
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"`{setting}` is {name!r}. {Path.cwd()} holds no such folder, and the Hub gave no model of that id: "
            f"{reason}"
        ) from error
