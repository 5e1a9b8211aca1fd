"""Settings of the recipes and of `neobert-hf`: typed dataclasses, filled from a YAML file and the command line."""

import difflib
import math
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import HfArgumentParser

from neobert_hf.common.paths import beside_file


@dataclass(frozen=True)
class Range:
    """The finite numbers that a setting allows, written beside its type: `share: Annotated[float, Range(0, 1)]`.

    Args:
        least, most: the smallest and the largest allowed number; None for no limit.
        above, below: limits that are not allowed themselves; None for no limit.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, number: Any) -> bool:
        # Every comparison with NaN is false. Neither torch nor a float can hold larger integers than these.
        return (
            abs(number) < (2**63 if isinstance(number, Integral) else math.inf)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least:,} to {self.most:,}"
        limits = {"{:,} or more": self.least, "above {:,}": self.above}
        limits |= {"{:,} or less": self.most, "below {:,}": self.below}
        given = [text.format(limit) for text, limit in limits.items() if limit is not None]
        return " and ".join(given) or "finite"


@dataclass(frozen=True)
class IsPath:
    """Marks a setting that is a path. In a YAML file, the path is relative to that file; see `beside_file`.

    Args:
        or_id: the setting may also be a Hub id.
        named: the setting is written `name=path`.
    """

    or_id: bool = False
    named: bool = False

    def resolve(self, file: str, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self.resolve(file, name, item) for item in value]
        if not isinstance(value, str):
            return value
        first, equals, path = value.partition("=") if self.named else ("", "", value)
        return first + equals + beside_file(file, path, name, self.or_id)


LocalPath = Annotated[str, IsPath()]
PathOrId = Annotated[str, IsPath(or_id=True)]
NamedPathOrId = Annotated[str, IsPath(or_id=True, named=True)]
# The paths among the arguments that recipes inherit from Transformers.
INHERITED_PATHS = {"output_dir": IsPath(), "logging_dir": IsPath()}

Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]


def check_ranges(settings: Any, inherited: Mapping[str, Range] = MappingProxyType({})) -> None:
    """Check every number in a dataclass, including those in lists and dictionaries, by the `Range` beside its type.

    A number without a `Range` must be finite. None is allowed where the type says so.

    Args:
        inherited: ranges of fields that another package declares, by name.

    Raises:
        ValueError: naming the setting, its value and what it must be.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for name in [setting.name for setting in fields(settings)]:
        types, value = list(_parts_of_type(hints[name])), getattr(settings, name)
        allowed = _declared_range(hints[name]) or inherited.get(name, Range())
        for item in _items(value):
            if not _fits(item, types, allowed):
                kind = "" if isinstance(item, Real) and abs(item) < math.inf else "a number, "
                if int in types and float not in types and not isinstance(item, Integral):
                    kind = "a whole number, "
                subject = "it" if item is value else "each"
                raise ValueError(f"`{name}` is {value!r}; {subject} must be {kind}{allowed}.")


@dataclass
class RangedSettings:
    """Settings that raise ValueError if a number is out of its range."""

    def __post_init__(self):
        check_ranges(self)


def check_needed(settings: Any, needed: str, names: Sequence[str]) -> None:
    """Refuse settings that have no effect without the setting `needed`."""
    for name in names:
        if getattr(settings, needed) is None and getattr(settings, name) is not None:
            found = f"`{name}` is {getattr(settings, name)!r} without `{needed}`"
            raise ValueError(f"{found}: set `{needed}`, or leave `{name}` out.")


def _fits(item: Any, types: list, allowed: Range) -> bool:
    """Whether a setting of these types may be, or contain, this item. Only numbers are compared with the range."""
    if isinstance(item, Real) and not isinstance(item, bool):
        return item in allowed and (float in types or int not in types or isinstance(item, Integral))
    others = tuple(kind for kind in (str, bool, NoneType) if kind in types)
    return isinstance(item, others) or not (int in types or float in types)


def _declared_range(hint: Any) -> Range | None:
    return _part_of_type(hint, Range)


def _part_of_type(hint: Any, kind: type) -> Any:
    return next((part for part in _parts_of_type(hint) if isinstance(part, kind)), None)


