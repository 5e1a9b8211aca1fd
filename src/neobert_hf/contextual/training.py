"""Training of contextual models: InfoNCE through both stages, batches of similar rows, evaluation with a context.

A batch of 512 texts that each read 512 context vectors does not fit in memory. So all embeddings are first computed
without gradients, a few texts at a time: the context, then the texts that read the context. The loss gives the gradient
of each embedding. Then everything is computed once more, with gradients: first the texts, whose gradients with respect
to the context are summed, and then the context itself. This is GradCache, for two stages.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from neobert_hf.contextual.clusters import CLUSTER, VECTORS, ClusterBatchSampler
from neobert_hf.contextual.model import embed_context
from neobert_hf.embeddings.batches import ContrastiveCollator
from neobert_hf.embeddings.trainer import EmbeddingTrainer


class ContextualLoss(CachedLossMixin, nn.Module):
    """InfoNCE of each query against all documents and hard negatives of its batch, with documents as the context.

    Args:
        model: a contextual model, see `build_contextual_encoder`.
        temperature: the cosine similarities are divided by it.
        mini_batch_size: texts computed at a time. The gradients do not depend on it.

    Attributes:
        context_cosine: the mean cosine similarity of the context vectors of the last batch.

    References:
        The paper, appendix G; https://arxiv.org/abs/2410.02525 (CDE), https://arxiv.org/abs/2101.06983 (GradCache).
    """

    def __init__(self, model: SentenceTransformer, temperature: float, mini_batch_size: int):
        super().__init__()
        self.context_size = model[0].model.config.context_size
        self.model = model
        self.temperature = temperature
        self.mini_batch_size = mini_batch_size
        self.context_cosine = torch.tensor(0.0)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss of the queries.

        Args:
            sentence_features: queries, documents and, optionally, hard negatives.
            labels: bool (queries, documents), True where a document is not used as a negative of a query. If None, all
                are used.
        """
        features = list(sentence_features)
        texts = self.draw_context(features[1])
        starts = range(0, self.context_size, self.mini_batch_size)
        ranges = [(start, min(start + self.mini_batch_size, self.context_size)) for start in starts]
        pairs = self.embed_minibatch_iter(texts, with_grad=False, copy_random_state=True, ranges=ranges)
        vectors, states = zip(*pairs)
        context = torch.cat(vectors).detach().requires_grad_()
        self.context_cosine = torch.tensor(mean_cosine(context), device=context.device)
        # In a tuple, since a mini-batch gets only some rows of every tensor among the features.
        loss = self.forward_cached([each | {"dataset_embeddings": (context,)} for each in features], labels)
        # This hook runs after the hook of the texts, which computes the gradient of the context.
        loss.register_hook(partial(self._finish_backward, texts, context, ranges, states))
        return loss

    def draw_context(self, documents: dict[str, Any]) -> dict[str, Any]:
        """As many of the batch's documents as a context holds, drawn anew in each call; repeated if there are fewer."""
        rows = len(documents["input_ids"])
        draws = -(-self.context_size // rows)
        drawn = torch.cat([torch.randperm(rows) for _ in range(draws)])[: self.context_size]
        return {
            name: value[drawn.to(value.device)] if isinstance(value, torch.Tensor) and len(value) == rows else value
            for name, value in documents.items()
        }

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[torch.Tensor, RandContext | None]:
        """Embed a mini-batch; called by `CachedLossMixin` as well."""
        texts = {
            name: value[begin:end] if isinstance(value, torch.Tensor) else value
            for name, value in sentence_feature.items()
        }
        (context,) = texts.pop("dataset_embeddings", (None,))
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            state = RandContext(*texts.values()) if copy_random_state else None
            # Not through DDP's wrapper, which would reduce the gradients of one stage before those of the other exist.
            model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
            embeddings = model(texts, dataset_embeddings=context)["sentence_embedding"]
        return embeddings, state

    def calculate_loss(
        self, reps: list[list[torch.Tensor]], labels: torch.Tensor | None = None, *, with_backward: bool = False
    ) -> torch.Tensor:
        """InfoNCE of the embeddings `reps`: those of queries, then of documents, then of hard negatives."""
        queries, *documents = (F.normalize(torch.cat(parts), dim=1) for parts in reps)
        scores = queries @ torch.cat(documents).T / self.temperature
        if labels is not None:
            scores = scores.masked_fill(F.pad(labels, (0, scores.shape[1] - labels.shape[1])), -torch.inf)
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        if with_backward:
            loss.backward()
        return loss.detach()

    def _finish_backward(self, texts, context, ranges, states, grad_output: torch.Tensor) -> None:
        """The backward pass of the first stage, from the gradient of the context."""
        with torch.enable_grad():
            for (begin, end), state in zip(ranges, states):
                vectors, _ = self.embed_minibatch(texts, begin, end, True, False, state)
                # The gradient of the context already contains the scale of `grad_output`.
                torch.autograd.backward(vectors, context.grad[begin:end].to(vectors.dtype))
        if isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync:
            share_gradients(self.model.module)

    def get_config_dict(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "mini_batch_size": self.mini_batch_size}


def share_gradients(model: nn.Module) -> None:
    """Make every gradient the mean over the processes."""
    processes = distributed.get_world_size()
    for parameter in model.parameters():
        if parameter.requires_grad:
            # All processes have to take part, even one whose context had no dropout, where a gradient may be missing.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            distributed.all_reduce(parameter.grad)
            parameter.grad /= processes


def mean_cosine(context: torch.Tensor) -> float:
    """Of all pairs of different rows. Near 1, the first stage has collapsed: one context is then as good as another."""
    unit = F.normalize(context.detach().double(), dim=-1)
    rows = len(unit)
    # The squared length of the sum counts every pair twice, and each row with itself once.
    return ((unit.sum(0).square().sum() - rows) / (rows * (rows - 1))).item() if rows > 1 else 1.0


@dataclass
class ContextualCollator(ContrastiveCollator):
    """As `ContrastiveCollator`, with a `label`, bool (rows, rows): True where a document is not used as a negative.

    Args:
        margin: a document is not used if the first model scores it above the right document's score minus this. If
            None, there is no `label`.
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
    """Trains contextual models on clustered datasets. The settings have `false_negative_margin`."""

    data_collator_class = ContextualCollator
    batch_sampler_class = ClusterBatchSampler

    def get_data_collator(self, **kwargs) -> ContextualCollator:
        collator = super().get_data_collator(**kwargs)
        collator.margin = self.settings.false_negative_margin
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
