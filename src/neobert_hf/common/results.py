"""Result files of evaluations: of each run a JSON file with the settings that the result depends on."""

import json
from pathlib import Path

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
    """Read a result that holds these keys.

    Raises:
        ResultError: if the file is something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if keys <= content.keys():
            return content
    except (ValueError, AttributeError):
        pass
    raise ResultError(f"{file} is no result of this script. Delete it or take another `output_dir`.")


def check_same_settings(file: Path, stored: dict, current: dict) -> None:
    """Raises:
    ResultError: naming each setting in which a stored result and a run differ.
    """
    if differing := differences(stored, current):
        raise ResultError(
            f"{file} is the result of other settings:\n{list_differences(differing)}\nGive this model another `name`, "
            "take another `output_dir`, or delete the file to compute it again."
        )
