"""How a subpackage offers its recipes: each is imported when it is asked for, since each needs other libraries."""

from collections.abc import Callable, Sequence
from typing import Any

from neobert_hf_cli import load


def offer(package: str, recipes: Sequence[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a subpackage. Where a library is missing, its error names the extra to install.

    Args:
        package: its name.
        recipes: the names of its recipes, which `neobert_hf_cli` knows.
    """

    def get(name: str) -> Any:
        if name not in recipes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return load(name)

    return get
