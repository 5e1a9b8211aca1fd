"""MTEB with the instructions of the paper (section 5.2), and tasks on your own data."""

from neobert_hf.common.exports import offer


__all__ = ["run_mteb"]
__getattr__ = offer(__name__, __all__)
