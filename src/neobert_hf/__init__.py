"""NeoBERT (Le Breton et al., 2025, arXiv 2502.19587) as a native Transformers architecture.

Importing the package registers it with the Auto classes: `AutoModel.from_pretrained(...)` needs no `trust_remote_code`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_neobert import NeoBERTConfig
from .contextual_neobert import NeoBERTContextualConfig, NeoBERTContextualModel
from .modeling_neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    NeoBERTPreTrainedModel,
)


AutoConfig.register(NeoBERTConfig.model_type, NeoBERTConfig)
AutoModel.register(NeoBERTConfig, NeoBERTModel)
AutoModelForMaskedLM.register(NeoBERTConfig, NeoBERTForMaskedLM)
AutoModelForSequenceClassification.register(NeoBERTConfig, NeoBERTForSequenceClassification)
AutoModelForTokenClassification.register(NeoBERTConfig, NeoBERTForTokenClassification)
AutoModelForQuestionAnswering.register(NeoBERTConfig, NeoBERTForQuestionAnswering)
AutoModelForMultipleChoice.register(NeoBERTConfig, NeoBERTForMultipleChoice)
AutoConfig.register(NeoBERTContextualConfig.model_type, NeoBERTContextualConfig)
AutoModel.register(NeoBERTContextualConfig, NeoBERTContextualModel)

__all__ = [
    "NeoBERTConfig",
    "NeoBERTContextualConfig",
    "NeoBERTContextualModel",
    "NeoBERTForMaskedLM",
    "NeoBERTForMultipleChoice",
    "NeoBERTForQuestionAnswering",
    "NeoBERTForSequenceClassification",
    "NeoBERTForTokenClassification",
    "NeoBERTModel",
    "NeoBERTPreTrainedModel",
]
