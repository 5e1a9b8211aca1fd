"""The command `neobert-hf`: each subcommand is the `main` of a module, which is imported only when it is used."""

import sys
from argparse import ArgumentParser
from importlib import import_module

from huggingface_hub.errors import HTTPError


# Modules of `hub`, each with what its `main(args)` does. `main` returns the exit status (None is success) and
# raises ValueError or OSError with a message for the user.
COMMANDS = {
    "convert": "convert checkpoints of the original project to this package's layout, and back",
    "doctor": "check whether a folder or a Hub repository is healthy",
    "export": "write ONNX files, checked against PyTorch, a web page around them, or files for llama.cpp",
    "publish": "build a complete Hub repository, check it and push it; or send a web page of `export`",
}


def main(args: list[str] | None = None) -> int | str | None:
    """Run one subcommand.

    Args:
        args: the command line without the program's name; `sys.argv[1:]` if None.

    Returns:
        What `sys.exit` takes: the exit status, or the message of an error.
    """
    args = sys.argv[1:] if args is None else args
    parser = ArgumentParser("neobert-hf", description="Tools for NeoBERT checkpoints.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_args(args[:1]).command
    try:
        return import_module(f"neobert_hf.hub.{command}").main(args[1:])
    except ModuleNotFoundError as error:
        extra = "export" if command == "export" else "embed"
        return f"neobert-hf {command}: {error.name} is not installed: pip install 'neobert_hf[{extra}]'"
    except (ValueError, OSError, HTTPError) as error:  # The last is a connection to the Hub that failed.
        return f"neobert-hf {command}: {error}"


if __name__ == "__main__":
    sys.exit(main())
