"""What `--help` prints of a command. It is stored in `neobert_hf/help`, so that it can be printed without torch."""

import inspect
from collections.abc import Callable

from neobert_hf.common.settings import help_text


def help_of(function: Callable, everything: bool = False) -> str:
    """What a command does, and its settings; with `everything` also those of Transformers."""
    command = function.__name__
    words = " ".join(f"[{name}]" for name in function.positional)
    usage = " ".join(f"usage: neobert-hf {command} {words} [--config FILE.yaml] [--setting value ...]".split())
    purpose = inspect.getdoc(function).split("\n\n")[0]
    settings, more = help_text(function.kinds, everything), help_text(function.kinds, True)
    ending = ["", "--help_all also lists the settings of Transformers."] if more != settings else []
    return "\n".join([usage, "", purpose, "", settings, *ending, ""])
