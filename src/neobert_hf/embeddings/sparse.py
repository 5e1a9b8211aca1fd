"""Sparse encoders (SPLADE) on the MLM head of a pretrained model: a text becomes weights of vocabulary entries."""

from dataclasses import dataclass, field

from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.settings import check_numbers
from neobert_hf.embeddings.arguments import EmbeddingArguments, PairSettings
from neobert_hf.embeddings.models import build_sparse_encoder
from neobert_hf.embeddings.recipe import prepare_training, retrieval_evaluator
from neobert_hf.embeddings.trainer import SparseTrainer


@dataclass
class SparseSettings(PairSettings):
    """The model, the data and the sparsity of sparse embeddings (regularisers: https://arxiv.org/abs/2205.04733)."""

    query_weight: float = field(default=5e-5, metadata={"help": "weight of the FLOPS regulariser of queries"})
    document_weight: float = field(default=3e-5, metadata={"help": "weight of the FLOPS regulariser of documents"})

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, {"query_weight": "0 or more", "document_weight": "0 or more"})


@recipe
def train_sparse_encoder(settings: SparseSettings, arguments: EmbeddingArguments) -> Result:
    """Train a sparse encoder (SPLADE) on pairs of a query and a right text.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets checkpoints, `model/` (for `SparseEncoder(...)`, with a model card) and `log.json`.

    Returns:
        The model's folder; `scores` of the retrieval of held-out queries, and those `before` training.
    """
    # 1. Data, with an instruction for the queries of each dataset, and the checkpoint to go on from
    with prepare_training("train_sparse_encoder", settings, arguments) as training:
        # 2. Model, loss and evaluation
        model = build_sparse_encoder(settings.model, settings.max_length, settings.trust_remote_code)
        loss = SpladeLoss(
            model,
            # Dot products of sparse vectors are large, so they need no temperature.
            SparseMultipleNegativesRankingLoss(model),
            document_regularizer_weight=settings.document_weight,
            query_regularizer_weight=settings.query_weight,
        )
        evaluator = retrieval_evaluator(training.data, SparseInformationRetrievalEvaluator)

        # 3. Training to the end; then the model, its card and the log are saved
        return SparseTrainer(model, training, loss=loss, evaluator=evaluator).complete()
