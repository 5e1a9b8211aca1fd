"""The command `neobert-hf`: one subcommand a module, which is imported when it is asked for."""

import sys
from argparse import ArgumentParser
from importlib import import_module


# Name: module of this package, what it does. The module has `add_arguments(parser)` and `run(arguments)`, which returns
# the exit status (None is success) and raises ValueError or OSError with a message for the user.
COMMANDS = {
    "convert": ("checkpoints.convert", "checkpoints of the original project into this package's layout, and back"),
    "doctor": ("checkpoints.doctor", "say whether a folder or a Hub repository is healthy"),
    "export": (
        "checkpoints.onnx_export",
        "ONNX files for onnxruntime and transformers.js, checked against PyTorch",
    ),
    "publish": ("checkpoints.publish", "build a complete Hub repository, check it and push it"),
}


def main(args: list[str] | None = None) -> int | str | None:
    """Run one subcommand.

    Args:
        args: the command line without the program's name; `sys.argv[1:]` if None.

    Returns:
        What `sys.exit` takes: the exit status, or the message of an error.
    """
    args = sys.argv[1:] if args is None else args
    parser = ArgumentParser("neobert-hf", description="Checkpoints of NeoBERT.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    try:
        for name, (module_name, purpose) in COMMANDS.items():
            command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
            if args[:1] == [name]:
                module = import_module(f"neobert_hf.{module_name}")
                module.add_arguments(command)
                command.set_defaults(run=module.run)
        arguments = parser.parse_args(args)
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        extra = "export" if error.name.startswith("onnx") else "eval"
        return f"neobert-hf {args[0]}: {error.name} is not installed: pip install 'neobert_hf[{extra}]'"
    except (ValueError, OSError) as error:
        return f"neobert-hf {args[0]}: {error}"


if __name__ == "__main__":
    sys.exit(main())