def _parts_of_type(hint: Any) -> Iterator[Any]:
    """`list[Annotated[int, Range(1)]] | None` as list, int, Range(1), NoneType."""
    yield hint
    for part in get_args(hint):
        yield from _parts_of_type(part)


def _items(value: Any) -> Iterator[Any]:
    """The items of lists and dictionaries, at any depth; for anything else, the value itself."""
    if not isinstance(value, (list, tuple, dict)):
        yield value
        return
    for item in value.values() if isinstance(value, dict) else value:
        yield from _items(item)


def parse_config(
    *dataclass_types: type,
    args: list[str] | None = None,
    positional: tuple[str, ...] = (),
    file_flag: str = "--config",
    prog: str | None = None,
) -> tuple[Any, ...]:
    """Fill dataclasses: their defaults, then `--config FILE.yaml` (flat keys), then the other command-line flags.

    Paths in a file are relative to that file (`LocalPath`, `PathOrId`), those of flags to the current folder.

    A file may begin with `extends: OTHER.yaml`, a path relative to the file. Its own keys override those of OTHER.yaml.

    Args:
        dataclass_types: as for `transformers.HfArgumentParser`; `TrainingArguments` is one. `-h` prints their fields.
        args: the command line without the program's name; `sys.argv[1:]` if None.
        positional: settings that may be given first and without their flag, in this order.
        file_flag: the flag that names the YAML file; choose another one where the dataclasses have a setting `config`.
        prog: the program's name in the help; the name of the script if None.

    Returns:
        One instance for each type, in order.

    Raises:
        FileNotFoundError: if the YAML file does not exist; the message names the file with the most similar name.
        ValueError: on an unknown flag, and on an unknown key or a value of the wrong type in the YAML file.
        SystemExit: from argparse, if it cannot parse a flag's value, and after `-h`.

    Example:

    ```python
    >>> (settings,) = parse_config(DemoArguments, args=["--config", "configs/demo.yaml", "--max_steps", "5"])
    ```
    """
    args = _name_positional(list(sys.argv[1:] if args is None else args), positional)
    config = ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument(
        file_flag, dest="settings_file", metavar="FILE.yaml", help="settings by name; flags override them"
    )
    first = f"May be given without a flag, in this order, before all flags: {', '.join(positional)}."
    options = {"prog": prog, "epilog": first if positional else None}
    parser = HfArgumentParser(dataclass_types, parents=[config], allow_abbrev=False, **options)
    hints = {name: hint for cls in dataclass_types for name, hint in get_type_hints(cls).items()}
    annotated = {name: hint for cls in dataclass_types for name, hint in get_type_hints(cls, None, None, True).items()}
    ranges = {name: found for name, hint in annotated.items() if (found := _declared_range(hint))}
    hints = {action.dest: hints[action.dest] for action in parser._actions if action.dest in hints}
    path = config.parse_known_args(args)[0].settings_file
    marks = {name: mark for name, hint in annotated.items() if (mark := _part_of_type(hint, IsPath))}
    values = _read_settings(path, hints, INHERITED_PATHS | marks) if path is not None else {}
    parser.set_defaults(**values)
    for action in parser._actions:
        action.required = action.required and action.dest not in values
        if action.dest in ranges:
            action.help = f"{action.help}; {ranges[action.dest]}"
    _refuse_unknown(_unknown_flags(args, parser), hints)
    # Without `look_for_args_file=False`, Transformers would silently add the flags from a file named after the script.
    *parsed, _, unknown = parser.parse_args_into_dataclasses(args, True, look_for_args_file=False)
    _refuse_unknown(unknown, hints)
    return tuple(parsed)


def _unknown_flags(args: list[str], parser: ArgumentParser) -> list[str]:
    """Flags that do not exist; none if help is asked for.

    They are found before argparse looks for required settings: if it misses one whose flag is misspelt, it does not
    name the mistake. Words with a space are values, as they are for argparse.
    """
    if {"-h", "--help"}.intersection(args):
        return []
    words = [word for word in args if word.startswith("--") and " " not in word]
    return [word for word in words if word.split("=")[0] not in parser._option_string_actions]


