"""The GLUE protocol (paper, section 5.1 and appendix C), for any encoder and any task of your own."""

from neobert_hf.common.exports import offer


RECIPES = {"run_glue": "recipe"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
