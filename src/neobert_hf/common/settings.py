"""Settings of the recipes: dataclasses, filled from a YAML file, and by flags or keywords, which override it.

`HfArgumentParser` makes a flag of every field. The metadata of a field hold its help and, if it is a path, one of

- `"path": True`: in a YAML file the path is relative to that file, and on the command line to the current folder;
- `"path": "or Hub id"`: the same, unless nothing is there and it has the form of a repository's id;
- `"path": "name=or Hub id"`: the same for what follows the first `=`.
"""

import difflib
import inspect
import json
import math
import os
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from itertools import takewhile
from numbers import Real
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser, TrainingArguments

from neobert_hf.common.paths import PACKAGE, beside_file, check_exists


Entry = TypeVar("Entry")
# Of the explanation of a setting in the help.
INDENT = " " * 8


class SettingsParser(HfArgumentParser):
    """Knows which settings are paths (`action.path`), and raises ValueError where argparse would end the process.

    Attributes:
        settings: the flag of each setting, by name.
    """

    def __init__(self, kinds: Sequence[type]):
        self.hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        config = ArgumentParser(add_help=False, allow_abbrev=False)
        # A recipe may have a setting `config` of its own.
        self.reads_config = "config" not in self.hints
        if self.reads_config:
            config.add_argument(
                "--config", dest="config_file", metavar="FILE.yaml", help="settings; flags override them"
            )
        super().__init__(kinds, parents=[config], add_help=False, allow_abbrev=False)
        self.settings: dict[str, Action] = {}
        for action in self._actions:
            # A switch has a second action, `--no_...`, behind its own.
            if action.dest in self.hints and action.dest not in self.settings:
                self.settings[action.dest] = action
        needed = _needed_of(kinds)
        for action in self.settings.values():
            action.required = action.dest in needed
            if action.path:
                action.type = os.path.expanduser  # A shell leaves `--model=~/x` as it is.

    def add_argument(self, *flags: str, path: bool | str = False, **options) -> Action:
        action = super().add_argument(*flags, **options)
        action.path = path or action.dest == "output_dir"
        if action.dest == "output_dir" and action.default is None and not (path or action.required):
            # Transformers says of its own what is not so here.
            action.help = "folder that the run writes"
        return action

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        """Of argparse: the value of a flag. `--subset null` is no value, as in a YAML file, and no subset `null`."""
        if arg_strings == ["null"] and type(None) in get_args(self.hints.get(action.dest)):
            return None
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> None:
        raise ValueError(f"{message}. --help lists all settings.")

    def read_config(self, file: str) -> dict[str, Any]:
        """The values of a YAML file and of those that it extends, in the types of the settings.

        Raises:
            FileNotFoundError: naming the configuration of the package, or else the file, whose name is nearly this one.
        """
        path, folder = find_config(file), PACKAGE / "configs"
        own = [config.relative_to(folder).as_posix() for config in folder.rglob("*.yaml")]
        if not os.path.exists(path) and (near := difflib.get_close_matches(file.removeprefix("configs/"), own, n=1)):
            raise FileNotFoundError(f"`config` is {file!r}, but there is no such file; did you mean {near[0]!r}?")
        given = {}
        for place, values in read_extended(path):
            given |= _read_values(place, values, self)
        return given


