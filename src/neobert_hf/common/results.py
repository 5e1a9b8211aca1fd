"""Result files of evaluations: a JSON file for each run, with the settings that the result depends on."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from neobert_hf.common.paths import check_file_name


# What to do if a stored result depends on something else than this run.
ADVICE = "Give this model another `name`, use another `output_dir`, or delete the file to compute it again."


class ResultError(ValueError):
    """A file among the results is none, or a result says that its run failed."""


def folder_of_results(name: str | None, model: str) -> str:
    """The folder name for a model's results: the given name, or one made from the model's path or Hub id.

    Raises:
        ValueError: if no folder can have this name.
    """
    found = (name if name is not None else model.strip("./") or Path(model).resolve().name).strip("./")
    if not found:
        raise ValueError(f"`name` is {name!r} and `model` {model!r}: give the model a `name` of letters or digits.")
    return check_file_name(found.replace("/", "__"), "`name` of the model")


def read_result(file: Path, keys: set[str]) -> dict:
    """Read a result that has these keys; ResultError if the file is something else."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not keys <= content.keys():
        raise ResultError(f"{file} is not a result of this script. Delete it or use another `output_dir`.")
    return content


def note_on_data(read: list[tuple[str, Any]]) -> list[str]:
    """A line for a report that names the tasks in which models got different data; none if there is no such task.

    Args:
        read: for every result that the report compares, its task and a value that identifies its data.
    """
    data = defaultdict(set)
    for task, identity in read:
        data[task].add(json.dumps(identity, sort_keys=True))
    if differing := [task for task, found in data.items() if len(found) > 1]:
        return [f"Not all models got the same data for {', '.join(differing)}: do not compare them on these.", ""]
    return []