def _refuse_unknown(words: list[str], hints: dict[str, Any]) -> None:
    if words:
        advice = nearest(words[0].split("=")[0], [f"--{name}" for name in hints])
        raise ValueError(f"Unknown argument {words[0]!r} on the command line{advice} -h lists all.")


def _name_positional(args: list[str], positional: tuple[str, ...]) -> list[str]:
    """`a b --flag` as `--first a --second b --flag`."""
    words = list(takewhile(lambda word: not word.startswith("-"), args))
    if len(words) > len(positional):
        first = "every value needs a flag before it"
        if positional:
            first = f"only {', '.join(positional)} may be given without one, before all flags"
        raise ValueError(f"{words[len(positional)]!r} on the command line is a value without a flag: {first}.")
    flags = [part for name, word in zip(positional, words) for part in (f"--{name}", word)]
    return flags + args[len(words) :]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice. Other YAML loaders silently take the last value."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        mapping, keys = super().compose_mapping_node(anchor), set()
        scalars = [key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)]
        for key in [key for key in scalars if key.value != "<<"]:  # `<<` merges in the keys of another mapping.
            name = self.construct_object(key)
            if name in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {name!r} occurs twice", problem_mark=key.start_mark)
            keys.add(name)
        return mapping


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty one for an empty file.

    Raises:
        FileNotFoundError: if the file does not exist; the message names the file with the most similar name.
        ValueError: if it is not valid YAML, does not hold a mapping, or repeats a key at any depth.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=_UniqueKeyLoader) or {}
    except FileNotFoundError:
        folder, name = os.path.split(path)
        siblings = [file.name for file in Path(folder).glob("*.yaml")]
        advice = nearest(name, siblings) if siblings else f"; {folder or 'this folder'} holds no .yaml file."
        raise FileNotFoundError(f"There is no file {path}{advice}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a 13th month. The last: 5,000 brackets.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {error.problem}" if mark else str(error)
        raise ValueError(f"{path} is not valid YAML ({where}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold one `key: value` per line.")
    return content


def read_extended(path: str, children: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Path and keys, without `extends`, of a YAML file and of those that it extends, the farthest ancestor first.

    Raises:
        FileNotFoundError, ValueError: as `read_yaml`; also if `extends` is not text, or names a file that extends
            this one.
    """
    content = read_yaml(path)
    if "extends" not in content:
        return [(path, content)]
    if not isinstance(parent := content.pop("extends"), str):
        raise ValueError(f"{path}: `extends` is {parent!r}; it must name another YAML file.")
    parent, children = os.path.join(os.path.dirname(path), parent), (*children, os.path.realpath(path))
    if os.path.realpath(parent) in children:
        raise ValueError(f"{path} extends {parent}, which extends it in turn.")
    return [*read_extended(parent, children), (path, content)]


def _read_settings(path: str, hints: dict[str, Any], marks: dict[str, IsPath]) -> dict[str, Any]:
    """The checked settings of a file, on top of those of the files that it extends."""
    settings = {}
    for file, values in read_extended(path):
        settings |= _resolve(file, _check_values(file, values, hints), marks)
    return settings


def _resolve(path: str, values: dict[str, Any], marks: dict[str, IsPath]) -> dict[str, Any]:
    return {name: marks[name].resolve(path, name, value) if name in marks else value for name, value in values.items()}


def _check_values(path: str, values: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if key not in hints:
            raise ValueError(f"{path} has the unknown key {key!r}{nearest(str(key), list(hints))}")
        types = get_args(hints[key]) or (hints[key],)
        # A single value stands for a list of one.
        allowed = types if get_origin(hints[key]) in (Union, UnionType) else (hints[key],)
        if str not in allowed and list in map(get_origin, allowed) and isinstance(value, (str, int, float)):
            value = values[key] = [value]
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
    """The end of an error message about an unknown name: the most similar known name, or all known names.

    A known name that the unknown one begins with is preferred: for `rope_parameters` this suggests `rope`, and not
    `ddp_find_unused_parameters`.
    """
    begins = [one for one in known if name.startswith(f"{one}_")]
    matches = begins or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; the known ones are {', '.join(sorted(known))}."
