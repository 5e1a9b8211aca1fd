"""Fine-tuning on your own tasks: text classification, regression, token classification, question answering."""

from neobert_hf.tasks.classification import classify
from neobert_hf.tasks.question_answering import answer
from neobert_hf.tasks.regression import regress
from neobert_hf.tasks.token_classification import tag


__all__ = ["answer", "classify", "regress", "tag"]
