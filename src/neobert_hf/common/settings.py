"""Settings of the recipes and of `neobert-hf`: dataclasses, filled from a YAML file and by flags, which override it.

`HfArgumentParser` makes a flag of every field. The metadata of a field hold its help and, if it is a path, one of

- `"path": True`: in a YAML file the path is relative to that file, and on the command line to the current folder;
- `"path": "or Hub id"`: the same, unless nothing is there and it has the form of a repository's id;
- `"path": "name=or Hub id"`: the same for what follows the first `=`.
"""

import difflib
import inspect
import json
import os
import sys
from argparse import Action, ArgumentParser
from dataclasses import MISSING, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser

from neobert_hf.common.paths import beside_file, check_exists


Entry = TypeVar("Entry")


class SettingsParser(HfArgumentParser):
    """Keeps which settings are paths (`action.path`), and raises ValueError where argparse would end the process."""

    def add_argument(self, *flags: str, path: bool | str = False, **options) -> Action:
        action = super().add_argument(*flags, **options)
        action.path = path or action.dest == "output_dir"
        return action

    def error(self, message: str) -> None:
        raise ValueError(f"{message}. -h lists all settings.")


def parse_config(
    *dataclass_types: type, args: list[str] | None = None, positional: tuple[str, ...] = (), prog: str | None = None
) -> tuple[Any, ...]:
    """Fill dataclasses: their defaults, then `--config FILE.yaml`, then the other flags.

    A file holds one `name: value` per line; `null` stands for no value. It may begin with `extends: OTHER.yaml`, whose
    values it overrides.

    Args:
        dataclass_types: as for `transformers.HfArgumentParser`; `TrainingArguments` is one. If one has a setting
            `config`, there is no `--config FILE.yaml`.
        args: the command line without the program's name; `sys.argv[1:]` if None.
        positional: settings that may be given first and without their flag, in this order.
        prog: the program's name in the help; the name of the script if None.

    Returns:
        One instance for each type, in order.

    Raises:
        ValueError: naming a setting that is unknown, missing or of the wrong type, and the file if it is in one.
        SystemExit: after `-h`.

    Example:
        `(settings,) = parse_config(DemoArguments, args=["--config", "configs/demo.yaml", "--max_steps", "5"])`
    """
    args = list(sys.argv[1:] if args is None else args)
    words = list(takewhile(lambda word: not word.startswith("-"), args))[: len(positional)]
    args = [f"--{name}={word}" for name, word in zip(positional, words)] + args[len(words) :]

    hints = {name: hint for kind in dataclass_types for name, hint in get_type_hints(kind).items()}
    config = ArgumentParser(add_help=False, allow_abbrev=False)
    if "config" not in hints:
        config.add_argument("--config", dest="config_file", metavar="FILE.yaml", help="settings; flags override them")
    usage = " ".join(["%(prog)s", *(f"[{name}]" for name in positional), "[--config FILE.yaml] [--setting value ...]"])
    parser = SettingsParser(dataclass_types, parents=[config], prog=prog, usage=usage, allow_abbrev=False)
    _show_ours_first(parser, dataclass_types)
    # A switch has a second action, `--no_...`, behind its own.
    settings = {action.dest: action for action in reversed(parser._actions) if action.dest in hints}

    # What is needed may be given in the file, and the flag of what is needed may be misspelt.
    needed = [action for action in settings.values() if action.required]
    for action in needed:
        action.required = False
    given = {}
    if file := getattr(config.parse_known_args(args)[0], "config_file", None):
        for place, values in read_extended(file):
            given |= _read_values(place, values, parser, settings, hints)
    parser.set_defaults(**given)
    if unknown := parser.parse_known_args(args)[1]:
        flag = unknown[0].split("=")[0]
        raise ValueError(
            f"{flag!r} on the command line is no setting{nearest(flag, [f'--{name}' for name in settings])}"
        )
    for action in needed:
        action.required = action.dest not in given
    # Without `look_for_args_file=False`, Transformers would silently add the flags from a file named after the script.
    return parser.parse_args_into_dataclasses(args, look_for_args_file=False)[: len(dataclass_types)]


