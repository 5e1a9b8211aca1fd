"""The recipes in examples/ as modules, so that a test can call their `main` in its own process."""

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
