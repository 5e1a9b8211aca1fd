"""NeoBERT in the server vLLM: its Transformers backend around our encoder, with our pooling and our classifier's head.

Imported by vLLM, by the names that `vllm_plugin.py` gives it.
"""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.seqwise import get_seq_pooling_method
from vllm.model_executor.models.interfaces import SupportsCrossEncoding
from vllm.model_executor.models.transformers import TransformersEmbeddingModel


class NeoBERTEmbeddings(TransformersEmbeddingModel):
    """Embeddings; a folder that does not say how they are pooled gives means, as in Sentence Transformers."""

    default_seq_pooling_type = "MEAN"


class NeoBERTClassifier(SupportsCrossEncoding, TransformersEmbeddingModel):
    """Classes of texts and, with one label, scores of pairs; the head of `NeoBERTForSequenceClassification`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        # Not super(), which is a protocol whose __init__ does nothing.
        TransformersEmbeddingModel.__init__(self, vllm_config=vllm_config, prefix=prefix)
        width, dtype = self.config.hidden_size, self.model_config.head_dtype
        self.dense = nn.Linear(width, width, dtype=dtype)
        self.classifier = nn.Linear(width, self.config.num_labels, dtype=dtype)
        pooling = get_seq_pooling_method(self.config.classifier_pooling.upper())
        self.pooler = DispatchPooler.for_seq_cls(
            self.model_config.pooler_config, pooling=pooling, classifier=self.classify
        )

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.dense(pooled)))
