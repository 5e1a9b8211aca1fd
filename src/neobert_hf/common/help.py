"""The texts of `neobert-hf COMMAND --help`, which are stored so that they can be printed without importing torch.

    python -m neobert_hf.common.help

writes them to `neobert_hf/help`; a test compares them.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from neobert_hf.common.files import write_text
from neobert_hf.common.settings import help_text
from neobert_hf_cli import PACKAGE, PLACES, load


def help_of(function: Callable, everything: bool = False) -> str:
    """What a command does, and its settings; with `everything` also those of Transformers."""
    command = function.__name__
    words = " ".join(f"[{name}]" for name in function.positional)
    usage = " ".join(f"usage: neobert-hf {command} {words} [--config FILE.yaml] [--setting value ...]".split())
    purpose = inspect.getdoc(function).split("\n\n")[0]
    ending = [] if everything else ["", "--help_all also lists the settings of Transformers."]
    return "\n".join([usage, "", purpose, "", help_text(function.kinds, everything), *ending, ""])


def write_all(folder: Path = PACKAGE / "help") -> None:
    folder.mkdir(exist_ok=True)
    for command in PLACES:
        write_text(folder / f"{command}.txt", help_of(load(command)))


if __name__ == "__main__":
    write_all()
