"""Tools for a model's files: average, convert, check, export and publish them."""

from typing import Any

from neobert_hf.hub.averaging import average
from neobert_hf.hub.conversion import convert
from neobert_hf.hub.diagnosis import doctor
from neobert_hf.hub.publishing import publish


__all__ = ["average", "convert", "doctor", "export", "publish"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: it needs ONNX and more, which the others do without.
    if name == "export":
        from neobert_hf.hub.exporting import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
