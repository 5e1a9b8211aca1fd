"""Settings of the scripts: typed dataclasses, filled from a YAML file and the command line."""

import difflib
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, TypedDict, get_args, get_type_hints

import yaml
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import HfArgumentParser


def parse_config(*dataclass_types: type, args: list[str] | None = None) -> tuple[Any, ...]:
    """Fill dataclasses: their defaults, then `--config FILE.yaml` (flat keys), then the other command-line flags.

    A file may begin with `extends: OTHER.yaml`, relative to itself: its keys override those of the other.

    Args:
        dataclass_types: as for `transformers.HfArgumentParser`; `TrainingArguments` is one. `-h` prints their fields.
        args: the command line without the program's name; `sys.argv[1:]` if None.

    Returns:
        One instance for each type, in order.

    Raises:
        FileNotFoundError: naming the file that is most like the one that is not there.
        ValueError: on an unknown flag, and on an unknown key or a value of the wrong type in the YAML file.
        SystemExit: from argparse, on a flag's value that cannot be read and after `-h`.

    Example:

    ```python
    >>> (settings,) = parse_config(DemoArguments, args=["--config", "configs/demo.yaml", "--max_steps", "5"])
    ```
    """
    config = ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config", metavar="FILE.yaml", help="settings by name; flags override them")
    parser = HfArgumentParser(dataclass_types, parents=[config], allow_abbrev=False)
    hints = {name: hint for cls in dataclass_types for name, hint in get_type_hints(cls).items()}
    hints = {action.dest: hints[action.dest] for action in parser._actions if action.dest in hints}
    path = config.parse_known_args(args)[0].config
    values = _read_yaml(path, hints) if path is not None else {}
    parser.set_defaults(**values)
    for action in parser._actions:
        action.required = action.required and action.dest not in values
    # Without `look_for_args_file=False` Transformers would quietly add the flags in a file called like the script.
    *parsed, _, unknown = parser.parse_args_into_dataclasses(args, True, look_for_args_file=False)
    if unknown:
        advice = nearest(unknown[0].split("=")[0], [f"--{name}" for name in hints])
        raise ValueError(f"Unknown argument {unknown[0]!r} on the command line{advice} -h lists all.")
    return tuple(parsed)


def _read_yaml(path: str, hints: dict[str, Any], children: tuple[str, ...] = ()) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
    except FileNotFoundError:
        folder, name = os.path.split(path)
        there = [file.name for file in Path(folder).glob("*.yaml")]
        advice = nearest(name, there) if there else f"; there are no settings in {folder or 'this folder'}."
        raise FileNotFoundError(f"There is no file {path}{advice}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; it must hold one `key: value` a line.")
    if (parent := values.pop("extends", None)) is not None:
        parent = os.path.join(os.path.dirname(path), parent)
        if os.path.realpath(parent) in (*children, os.path.realpath(path)):
            raise ValueError(f"{path} extends {parent}, which extends it in turn.")
        return _read_yaml(parent, hints, (*children, os.path.realpath(path))) | _check_values(path, values, hints)
    return _check_values(path, values, hints)


def _check_values(path: str, values: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if key not in hints:
            raise ValueError(f"{path} has no meaning for the key {key!r}{nearest(str(key), list(hints))}")
        types = get_args(hints[key]) or (hints[key],)
        if hints[key] == list[float] and isinstance(value, list):
            values[key] = [float(item) if type(item) is int else item for item in value]
        # YAML 1.1 reads 1e-3 as a string and 1 as an int; both are meant as floats here.
        if float in types and isinstance(value, (int, str)) and type(value) not in types:
            try:
                values[key] = value if isinstance(value, bool) else float(value)
            except ValueError:
                pass  # A real string: refused below.
    try:
        validate_typed_dict(TypedDict("Settings", {key: hints[key] for key in values}), values)
    except StrictDataclassFieldValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    return values


def nearest(name: str, known: list[str]) -> str:
    """The end of an error message about an unknown name: the known one that is most like it, or all."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known are {', '.join(sorted(known))}."


def differences(stored: dict, current: dict) -> list[tuple[str, Any, Any]]:
    """Name, stored and current value of each setting in which the two differ."""
    names = sorted(stored.keys() | current.keys())
    return [(name, stored.get(name), current.get(name)) for name in names if stored.get(name) != current.get(name)]


def list_differences(differing: list[tuple[str, Any, Any]]) -> str:
    """A line each, for an error message."""
    return "\n".join(f"  {name}: {there!r} there, {now!r} now" for name, there, now in differing)