def parse_config(*kinds: type, args: list[str] | None = None, positional: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Fill dataclasses: their defaults, then `--config FILE.yaml`, then the other flags.

    A file holds one `name: value` per line; `null` stands for no value, as it does for a flag. It may begin with
    `extends: OTHER.yaml`, whose values it overrides.

    Args:
        kinds: as for `transformers.HfArgumentParser`; `TrainingArguments` is one. If one has a setting `config`, there
            is no `--config FILE.yaml`.
        args: the command line without the program's name; `sys.argv[1:]` if None.
        positional: settings that may be given first and without their flag, in this order.

    Returns:
        One instance for each type, in order.

    Raises:
        ValueError: naming a setting that is unknown, missing or of the wrong type, and the file if it is in one.

    Example:
        `(settings,) = parse_config(DemoArguments, args=["--config", "configs/demo.yaml", "--max_steps", "5"])`
    """
    args = list(sys.argv[1:] if args is None else args)
    if {"-h", "--help"} & set(args):
        # A script of its own, such as examples/demo.py; `neobert-hf` has printed the help of a command before this.
        print(help_text(kinds))
        sys.exit()
    words = list(takewhile(lambda word: not word.startswith("-"), args))[: len(positional)]
    args = [f"--{name}={word}" for name, word in zip(positional, words)] + args[len(words) :]
    parser = SettingsParser(kinds)
    flags = [word.split("=")[0].removeprefix("--") for word in args if word.startswith("--")]
    for name in dict.fromkeys(flags):
        if flags.count(name) > 1:
            print(f"note: `--{name}` stands on the command line twice; the last one counts.", file=sys.stderr)

    # What is needed may be given in the file, and the flag of what is needed may be misspelt.
    needed = [action for action in parser.settings.values() if action.required]
    for action in needed:
        action.required = False
    found, unknown = parser.parse_known_args(args)
    if unknown:
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            raise ValueError(
                f"{flag!r} stands on the command line without its setting, or behind one that takes a single value: "
                "`--help` lists all."
            )
        raise ValueError(
            f"{flag!r} on the command line is no setting{nearest(flag, [f'--{name}' for name in parser.settings])}"
        )
    file = getattr(found, "config_file", None)
    given = parser.read_config(file) if file else {}
    parser.set_defaults(**given)
    for action in needed:
        action.required = action.dest not in given
    # Without `look_for_args_file=False`, Transformers would silently add the flags from a file named after the script.
    return parser.parse_args_into_dataclasses(args, look_for_args_file=False)[: len(kinds)]


def settings_of_keywords(kinds: Sequence[type], given: dict[str, Any], recipe: str) -> tuple[Any, ...]:
    """Fill dataclasses from keywords, as `parse_config` does from flags: `config` names a YAML file of further values.

    Args:
        recipe: the name of the function that was called, for messages.

    Raises:
        TypeError: naming a setting that is unknown or missing.
        ValueError: as of `parse_config`, for the file.
    """
    known = {setting.name: setting for kind in kinds for setting in fields(kind) if setting.init}
    for name in given:
        if name not in known and name != "config":
            raise TypeError(f"{recipe}() has no setting {name!r}{nearest(name, list(known))}")
    file = given.get("config") if "config" not in known else None
    given = {name: value for name, value in given.items() if name in known}
    values = SettingsParser(kinds).read_config(str(file)) if file else {}
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    values |= {name: _as_declared(known[name], hints[name], value) for name, value in given.items()}
    if missing := [name for name in _needed_of(kinds) if name not in values]:
        raise TypeError(f"{recipe}() needs {' and '.join(f'`{name}`' for name in missing)}.")
    of_kinds = ({one.name for one in fields(kind)} for kind in kinds)
    return tuple(
        kind(**{name: value for name, value in values.items() if name in names}) for kind, names in zip(kinds, of_kinds)
    )


# The ranges of numbers, by the words with which a message names them.
RANGES = {
    "a number": math.isfinite,
    "0 or more": lambda number: number >= 0,
    "above 0": lambda number: number > 0,
    "1 or more": lambda number: number >= 1,
    "0 or more and below 1": lambda number: 0 <= number < 1,
    "above 0 and below 1": lambda number: 0 < number < 1,
    "0 to 1": lambda number: 0 <= number <= 1,
}


def check_numbers(settings: Any, ranges: dict[str, str]) -> None:
    """Refuse numbers that are not in their range. None is no number, and of a list each item is looked at.

    Args:
        settings: a dataclass.
        ranges: one of the names in `RANGES` for each setting.

    Raises:
        ValueError: naming the setting and its range.

    Example:
        `check_numbers(self, {"temperature": "above 0", "mini_batch_size": "1 or more"})`
    """
    for name, range_ in ranges.items():
        value = getattr(settings, name)
        for number in value if isinstance(value, (list, tuple)) else [value]:
            is_number = isinstance(number, Real) and math.isfinite(number)
            if number is not None and not (is_number and RANGES[range_](number)):
                raise ValueError(f"`{name}` is {value!r}; it must be {range_}.")


def _needed_of(kinds: Sequence[type]) -> list[str]:
    """The settings that must be given, in order."""
    needed = [setting.name for kind in kinds for setting in fields(kind) if setting.init and _is_needed(setting)]
    # Without it, Transformers would write to a folder that nobody has named.
    return [*needed, *("output_dir" for kind in kinds if issubclass(kind, TrainingArguments))]


def _is_needed(setting: Field) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _as_declared(setting: Field, hint: Any, value: Any) -> Any:
    """A value as a command line would give it: paths as texts, 2 as 2.0 and 2.0 as 2, one value of several as a list.

    Raises:
        ValueError: naming a setting that is None or none of its choices, no whole number where it must be one, or a
            text in place of a number or of True and False.
    """
    kinds = list(_kinds_in(hint))
    several = any(get_origin(kind) is list for kind in kinds)
    values = list(value) if several and isinstance(value, (list, tuple)) else [value]
    if value is None and setting.default is not None and not {Any, type(None)} & set(kinds):
        advice = "give a value" if _is_needed(setting) else "leave it out for its default"
        raise ValueError(f"`{setting.name}` is None, which is no value: {advice}.")
    choices = [one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    if not several:
        # Transformers' own are enumerations, or texts.
        choices += [one.value for kind in kinds if inspect.isclass(kind) and issubclass(kind, Enum) for one in kind]
    choices = setting.metadata.get("choices", choices)
    numbers = [kind.__name__ for kind in (int, float, bool) if kind in kinds and str not in kinds]
    for number, one in enumerate(values):
        if numbers and isinstance(one, str):
            raise ValueError(f"`{setting.name}` is the text {one!r}; it must be of the type {' or '.join(numbers)}.")
        if choices and one is not None and one not in choices:
            raise ValueError(f"`{setting.name}` is {one!r}{nearest(str(one), choices)}")
        if type(one) is float and int in kinds and float not in kinds:
            if one % 1:
                raise ValueError(f"`{setting.name}` is {one}; it must be a whole number.")
            values[number] = int(one)
        elif type(one) is int and float in kinds and int not in kinds:
            values[number] = float(one)
        elif isinstance(one, (str, Path)) and (setting.metadata.get("path") or setting.name == "output_dir"):
            values[number] = os.path.expanduser(one)
        elif isinstance(one, Path):
            values[number] = str(one)
    return values if several and value is not None else values[0]


def _kinds_in(hint: Any) -> Iterator[Any]:
    """A type and those in it: of `list[int] | None` also `list[int]`, `int` and `None`."""
    yield hint
    if get_origin(hint) is not Literal:
        for kind in get_args(hint):
            yield from _kinds_in(kind)


def help_text(kinds: Sequence[type], everything: bool = False) -> str:
    """The settings as `--help` prints them: the needed ones first, then each dataclass under its first sentence.

    Args:
        everything: also those of Transformers, but for the ones that the recipe refuses.
    """
    parser, shown = SettingsParser(kinds), set()
    ours = {name for kind in kinds for base in kind.__mro__ if not _is_theirs(base) for name in _annotations(base)}
    needed = [name for name, action in parser.settings.items() if action.required]
    groups = [("needed", needed)]
    for kind in kinds:
        # The fields of ancestors come first, as in the dataclass.
        names = [one.name for one in fields(kind) if one.init and one.name in ours]
        groups.append((inspect.getdoc(kind).splitlines()[0].split(". ")[0].rstrip("."), names))
    if everything:
        refused = {name for kind in kinds for name in getattr(kind, "refused", ())}
        theirs = sorted(parser.settings.keys() - ours - refused)
        groups.append(("of Transformers, explained at its TrainingArguments", theirs))
    lines = ["  --config FILE.yaml", f"{INDENT}settings; flags override them"] if parser.reads_config else []
    for title, names in groups:
        entries = [_help_of(parser.settings[name]) for name in names if name in parser.settings and name not in shown]
        shown |= set(names)
        if entries:
            lines += ["", f"{title}:", *entries]
    return "\n".join(lines)


def _is_theirs(kind: type) -> bool:
    return kind.__module__.startswith(("transformers.", "sentence_transformers."))


def _annotations(kind: type) -> list[str]:
    return list(inspect.get_annotations(kind))


def _help_of(action: Action) -> str:
    values = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    several = f"{values} [{values} ...]" if action.nargs == "+" else values
    said = " ".join((action.help or "").replace("%%", "%").split())
    default = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
    default = "" if default in (None, "", SUPPRESS) or action.required else f" ({default})"
    return f"  --{action.dest} {several}\n" + fill(
        f"{said}{default}", 100, initial_indent=INDENT, subsequent_indent=INDENT
    )


def find_config(file: str) -> str:
    """The path of a YAML file: as it is given, or else that of the configuration of this name in the package.

    So `--config configs/embeddings/distil.yaml`, as in a clone, and `--config embeddings/distil.yaml` work anywhere.
    """
    if os.path.exists(file):
        return file
    own = PACKAGE / "configs" / file.removeprefix("configs/")
    return str(own) if own.is_file() else file


def _read_values(file: str, values: dict[str, Any], parser: SettingsParser) -> dict[str, Any]:
    """The values of a YAML file, read as if they were flags. Its paths are relative to the file."""
    flags, empty, settings = [], {}, parser.settings
    for action in settings.values():
        action.required = False
    for name, value in values.items():
        if name not in settings:
            raise ValueError(f"{file} has the unknown key {name!r}{nearest(str(name), list(settings))}")
        action, several = settings[name], settings[name].nargs == "+"
        if value is None and type(None) in get_args(parser.hints[name]) or value == [] and several:
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
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    return check_mapping(str(path), content)


def read_extended(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Path and keys, without `extends`, of a YAML file and of those that it extends, the farthest ancestor first.

    A file that is extended lies beside the other one, or else it is one of the package's configurations.
    """
    content = read_yaml(path)
    if "extends" not in content:
        return [(path, content)]
    name = str(content.pop("extends"))
    beside, own = os.path.join(os.path.dirname(path), name), find_config(name)
    parent = own if os.path.exists(own) and not os.path.exists(beside) else beside
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

    A known name that the unknown one begins with is preferred, and then one that begins with it: for `rope_parameters`
    this suggests `rope`, and not `ddp_find_unused_parameters`; for `adamw` `adamw_torch`, and not `grokadamw`.
    """
    begins = [one for one in known if name.startswith(f"{one}_")]
    close = difflib.get_close_matches(name, known, n=max(1, len(known)))
    matches = begins or [one for one in known if one in close and one.startswith(name)] or close
    return f"; did you mean {matches[0]!r}?" if matches else f"; the known ones are {', '.join(sorted(known))}."
