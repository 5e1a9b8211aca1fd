"""Fine-tuning on your own tasks: text classification, regression, token classification, question answering."""

from neobert_hf.common.exports import offer


RECIPES = {
    "answer": "question_answering",
    "classify": "classification",
    "regress": "regression",
    "tag": "token_classification",
}
__all__ = list(RECIPES)
__getattr__ = offer(__name__, RECIPES)
