"""Hides every package but torch, Transformers, pytest and what these need, as on a GPU image that has no more.

Python imports a file of this name when it starts. A test puts this folder at the head of PYTHONPATH, so that the
processes that its process starts are like it.
"""

import importlib.metadata
import re
import sys


def needed_packages(*roots: str) -> set[str]:
    """Distributions that these need, without their extras, in the spelling of `canonical`."""
    found, pending = set(), list(roots)
    while pending:
        name = canonical(pending.pop())
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # It is for another system.
        found.add(name)
        pending += [re.match(r"[\w.-]+", text)[0] for text in requirements if "extra ==" not in text]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hidden_modules(kept: set[str]) -> set[str]:
    """Top-level modules of which every distribution is hidden."""
    owners = importlib.metadata.packages_distributions()
    return {module for module, names in owners.items() if not {canonical(name) for name in names} & kept}


class Finder:
    """A finder of modules that does not find the hidden ones; everything else is left to the one it stands for."""

    def __init__(self, finder, hidden: set[str]):
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name, *args, **kwargs):
        if name.partition(".")[0] in self.hidden:
            return None
        return self.finder.find_spec(name, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.finder, name)


HIDDEN = hidden_modules(needed_packages("torch", "transformers", "pytest", "neobert_hf") | {"pip"})
sys.meta_path[:] = [Finder(finder, HIDDEN) for finder in sys.meta_path]
