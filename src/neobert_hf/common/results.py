"""Result files of evaluations: of each run a JSON file with the settings that the result depends on."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from neobert_hf.common.atomic_writes import write_json
from neobert_hf.common.paths import check_file_name
from neobert_hf.common.settings import differences, list_differences


class ResultError(RuntimeError):
    """A stored result was made with other settings, or is damaged."""


def folder_of_results(name: str | None, model: str) -> str:
    """The folder of a model's results: its name, or one made from its path or Hub id.

    Raises:
        ValueError: if no folder can be called so.
    """
    found = (name if name is not None else model.strip("./") or Path(model).resolve().name).strip("./")
    if not found:
        raise ValueError(f"`name` is {name!r} and `model` {model!r}: give the model a `name` of letters or digits.")
    return check_file_name(found.replace("/", "__"), "`name` of the model")


def read_result(file: Path, keys: set[str]) -> dict:
    """Read a result that holds these keys, `settings` among them. A `score` and metrics are from -1 to 1.

    Raises:
        ResultError: if the file is something else, or not what was written.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not keys <= content.keys() or not isinstance(content["settings"], dict):
            raise KeyError
        numbers = {name: content[name] for name in keys & {"score"}} | content.get("metrics", {})
        written = content.pop("checksum", None)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ResultError(f"{file} is no result of this script. Delete it or take another `output_dir`.") from None
    again = "Delete the file to compute it again."
    if written is not None and written != _checksum_of(content):
        raise ResultError(f"{file} was changed after it was written, or is damaged. {again}")
    # Results of before have no checksum. A run that diverged has an error for a score.
    for name, value in {} if content.get("error") else numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:
            raise ResultError(f"{file}: `{name}` is {value!r}; it must be from -1 to 1. {again}")
    return content


def note_on_data(read: list[tuple[str, Any]]) -> list[str]:
    """A line of a report on the tasks that models were given different data of; none if there is no such task.

    Args:
        read: of every result that the report compares, its task and what tells its data from others.
    """
    data = defaultdict(set)
    for task, told in read:
        data[task].add(json.dumps(told, sort_keys=True))
    if differing := [task for task, found in data.items() if len(found) > 1]:
        return [f"Not all models were given the same data of {', '.join(differing)}: do not compare them there.", ""]
    return []


def write_result(file: Path, content: dict) -> None:
    """Write a result with a checksum of what it says.

    Settings are compared with those of every later run, and the seconds may differ between equal results.
    """
    content = json.loads(json.dumps(content))
    write_json(file, content | {"checksum": _checksum_of(content)})


def _checksum_of(content: dict) -> str:
    # Not at the top: measuring speed on a GPU takes torch and Transformers only, and its record has no checksum.
    from neobert_hf.common.fingerprints import value_checksum

    return value_checksum({name: value for name, value in content.items() if name not in ("settings", "seconds")})


def check_same_settings(file: Path, stored: dict, current: dict) -> None:
    """Raises:
    ResultError: naming each setting in which a stored result and a run differ.
    """
    if differing := differences(stored, current):
        raise ResultError(
            f"{file} is the result of other settings:\n{list_differences(differing)}\nGive this model another `name`, "
            "take another `output_dir`, or delete the file to compute it again."
        )
