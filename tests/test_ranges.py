"""Every number of every setting has a range, and no random value passes that is out of it."""

import ast
import math
import re
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from neobert_hf.common.settings import IsPath, _declared_range, _parts_of_type
from neobert_hf.training.arguments import RANGES
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.properties import any_number, reproducible


PACKAGE = ROOT / "src" / "neobert_hf"


def settings_in(file) -> list[str]:
    """Classes with a field that has a help text: what a YAML file and the command line fill."""
    classes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if any("metadata={'help'" in ast.unparse(part) for part in node.body)]


FILES = [*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]
CLASSES = [(file, name) for file in sorted(FILES) for name in settings_in(file)]


@cache
def load(file, name: str) -> type:
    if file.is_relative_to(PACKAGE):
        module = import_module("neobert_hf." + str(file.relative_to(PACKAGE))[:-3].replace("/", "."))
    else:
        module = load_example(file.stem)
    return getattr(module, name)


@cache
def numbers_of(cls: type) -> dict:
    """The range of each number, or of the numbers of each list, by name; and its type."""
    hints = get_type_hints(cls, include_extras=True)
    numeric = {name: hint for name, hint in hints.items() if {int, float} & set(_parts_of_type(hint))}
    names, inherited = {field.name for field in fields(cls)}, RANGES if issubclass(cls, TrainingArguments) else {}
    return {
        name: (_declared_range(numeric[name]) or inherited.get(name), numeric[name]) for name in names & set(numeric)
    }


def required(cls: type) -> dict:
    """Values for the fields without a default, and for one of those of which one must be given."""
    hints = get_type_hints(cls)
    missing = [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]
    values = {str: "a.parquet", list[str]: ["a=b"], int: 128}
    return {name: values[hints[name]] for name in missing}


def test_all_settings_are_found():
    assert {"GlueSettings", "DataArguments", "PretrainingArguments", "QuerySettings"} <= {name for _, name in CLASSES}


@pytest.mark.parametrize("place", CLASSES, ids=lambda place: place[1])
def test_every_number_has_a_range(place):
    # Of Sentence Transformers: rates by the name of a parameter, which its Trainer checks.
    bare = [name for name, (allowed, _) in numbers_of(load(*place)).items() if allowed is None]
    assert set(bare) <= {"learning_rate_mapping"}, bare


# Whatever these words are said of is a path, and `index` may be the name of a collection of a server.
PATH_WORDS = re.compile(r"\b(folder|path or|YAML file|Parquet|Hub dataset,|Hub id|embedding model)\b")
NO_PATHS = {"index", "tag", "repo_id"}


@pytest.mark.parametrize("place", CLASSES, ids=lambda place: place[1])
def test_every_path_is_marked(place):
    """In a YAML file paths are relative to the file."""
    cls = load(*place)
    hints = get_type_hints(cls, include_extras=True)
    for setting in fields(cls):
        parts = list(_parts_of_type(hints[setting.name]))
        text = setting.metadata.get("help") or ""
        if cls.__module__.startswith("transformers") or str not in parts or setting.name in NO_PATHS:
            continue
        own = setting.name in {name for base in cls.__mro__ if "neobert" in base.__module__ for name in vars(base)}
        if own and PATH_WORDS.search(text):
            assert any(isinstance(part, IsPath) for part in parts), (setting.name, text)


def build(cls: type, name: str, value):
    """Settings with one value changed, which is an item where the setting is a list."""
    base = required(cls) | ({"use_cpu": True, "bf16": False} if issubclass(cls, TrainingArguments) else {})
    kinds = [getattr(part, "__origin__", part) for part in _parts_of_type(numbers_of(cls)[name][1])]
    return cls(**base | {name: [value] if list in kinds else {"a": value} if dict in kinds else value})


@pytest.mark.parametrize("place", CLASSES, ids=lambda place: place[1])
def test_nan_and_infinity_pass_nowhere(place):
    cls = load(*place)
    for name in numbers_of(cls):
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValueError, match=f"`{name}` is .*{value}.*must be"):
                build(cls, name, value)


@pytest.mark.parametrize("place", CLASSES, ids=lambda place: place[1])
def test_random_numbers(place):
    cls = load(*place)
    numbers = numbers_of(cls)
    if not numbers:
        return

    @reproducible(40)
    @given(st.sampled_from(sorted(numbers)), any_number | st.none())
    def check(name, value):
        allowed, parts = numbers[name][0], list(_parts_of_type(numbers[name][1]))
        try:
            build(cls, name, value)
        except ValueError as error:
            assert name in str(error), error
            return
        if value is None:
            assert type(None) in parts
        elif not (isinstance(value, str) and str in parts):
            assert type(value) in (int, float) and math.isfinite(value), (name, value)
            assert float in parts or value == int(value)
            assert allowed is None or value in allowed

    check()
