"""Tools for a model's files: average, convert, check, export and publish them."""

from importlib import import_module


# Each tool and its module, which is imported when the tool is asked for: each needs other libraries.
TOOLS = {
    "average": "averaging",
    "convert": "conversion",
    "doctor": "diagnosis",
    "export": "exporting",
    "publish": "publishing",
}
__all__ = list(TOOLS)


def __getattr__(name: str):
    if name not in TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{TOOLS[name]}"), name)
