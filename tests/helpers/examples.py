"""The recipes of examples/, so that a test can call their `main` in its own process, and their flags."""

import re
from collections.abc import Callable

from neobert_hf_cli import load, run
from tests.helpers.models import ROOT


def command_of(name: str) -> str:
    """The command of `neobert-hf` that the script `examples/<name>.py` runs."""
    (command,) = re.findall(r'^    run\("(\w+)"\)$', (ROOT / "examples" / f"{name}.py").read_text(), re.MULTILINE)
    return command


def load_example(name: str) -> Callable:
    """The recipe that the script runs; its `main` takes a command line."""
    return load(command_of(name))


def status_of(words: list[str]) -> int | str:
    """The status with which a command of `neobert-hf` ends: 0, or the message of an error."""
    try:
        run(words[0], words[1:])
    except SystemExit as ended:
        return ended.code
    return 0


def to_flags(settings: dict) -> list[str]:
    """The command line of these settings, without those that are None."""
    given = {name: value for name, value in settings.items() if value is not None}
    words = {name: value if isinstance(value, list) else str(value).split() for name, value in given.items()}
    return [part for name, value in words.items() for part in (f"--{name}", *map(str, value))]
