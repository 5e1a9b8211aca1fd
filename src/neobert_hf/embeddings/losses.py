"""The loss of dense embeddings, from the losses of Sentence Transformers."""

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn


def info_nce_loss(
    encoder: SentenceTransformer,
    temperature: float,
    mini_batch_size: int | None = None,
    matryoshka_dims: list[int] | None = None,
    guide: SentenceTransformer | None = None,
) -> nn.Module:
    """InfoNCE over the batch: each query against all documents and hard negatives of the batch.

    Args:
        temperature: the cosine similarities are divided by it.
        mini_batch_size: compute this many texts at a time (GradCache), for batches that do not fit in memory. The
            gradients are the same. Whole batches if None.
        matryoshka_dims: also train prefixes of the embeddings of these lengths, beside their full size.
        guide: a trained model. Texts that it finds closer to a query than the right document are probably right, too:
            they are left out of that query's negatives. It reads each text as the model in training does, cut and with
            the same instruction, and not with its own prompts.

    References:
        The paper, section 5.2.1; https://arxiv.org/abs/2101.06983 (GradCache), https://arxiv.org/abs/2205.13147
        (Matryoshka), https://arxiv.org/abs/2402.16829 (GIST, whose contrast of queries with queries and of documents
        with documents is not used: the paper's loss has none).
    """
    cached = {} if mini_batch_size is None else {"mini_batch_size": mini_batch_size}
    if guide is not None:
        guided = CachedGISTEmbedLoss if cached else GISTEmbedLoss
        guide.eval().requires_grad_(False)
        of_pairs_alone = {"contrast_anchors": False, "contrast_positives": False}
        loss = guided(encoder, guide, temperature=temperature, **of_pairs_alone, **cached)
    else:
        plain = CachedMultipleNegativesRankingLoss if cached else MultipleNegativesRankingLoss
        loss = plain(encoder, scale=1 / temperature, **cached)
    if matryoshka_dims:
        size = encoder.get_embedding_dimension()
        loss = MatryoshkaLoss(encoder, loss, sorted({size, *matryoshka_dims}, reverse=True))
    return loss
