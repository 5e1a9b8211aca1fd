"""MTEB with the instructions of the paper (section 5.2), and tasks on your own data."""

from neobert_hf.common.exports import offer


RECIPES = {"run_mteb": "recipe"}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
