"""Fine-tuning on your own tasks: text classification, regression, token classification, question answering."""

from neobert_hf.common.exports import offer


__all__ = ["answer", "classify", "regress", "tag"]
__getattr__ = offer(__name__, __all__)
