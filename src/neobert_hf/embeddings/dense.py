"""Contrastive fine-tuning of any encoder into a dense embedding model (paper, section 5.2.1 and appendix D)."""

from dataclasses import dataclass, field

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.settings import check_numbers
from neobert_hf.embeddings.arguments import EmbeddingArguments, MiningSettings
from neobert_hf.embeddings.datasets import TrainingData
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build_encoder, load_trained_model
from neobert_hf.embeddings.recipe import prepare_training, retrieval_evaluator
from neobert_hf.embeddings.trainer import EmbeddingTrainer
from neobert_hf.training.adapters import LoraArguments


@dataclass
class DenseSettings(LoraArguments, MiningSettings):
    """The model, the data and the loss of dense embeddings."""

    temperature: float = field(
        default=0.07, metadata={"help": "the cosine similarities in the loss are divided by this"}
    )
    mini_batch_num_tokens: int | None = field(
        default=None,
        metadata={
            "help": "tokens computed at a time, not counting padding, if a batch does not fit in memory (GradCache)"
        },
    )
    matryoshka_dims: list[int] = field(
        default_factory=list, metadata={"help": "also train prefixes of the embeddings of these lengths"}
    )
    guide: str | None = field(
        default=None,
        metadata={
            "help": "embedding model that decides which texts of a batch are not used as negatives (GIST)",
            "path": "or Hub id",
        },
    )
    negatives: int | None = field(
        default=None, metadata={"help": "with `miner`: mine at most this many hard negatives for a row"}
    )

    def __post_init__(self):
        MiningSettings.__post_init__(self)
        LoraArguments.__post_init__(self)
        ranges = dict.fromkeys(("mini_batch_num_tokens", "matryoshka_dims", "negatives"), "1 or more")
        check_numbers(self, ranges | {"temperature": "above 0"})
        if (self.miner is None) != (self.negatives is None):
            raise ValueError(
                f"`miner` is {self.miner!r} and `negatives` is {self.negatives}: set both, or leave both out."
            )


@recipe
def finetune_embeddings(settings: DenseSettings, arguments: EmbeddingArguments) -> Result:
    """Fine-tune an encoder into an embedding model on pairs of a query and a right text.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.

    Returns:
        The model's folder; `scores` of the retrieval of held-out queries and of the similarity of sentences, as far as
        there are data for them, and those `before` training.
    """
    # 1. Data, with an instruction for the queries of each dataset, and the checkpoint to go on from
    with prepare_training("finetune_embeddings", settings, arguments) as training:
        # 2. Hard negatives for the datasets that have none
        if settings.miner is not None:
            add_mined_negatives(training)

        # 3. Model, loss and evaluation
        model = build_encoder(settings.model, settings.max_length, settings.trust_remote_code)
        guide = load_trained_model(settings.guide, "guide", settings.trust_remote_code) if settings.guide else None
        loss = info_nce_loss(model, settings, guide)
        evaluator = dense_evaluator(training.data)

        # 4. Training to the end; then the model, its card and the log are saved
        return EmbeddingTrainer(model, training, loss=loss, evaluator=evaluator).complete()


def info_nce_loss(
    encoder: SentenceTransformer, settings: DenseSettings, guide: SentenceTransformer | None = None
) -> nn.Module:
    """InfoNCE over the batch: each query against all documents and hard negatives of the batch.

    Args:
        settings: `temperature`; `mini_batch_num_tokens`, with which the gradients are the same; `matryoshka_dims`.
        guide: a trained model. Texts that it finds closer to a query than the right document are probably right, too:
            they are left out of that query's negatives. It reads each text as the model in training does, cut and with
            the same instruction, and not with its own prompts.

    References:
        The paper, section 5.2.1; https://arxiv.org/abs/2101.06983 (GradCache), https://arxiv.org/abs/2205.13147
        (Matryoshka), https://arxiv.org/abs/2402.16829 (GIST, whose contrast of queries with queries and of documents
        with documents is not used: the paper's loss has none).
    """
    # Tokens and not texts: for as much memory, a step on texts of mixed lengths takes 10 to 28% less time.
    tokens = settings.mini_batch_num_tokens
    cached = {} if tokens is None else {"mini_batch_num_tokens": tokens}
    if guide is not None:
        guided = CachedGISTEmbedLoss if cached else GISTEmbedLoss
        guide.eval().requires_grad_(False)
        of_pairs_alone = {"contrast_anchors": False, "contrast_positives": False}
        loss = guided(encoder, guide, temperature=settings.temperature, **of_pairs_alone, **cached)
    else:
        plain = CachedMultipleNegativesRankingLoss if cached else MultipleNegativesRankingLoss
        loss = plain(encoder, scale=1 / settings.temperature, **cached)
    if settings.matryoshka_dims:
        size = encoder.get_embedding_dimension()
        if max(settings.matryoshka_dims) > size:
            raise ValueError(
                f"`matryoshka_dims` is {settings.matryoshka_dims}, but the embeddings have {size} numbers; "
                "a prefix is shorter."
            )
        loss = MatryoshkaLoss(encoder, loss, sorted({size, *settings.matryoshka_dims}, reverse=True))
    return loss


def dense_evaluator(data: TrainingData) -> SequentialEvaluator | None:
    """Retrieval and similarity of sentences (STS), if there are datasets for them; None if there are none."""
    evaluators = [retrieval_evaluator(data)] if "retrieval" in data.evaluation else []
    if sts := data.evaluation.get("sts"):
        # Both sides are queries. This evaluator takes no prompt, so it is added here.
        prompt, scores = sts.prompt, sts.rows["score"][:]
        first, second = ([prompt + text for text in sts.rows[side]] for side in ("query", "positive"))
        evaluators.append(EmbeddingSimilarityEvaluator(first, second, scores, name="sts", write_csv=False))
    return SequentialEvaluator(evaluators) if evaluators else None
