"""How a subpackage offers its recipes: each is imported when it is asked for, since each needs other libraries."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def offer(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a subpackage.

    Args:
        package: its name.
        modules: the module of each recipe, by the recipe's name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
