"""The recipes in examples/ as modules, so that a test can call their `main` in its own process, and their flags."""

import importlib.util
from functools import lru_cache
from types import ModuleType

from tests.helpers.models import ROOT


@lru_cache
def load_example(name: str) -> ModuleType:
    """The script `examples/<name>.py`, imported once."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_flags(settings: dict) -> list[str]:
    """The command line of these settings, without those that are None."""
    given = {name: value for name, value in settings.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", *str(value).split())]
