"""Late-interaction models (ColBERT): a vector for every token, and texts are compared by MaxSim."""

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.embeddings.arguments import EmbeddingArguments, PairSettings
from neobert_hf.embeddings.models import build
from neobert_hf.embeddings.recipe import prepare_training, retrieval_evaluator
from neobert_hf.embeddings.trainer import MultiVectorTrainer


@recipe
def train_multi_vector_encoder(settings: PairSettings, arguments: EmbeddingArguments) -> Result:
    """Train a late-interaction model (ColBERT) on pairs of a query and a right text.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets checkpoints, `model/` (for `MultiVectorEncoder(...)`, with a model card) and `log.json`.

    Returns:
        The model's folder; `scores` of the retrieval of held-out queries, and those `before` training.
    """
    # 1. Data, with an instruction for the queries of each dataset, and the checkpoint to go on from
    with prepare_training("train_multi_vector_encoder", settings, arguments) as training:
        # 2. Model, loss and evaluation
        model = build(MultiVectorEncoder, settings.model, settings.max_length, settings.trust_remote_code)
        loss = MultiVectorMultipleNegativesRankingLoss(model)
        evaluator = retrieval_evaluator(training.data, MultiVectorInformationRetrievalEvaluator)

        # 3. Training to the end; then the model, its card and the log are saved
        return MultiVectorTrainer(model, training, loss=loss, evaluator=evaluator).complete()
