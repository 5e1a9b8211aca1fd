"""Tools for a model's files: average, convert, check, export and publish them."""

from neobert_hf.common.exports import offer


__all__ = ["average", "convert", "doctor", "export", "publish"]
__getattr__ = offer(__name__, __all__)
