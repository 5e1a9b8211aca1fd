"""Tools for a model's files: average, convert, check, export and publish them."""

from neobert_hf.common.exports import offer


RECIPES = {
    "average": "averaging",
    "convert": "conversion",
    "doctor": "diagnosis",
    "export": "exporting",
    "publish": "publishing",
}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
