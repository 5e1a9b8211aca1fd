"""Checks of untrusted paths: names given by a file or a user must stay inside the folder that they are meant for.

A model's folder may come from anybody. Without these checks, its `modules.json`, its index of shards and its symbolic
links could make a command read, copy and publish files of the user that lie elsewhere.
"""

import difflib
import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from transformers.utils.hub import cached_file


# A name with one of these endings is a data file, not a Hub repository.
DATA_FILE = re.compile(
    r"\.(csv|tsv|jsonl?|parquet|txt|md|markdown|rst|conllu?|bio|iob2?)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE
)
# The folder of a model or of a tokenizer holds at least one of these.
MODEL_FILES = ("config.json", "modules.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")
# How folders of repositories in the Hub's cache begin: `models--OWNER--NAME/snapshots/COMMIT`, whose files are links to
# `../../blobs`.
CACHED = ("models--", "datasets--")


def path_inside(folder: Path, name: object, where: object) -> Path:
    """The path that a file gives relative to its folder.

    Args:
        folder: the folder that the path must stay in.
        name: the value in the file; of any type, since a file may hold anything.
        where: the file and the key, for the message.

    Raises:
        ValueError: if the name is not text, is absolute or contains `..`, or a symbolic link leads out of the folder.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ("..",)
    if ".." in parts or str(name).startswith("/"):
        raise ValueError(f"{where} is {name!r}; it must be a path inside {folder}: relative, and without `..`.")
    path = folder / str(name)
    check_links(folder, [path])
    return path


def check_links(folder: Path, paths: Iterable[Path] | None = None) -> None:
    """Refuse symbolic links that lead out of a folder. In the Hub's cache, links may lead into the same repository.

    Args:
        folder: may itself be a link, since the user chose it.
        paths: the files to check; everything in the folder if None.

    Raises:
        ValueError: naming the first such path.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith(CACHED):
        home = home.parent.parent
    for path in folder.rglob("*") if paths is None else paths:
        # Every folder on the way may be a link. Unlike `Path.resolve`, `realpath` does not fail on a link to itself.
        # Dangling links that stay inside the folder do no harm.
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(home):
            raise ValueError(
                f"{path} is, or is reached through, a symbolic link that leads out of {folder}, to {target}. Replace "
                "the link with a copy of the file, or delete the link."
            )


def check_file_name(name: str, what: str) -> str:
    """The name unchanged, if it can be the name of a file or folder.

    Args:
        what: what the name is of, for the message.

    Raises:
        ValueError: if it is empty, or would lead to another folder.
    """
    if not name.strip(" .") or {"/", "\\"} & set(name):
        raise ValueError(f"{what} is {name!r}; files are named after it, so it must be a name without slashes.")
    return name


def can_be_id(name: str) -> bool:
    """Whether a name has the form of a Hub id, `name` or `owner/name`, and not that of a data file."""
    parts = name.split("/")
    formed = len(parts) < 3 and all(parts) and parts[0][0] not in ".~" and not set("*?[\\") & set(name)
    return formed and not DATA_FILE.search(name)


def looks_like_path(name: str) -> bool:
    """Whether a name cannot be a Hub id, exists locally, or begins with a folder that exists locally."""
    first, slash, _ = name.partition("/")
    return not can_be_id(name) or Path(name).exists() or (bool(slash) and Path(first).is_dir())


def beside_file(file: str | Path, name: str, setting: str, or_id: bool) -> str:
    """The path that a YAML file gives, which is relative to that file whatever the current folder is.

    Args:
        setting: the setting that holds the path, for the message.
        or_id: whether it may also be a Hub id; it is taken for one if nothing of that name exists beside the file.

    Raises:
        ValueError: if nothing exists there, but something exists at that path relative to the current folder.
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
            f"write {from_file} if you mean {name} in {os.getcwd()}, or ./{name} if you mean {path}."
        )
    return name if or_id and can_be_id(name) else path


def check_exists(name: str, setting: str) -> None:
    """Refuse a path that does not exist: Transformers would look for a repository of that name on the Hub.

    Args:
        name: a path, or the id of a repository.
        setting: the setting that holds the name, for the message.

    Raises:
        FileNotFoundError: naming the most similar path that exists.
    """
    path = Path(name).expanduser()
    if path.exists() or not looks_like_path(name):
        return
    folder = next(parent for parent in path.parents if parent.exists())
    near = difflib.get_close_matches(path.relative_to(folder).parts[0], _visible_names(folder), n=1)
    holds = "is a file" if folder.is_file() else f"holds {held_by(folder)}"
    advice = f"did you mean {str(folder / near[0])!r}?" if near else f"{folder.absolute()} {holds}."
    raise FileNotFoundError(f"`{setting}` is {name!r}, but there is no such file or folder; {advice}")


def _visible_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("[!.]*"))


def held_by(folder: Path) -> str:
    """The first visible files and folders in a folder, for a message."""
    return ", ".join(_visible_names(folder)[:8]) or "nothing"


def check_model_exists(name: str, setting: str) -> None:
    """Refuse a model that exists neither locally nor on the Hub, with a message that covers both cases.

    A path such as `runs/model` has the form of a Hub id. If it does not exist, Transformers would report only a problem
    with the Hub, such as a failed connection.

    Args:
        name, setting: as for `check_exists`.

    Raises:
        OSError: saying that there is no such local folder, and what the Hub answered.
    """
    check_exists(name, setting)
    if (folder := Path(name).expanduser()).exists():
        if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
            raise FileNotFoundError(
                f"`{setting}` is {name!r}, the output folder of a training run; did you mean {str(folder / 'model')!r}?"
            )
        if folder.is_file():
            raise ValueError(f"`{setting}` is {name!r}, a file; it must be the folder of a model, or an id on the Hub.")
        if not any((folder / file).exists() for file in MODEL_FILES):
            raise FileNotFoundError(
                f"`{setting}` is {name!r}, a folder without {', '.join(MODEL_FILES[:-1])} or {MODEL_FILES[-1]}; it "
                f"holds {held_by(folder)}. Give the folder of a model, or an id on the Hub."
            )
        return
    try:
        # Few repositories lack all of these. If this one does, the last call raises an error with the reason.
        for file in MODEL_FILES:
            if cached_file(name, file, _raise_exceptions_for_missing_entries=False):
                return
        cached_file(name, "config.json")
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"`{setting}` is {name!r}. There is no such folder in {Path.cwd()}, and no model of that id could be "
            f"loaded from the Hub: {reason}"
        ) from error