def _show_ours_first(parser: SettingsParser, dataclass_types: tuple[type, ...]) -> None:
    """Move the settings of Transformers behind a line in the help."""
    bases = {base for kind in dataclass_types for base in kind.__mro__}
    theirs = {base for base in bases if base.__module__.startswith(("transformers.", "sentence_transformers."))}
    ours = {name for base in bases - theirs for name in inspect.get_annotations(base)} | {"output_dir"}
    inherited = {name for base in theirs for name in inspect.get_annotations(base)} - ours
    actions = parser._optionals._group_actions
    group = parser.add_argument_group("settings of Transformers, explained at its TrainingArguments")
    group._group_actions.extend(action for action in actions if action.dest in inherited)
    actions[:] = [action for action in actions if action.dest not in inherited]


def _read_values(
    file: str, values: dict[str, Any], parser: SettingsParser, settings: dict[str, Action], hints: dict[str, Any]
) -> dict[str, Any]:
    """The values of a YAML file, read as if they were flags. Its paths are relative to the file."""
    flags, empty = [], {}
    for name, value in values.items():
        if name not in settings:
            raise ValueError(f"{file} has the unknown key {name!r}{nearest(str(name), list(settings))}")
        action, several = settings[name], settings[name].nargs == "+"
        if value is None and type(None) in get_args(hints[name]) or value == [] and several:
            empty[name] = value
            continue
        if value is None or (isinstance(value, list) and not several):
            raise ValueError(f"{file}: `{name}` is {value!r}; it must be one value.")
        items = value if isinstance(value, list) else [value]
        if action.path:
            items = [_beside(file, item, action.path) for item in items]
        words = [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]
        flags += [f"--{name}", *words] if several else [f"--{name}={words[0]}"]
    try:
        found = vars(parser.parse_known_args(flags)[0])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return {name: found[name] for name in values} | empty


def _beside(file: str, value: str, kind: bool | str) -> str:
    name, equals, path = value.partition("=") if kind == "name=or Hub id" else ("", "", value)
    return name + equals + beside_file(file, path, or_id=kind is not True)


def read_yaml(path: str | Path, setting: str = "config") -> dict[str, Any]:
    """The mapping in a YAML file that a setting names; an empty one for an empty file.

    Raises:
        FileNotFoundError: naming the setting and the most similar file.
        ValueError: if it is not valid YAML or does not hold a mapping.
    """
    check_exists(str(path), setting)
    with open(path, encoding="utf-8") as file:
        try:
            content = yaml.safe_load(file) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
    return check_mapping(str(path), content)


def read_extended(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Path and keys, without `extends`, of a YAML file and of those that it extends, the farthest ancestor first."""
    content = read_yaml(path)
    if "extends" not in content:
        return [(path, content)]
    parent = os.path.join(os.path.dirname(path), str(content.pop("extends")))
    return [*read_extended(parent), (path, content)]


def read_entry(kind: type[Entry], where: str, entry: Any, **given: Any) -> Entry:
    """Make an object from the keys of an entry.

    Args:
        kind: a dataclass, whose fields are the keys; `strict` of `huggingface_hub` checks their types.
        where: the file and the name of the entry, for messages.
        entry: what the file holds.
        given: fields that are no keys.

    Raises:
        ValueError: naming the place and the key that is unknown, missing or of the wrong type.

    Example:

    ```python
    >>> read_entry(LocalTask, "tasks.yaml, task Search", {"type": "STS", "data": "pairs.csv"}, name="Search")
    ```
    """
    check_mapping(where, entry)
    known = [field.name for field in fields(kind) if field.name not in given]
    for key in entry:
        if key not in known:
            raise ValueError(f"{where} has the unknown key {key!r}{nearest(str(key), known)}")
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if missing := [key for key in needed if key not in entry and key not in given]:
        raise ValueError(f"{where} lacks {' and '.join(f'`{key}`' for key in missing)}: add it.")
    try:
        return kind(**entry, **given)
    except (StrictDataclassError, TypeError, ValueError) as error:
        # The cause is the first sentence of `strict` without its heading.
        raise ValueError(f"{where}: {error.__cause__ or error}") from error


def check_mapping(where: str, entry: Any) -> dict[str, Any]:
    """The entry unchanged; ValueError if it holds no keys."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} holds {entry!r:.60}; it must hold one `key: value` per line.")
    return entry


def nearest(name: str, known: list[str]) -> str:
    """The end of an error message about an unknown name: the most similar known name, or all known names.

    A known name that the unknown one begins with is preferred: for `rope_parameters` this suggests `rope`, and not
    `ddp_find_unused_parameters`.
    """
    begins = [one for one in known if name.startswith(f"{one}_")]
    matches = begins or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; the known ones are {', '.join(sorted(known))}."
