"""Paths that a user or a file gives: whether they exist, are Hub ids, or can be the name of a file."""

import difflib
import glob
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_files


PACKAGE = Path(__file__).parents[1]
# A name with one of these endings is a data file, not a Hub repository.
DATA_FILE = re.compile(
    r"\.(csv|tsv|jsonl?|parquet|txt|md|markdown|rst|conllu?|bio|iob2?|ya?ml)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE
)
# The folder of a model or of a tokenizer holds at least one of these.
SIGNS_OF_A_MODEL = ("config.json", "modules.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")


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


def name_of_model(name: str | None, model: str) -> str:
    """The name of a model in reports, and of its folder of results.

    Args:
        name: the name that the user gives; if None, the last part of `model`, so that a model that was moved still has
            its results. All our recipes call their model `model`: then it is the name of the folder around it.
        model: a folder or Hub id.

    Raises:
        ValueError: if no folder can have this name.
    """
    if name is None:
        path = Path(model).expanduser()
        parts = path.resolve().parts if path.exists() else path.parts
        name = parts[-2] if parts[-1:] == ("model",) and len(parts) > 1 else parts[-1]
    return check_file_name(name, "`name` of the model")


def can_be_id(name: str) -> bool:
    """Whether a name has the form of a Hub id, `name` or `owner/name`, and not that of a data file."""
    parts = name.split("/")
    formed = len(parts) < 3 and all(parts) and parts[0][0] not in ".~" and not set("*?[\\") & set(name)
    return formed and not DATA_FILE.search(name)


def looks_like_path(name: str) -> bool:
    """Whether a name cannot be a Hub id, exists locally, or begins with a folder that exists locally."""
    first, slash, _ = name.partition("/")
    return not can_be_id(name) or Path(name).exists() or (bool(slash) and Path(first).is_dir())


def beside_file(file: str | Path, name: str, or_id: bool) -> str:
    """The path that a YAML file gives, which is relative to that file whatever the current folder is; a URL as it is.

    A path that leads out of the package's own configurations, such as `../../runs`, is relative to the current folder,
    as in a clone, where these files lie in `configs/`.

    Args:
        or_id: whether it may also be a Hub id; it is taken for one if nothing of that name exists beside the file.
    """
    if not name or "://" in name or os.path.isabs(os.path.expanduser(name)):
        return os.path.expanduser(name)
    path = os.path.normpath(os.path.join(os.path.dirname(file), name))
    if Path(file).is_relative_to(PACKAGE) and not Path(path).is_relative_to(PACKAGE / "configs"):
        path = os.path.relpath(path, PACKAGE)
    return name if or_id and can_be_id(name) and not glob.glob(path) else path


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
    if "://" in name:
        raise FileNotFoundError(
            f"`{setting}` is {name!r}, an address, which is not read here: download it, or give an id on the Hub, "
            "OWNER/NAME."
        )
    folder = next(parent for parent in path.parents if parent.is_dir())
    near = difflib.get_close_matches(path.relative_to(folder).parts[0], os.listdir(folder), n=1)
    advice = f"did you mean {str(folder / near[0])!r}?" if near else f"{folder.absolute()} holds {held_by(folder)}."
    raise FileNotFoundError(f"`{setting}` is {name!r}, but there is no such file or folder; {advice}")


def held_by(folder: Path) -> str:
    """The first visible files and folders in a folder, for a message."""
    return ", ".join(sorted(file.name for file in folder.glob("[!.]*"))[:8]) or "nothing"


def check_weights(folder: Path) -> None:
    """Refuse weights that were cut, or that are a pointer of Git LFS: no library names the file.

    Raises:
        OSError: naming the file.
    """
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "numpy"):
                pass
        except SafetensorError as error:
            raise OSError(
                f"{file} has {file.stat().st_size:,} bytes and is damaged ({error}): copy it again."
            ) from error


def check_model_exists(name: str, setting: str) -> None:
    """Refuse a model that exists neither locally nor on the Hub, with a message that covers both cases.

    A path such as `runs/model` has the form of a Hub id. If it does not exist, Transformers would report only a problem
    with the Hub, such as a failed connection.

    Args:
        name, setting: as for `check_exists`.

    Raises:
        OSError: saying that there is no such local folder, and what the Hub answered; or that its weights are damaged.
    """
    check_exists(name, setting)
    if (folder := Path(name).expanduser()).exists():
        if any((folder / file).exists() for file in SIGNS_OF_A_MODEL):
            check_weights(folder)
            return
        if folder.is_file():
            raise NotADirectoryError(f"`{setting}` is {name!r}, which is a file: give the folder of a model.")
        raise FileNotFoundError(
            f"`{setting}` is {name!r}, which holds none of {', '.join(SIGNS_OF_A_MODEL)}; it holds {held_by(folder)}. "
            "Give the folder of a model, such as the `model` that a training run writes, or an id on the Hub."
        )
    try:
        # Asked for together: without a connection, each file by itself would be tried for half a minute. If there is
        # none of them, the second call raises an error with the reason.
        if not cached_files(name, SIGNS_OF_A_MODEL, _raise_exceptions_for_missing_entries=False):
            cached_files(name, SIGNS_OF_A_MODEL)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"`{setting}` is {name!r}. There is no such folder in {Path.cwd()}, and no model of that id could be "
            f"loaded from the Hub: {reason}"
        ) from error


def check_complete(name: str, setting: str) -> None:
    """Refuse what `check_model_exists` refuses, and a folder that lacks a part of its model.

    Raises:
        OSError: also if it holds adapters alone, no configuration or no weights.
    """
    check_model_exists(name, setting)
    folder = Path(name)
    if not folder.is_dir():
        return
    found = f"`{setting}` is {name!r}, which holds"
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise OSError(
            f"{found} the adapters of a model alone (PEFT): merge them into it with `merge_and_unload()`, and give the "
            "folder that `save_pretrained` then writes, with its tokenizer."
        )
    if not any((folder / file).exists() for file in ("config.json", "modules.json")):
        raise FileNotFoundError(f"{found} no config.json; it holds {held_by(folder)}: copy all files of the model.")
    if not any(file for ending in ("safetensors", "bin") for file in folder.rglob(f"*.{ending}")):
        raise FileNotFoundError(f"{found} no weights; it holds {held_by(folder)}: copy all files of the model.")
