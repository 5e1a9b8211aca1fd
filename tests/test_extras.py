"""Each command runs with the extra that it names, and with no other library: by metadata, nothing is installed."""

import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from neobert_hf_cli import PLACES
from tests.helpers.models import ROOT


tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
# What is imported only where a setting asks for it, and what only the commands beside `convert` need.
ASKED_FOR = {"ray", "weaviate"}
OF_OTHER_COMMANDS = {"": {"sentence_transformers"}}
# Commands are loaded, and everything that their modules import inside of functions is looked for, in a process that
# finds only some of the installed libraries.
PROGRAM = """
import ast, importlib.util, json, sys

hidden, hidden_distributions, commands = json.loads(sys.argv[1])


class Finder:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *args):
        return None if name.split(".")[0] in hidden else self.finder.find_spec(name, *args)

    def find_distributions(self, *args):
        found = getattr(self.finder, "find_distributions", lambda *args: ())(*args)
        return [each for each in found if each.name not in hidden_distributions]


sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
from neobert_hf_cli import load

for command in commands:
    load(command)
missing = set()
for name, module in list(sys.modules.items()):
    if name.startswith("neobert_hf"):
        with open(module.__file__) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            missing |= {top for each in names if importlib.util.find_spec(top := each.split(".")[0]) is None}
print(json.dumps(sorted(missing)))
"""


def own_requirements() -> tuple[list[str], dict[str, list[str]]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def closure(extra: str) -> set[str]:
    """Every distribution that `pip install neobert_hf[extra]` installs, of those that are installed here."""
    base, extras = own_requirements()
    found, waiting = set(), [*base, *(each for name in extra.split(",") if name for each in extras[name])]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name == "neobert-hf":
            waiting += [each for inner in requirement.extras for each in extras[inner]]
            continue
        for chosen in ("", *requirement.extras):
            if (name, chosen) in found:
                continue
            found.add((name, chosen))
            try:
                needed = map(Requirement, requires(name) or [])
            except PackageNotFoundError:
                continue
            waiting += [str(each) for each in needed if not each.marker or each.marker.evaluate({"extra": chosen})]
    return {name for name, _ in found}


EXTRAS = sorted({extra for _, extra, _ in PLACES.values()})


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_all_that_its_commands_need(extra):
    installed = closure(extra) | {"neobert-hf"}
    owners = {module: set(map(canonicalize_name, names)) for module, names in packages_distributions().items()}
    hidden = [module for module, names in owners.items() if not installed & names]
    assert {"mkdocs", "pytest", "xllamacpp"} <= set(hidden) and not {"neobert_hf", "torch"} & set(hidden)
    distributions = [each.name for each in importlib.metadata.distributions()]
    distributions = [name for name in distributions if canonicalize_name(name) not in installed]
    commands = [name for name, place in PLACES.items() if place[1] == extra]
    arguments = [sys.executable, "-c", PROGRAM, json.dumps([hidden, distributions, commands])]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    missing = set(json.loads(done.stdout.splitlines()[-1]))
    assert missing <= ASKED_FOR | OF_OTHER_COMMANDS.get(extra, set())
