"""The recipe of contextual document embeddings: its settings, batches, trainer and evaluation."""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from neobert_hf.embeddings.arguments import RecipeArguments
from neobert_hf.embeddings.batches import ContrastiveCollator
from neobert_hf.embeddings.clusters import CLUSTER, VECTORS, ClusterBatchSampler
from neobert_hf.embeddings.contextual import embed_context
from neobert_hf.embeddings.trainer import EmbeddingTrainer


@dataclass
class ContextualArguments(RecipeArguments):
    """The model, the data and the context. The help texts say where a default comes from."""

    temperature: float = field(
        default=0.02, metadata={"help": "the cosine similarities are divided by this (reference code)"}
    )
    mini_batch_size: int = field(
        default=32, metadata={"help": "texts computed at a time; the trained weights do not depend on it"}
    )
    max_negatives: int | None = field(
        default=0, metadata={"help": "use at most this many hard negatives of a row (paper: none); all if unset"}
    )
    context_size: int = field(default=512, metadata={"help": "documents in a context (paper)"})
    context_dropout: float = field(
        default=0.005,
        metadata={"help": "share of the context that is hidden in training (Morris and Rush; reference code: 0)"},
    )
    soft_prompts: int = field(default=8, metadata={"help": "learned vectors after the context (reference code)"})
    text_position: int = field(
        default=0, metadata={"help": "position of a text's first token: 0 (ours) or `context_size` (reference code)"}
    )
    first_model: str = field(
        kw_only=True,
        metadata={"help": "embedding model that finds clusters and false negatives", "path": "or Hub id"},
    )
    false_negative_margin: float | None = field(
        default=0.0,
        metadata={
            "help": "a document is not used as a negative of a query if the first model scores it above the right "
            "document's score minus this (ours; the paper does not say); if unset, all documents are used"
        },
    )

    @property
    def context(self) -> dict[str, float]:
        """Those of the settings that the model's config holds."""
        names = ("context_size", "context_dropout", "soft_prompts", "text_position")
        return {name: getattr(self, name) for name in names}


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

    def get_data_collator(self, **kwargs) -> ContextualCollator:
        collator = super().get_data_collator(**kwargs)
        collator.margin = self.run.settings.false_negative_margin
        return collator

    def sampler_of_dataset(self, rows: Dataset, batch_size: int, seed: int) -> ClusterBatchSampler:
        return ClusterBatchSampler(rows, batch_size, seed)

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
