"""A run: its folder, in which nothing of the user's is replaced, and its identity, all that its result depends on.

- `output_folder` locks a folder, and marks it as the output of a recipe. A folder without the mark that holds something
  under a name that the recipe writes is refused: what is there was written by somebody else.
- No input of a run may lie where the run writes.
- A path identifies nothing: a model may be trained on, and a folder may move. So settings that are paths are left out
  of an identity, and the fingerprints of what lies there take their place.

Trainings add checkpoints to this, see `neobert_hf.training.run`.
"""

import glob
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from neobert_hf.common.files import check_writable, folder_lock, remove_partials, write_json, write_whole


# The mark of an output folder: `{"recipe": "pretrain"}`. It is written before anything else.
MARKER = "neobert_hf.json"
# As `neobert_hf.common.fingerprints` makes them.
CHECKSUM = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}|[0-9a-f]{64}")
# The settings that name inputs, each with one path, Hub id or pattern, or several. Tables in memory are passed by.
Inputs = Mapping[str, Any]


class SettingsMismatch(ValueError):
    """A stored result, checkpoint or index was made with other settings, data or weights than those of this run."""


# The folder


@contextmanager
def output_folder(
    folder: str | Path,
    recipe: str,
    writes: Iterable[str],
    inputs: Inputs,
    sources: Inputs | None = None,
    setting: str = "output_dir",
) -> Iterator[None]:
    """Keep a folder for one run while the block runs; see `check_inputs`, `folder_lock` and `mark_folder`.

    A URL of fsspec is marked, too, but nothing can lock it.
    """
    if "://" in str(folder):
        mark_folder(folder, recipe, writes, setting)
        yield
        return
    check_inputs(folder, writes, inputs, sources, setting)
    with folder_lock(folder):
        if mark_folder(folder, recipe, writes, setting):
            remove_partials(Path(folder))
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
    output, sources = Path(folder).expanduser().resolve(), dict(_places(sources or {}))
    for path, name in (dict(_places(inputs)) | sources).items():
        if path == output or (path.is_relative_to(output) and _matches(path.relative_to(output).parts[0], writes)):
            raise ValueError(f"`{name}` is {str(path)!r}, which would be replaced: choose another `{setting}`.")
        if path in sources and path.is_dir() and output.is_relative_to(path):
            raise ValueError(f"`{setting}` {str(folder)!r} lies in `{name}` {str(path)!r}, all of which is read.")


def _places(inputs: Inputs) -> Iterator[tuple[Path, str]]:
    """The place of every input that exists locally, and its setting."""
    for name, given in inputs.items():
        paths = given if isinstance(given, (list, tuple)) else [given]
        for path in [each for each in paths if isinstance(each, (str, Path))]:
            expanded = os.path.expanduser(path)
            for found in [expanded] if os.path.exists(expanded) else glob.glob(expanded, recursive=True):
                yield Path(found).resolve(), name


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def mark_folder(folder: str | Path, recipe: str, writes: Iterable[str], setting: str = "output_dir") -> bool:
    """Mark a folder, or a URL of fsspec, as the output of a recipe. It need not exist, and may have the mark already.

    Returns:
        Whether it had the mark.

    Raises:
        ValueError: if the folder is the output of another recipe, or has no mark and holds one of the names that the
            recipe writes.
    """
    if "://" in str(folder):
        return _mark_url(str(folder).rstrip("/"), recipe, writes, setting)
    folder = Path(folder)
    check_writable(folder)
    if folder.is_file():
        raise NotADirectoryError(f"`{setting}` is {str(folder)!r}, which is a file: give a folder.")
    # Listed before the mark is looked for: another process of this recipe may be starting.
    found = sorted(path.name for path in folder.glob("*") if _matches(path.name, writes))
    marker = folder / MARKER
    mark = marker.read_text(encoding="utf-8") if marker.exists() else None
    if not _is_marked(str(folder), mark, found, recipe, setting):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(marker, {"recipe": recipe})
    return mark is not None


def _mark_url(url: str, recipe: str, writes: Iterable[str], setting: str) -> bool:
    files, root = url_to_fs(url)
    files.invalidate_cache()
    found = [os.path.basename(path) for path in (files.ls(root, detail=False) if files.isdir(root) else [])]
    mark = files.cat_file(f"{root}/{MARKER}") if MARKER in found else None
    found = sorted(name for name in found if _matches(name, writes))
    if not _is_marked(url, mark, found, recipe, setting):
        content = json.dumps({"recipe": recipe}, indent=2) + "\n"
        write_whole(f"{url}/{MARKER}", lambda file: file.write(content.encode()))
    return mark is not None


def _is_marked(folder: str, mark: str | bytes | None, found: list[str], recipe: str, setting: str) -> bool:
    """Whether a folder with this mark is one of the recipe; ValueError if it is another's, or holds what it writes."""
    if mark is not None and (other := json.loads(mark)["recipe"]) != recipe:
        raise ValueError(f"{folder} is the output of {other}: choose another `{setting}` for {recipe}.")
    if mark is None and found:
        raise ValueError(
            f"{folder}/{found[0]} was not written by {recipe}, and would be replaced: choose another `{setting}`."
        )
    return mark is not None


# The identity


def identity_of(*settings: Any, leave_out: Iterable[str] = (), **contents: Any) -> dict[str, Any]:
    """All that a result depends on, by name, as JSON returns it.

    Args:
        settings: dataclasses, of which paths are left out, and dictionaries.
        leave_out: the names of settings that do not change the result.
        contents: the fingerprints of data and models, and other things that the result depends on.
    """
    found = {}
    for each in settings:
        if is_dataclass(each):
            each = {one.name: getattr(each, one.name) for one in fields(each) if not one.metadata.get("path")}
        found |= each
    found = {name: value for name, value in found.items() if name not in leave_out}
    return json.loads(json.dumps(found | contents, default=str))


def differences(stored: dict, current: dict, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Name, stored and current value of each setting in which the two differ; `a.b` is the name of b within a."""
    found = []
    for name in sorted(stored.keys() | current.keys()):
        old, new = stored.get(name), current.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append((f"{prefix}{name}", old, new))
    return found


def check_same_identity(where: str | Path, stored: dict, current: dict, advice: str) -> None:
    """Refuse something stored that does not depend on the same as this run.

    Args:
        where: what is stored.
        stored, current: what `identity_of` returned then and now.
        advice: what the user can do.

    Raises:
        SettingsMismatch: with a line for each difference.
    """
    if differing := differences(stored, current):
        lines = [f"  {name}: {_change(old, new)}" for name, old, new in differing]
        raise SettingsMismatch("\n".join([f"{where} was made with other settings:", *lines, advice]))


def _change(old: Any, new: Any) -> str:
    # Two checksums say nothing that a user could read.
    if all(isinstance(value, str) and CHECKSUM.fullmatch(value) for value in (old, new)):
        return "one content there, another now"
    return f"{_short(old)} there, {_short(new)} now"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
