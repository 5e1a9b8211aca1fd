"""The recipe of contextual document embeddings: its batches, trainer and evaluation."""

from dataclasses import dataclass

import torch
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from neobert_hf.embeddings.batches import ContrastiveCollator
from neobert_hf.embeddings.clusters import CLUSTER, VECTORS, ClusterBatchSampler
from neobert_hf.embeddings.contextual import embed_context
from neobert_hf.embeddings.trainer import EmbeddingTrainer


@dataclass
class ContextualCollator(ContrastiveCollator):
    """As `ContrastiveCollator`, with a `label`, bool (rows, rows): True where a document is not used as a negative.

    Args:
        margin: see `ContextualArguments.false_negative_margin`; if None, there is no `label`.
    """

    margin: float | None = None

    def __call__(self, features: list[dict]) -> dict:
        queries, positives = (torch.tensor([row[name] for row in features]) for name in VECTORS)
        batch = super().__call__(
            [{key: value for key, value in row.items() if key not in (CLUSTER, *VECTORS)} for row in features]
        )
        if self.margin is not None:
            scores = queries @ positives.T
            batch["label"] = (scores > scores.diagonal()[:, None] - self.margin).fill_diagonal_(False)
        return batch


class ContextualTrainer(EmbeddingTrainer):
    """Trains contextual models on clustered datasets. See `MixtureTrainer`."""

    data_collator_class = ContextualCollator
    batch_sampler_class = ClusterBatchSampler

    def get_data_collator(self, **kwargs) -> ContextualCollator:
        collator = super().get_data_collator(**kwargs)
        collator.margin = self.run.settings.false_negative_margin
        return collator

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        # Near 1, the first stage has collapsed: it hardly matters which corpus is given.
        self.track_loss_components({"context_cosine": self.loss.context_cosine})
        return loss


class ContextualRetrievalEvaluator(InformationRetrievalEvaluator):
    """Retrieval with a context drawn from the corpus, which has the same documents at every evaluation."""

    def __call__(self, model, *args, **kwargs) -> dict[str, float]:
        self.context = embed_context(model, self.corpus, seed=0, prompt=self.corpus_prompt, batch_size=self.batch_size)
        return super().__call__(model, *args, **kwargs)

    def embed_inputs(self, model, sentences, *args, **kwargs):
        return super().embed_inputs(model, sentences, *args, dataset_embeddings=self.context, **kwargs)
