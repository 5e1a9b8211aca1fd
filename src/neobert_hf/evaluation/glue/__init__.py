"""The GLUE protocol (paper, section 5.1 and appendix C), for any encoder and any task of your own."""

from neobert_hf.common.exports import offer


__all__ = ["run_glue"]
__getattr__ = offer(__name__, __all__)
