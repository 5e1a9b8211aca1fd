"""Rerankers (cross-encoders): they read a query and a document together and give the pair one score."""

import random
from dataclasses import dataclass, field

from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from torch import tensor

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.settings import check_numbers
from neobert_hf.embeddings.arguments import EmbeddingArguments, MiningSettings
from neobert_hf.embeddings.datasets import TrainingData, positives_of_queries
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build
from neobert_hf.embeddings.recipe import prepare_training
from neobert_hf.embeddings.trainer import RerankerTrainer
from neobert_hf.training.adapters import LoraArguments


@dataclass
class RerankerSettings(LoraArguments, MiningSettings):
    """The model, the data and the negatives of a reranker."""

    negatives: int = field(
        default=4,
        metadata={"help": "negatives of a query: first its hard negatives, then right documents of other rows"},
    )

    def __post_init__(self):
        MiningSettings.__post_init__(self)
        LoraArguments.__post_init__(self)
        check_numbers(self, {"negatives": "1 or more"})


@recipe
def train_reranker(settings: RerankerSettings, arguments: EmbeddingArguments) -> Result:
    """Train a reranker (cross-encoder) on pairs of a query and a right text.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.

    Returns:
        The model's folder; `scores` of the ranking of 20 texts for held-out queries, and those `before` training.
    """
    # 1. Data and the checkpoint to go on from
    with prepare_training("train_reranker", settings, arguments) as training:
        # 2. Hard negatives for the datasets that have none, found by a model that reads the instructions
        if settings.miner is not None:
            add_mined_negatives(training)

        # 3. Model, loss and evaluation
        model = build(CrossEncoder, settings.model, settings.max_length, settings.trust_remote_code)
        if model.num_labels != 1:
            raise ValueError(
                f"{settings.model} is a classifier of {model.num_labels} classes, and a reranker gives one score: give "
                "an encoder, such as `AutoModel.from_pretrained(...).save_pretrained(...)` makes of it."
            )
        # The positive of a query weighs as much as all of its negatives together.
        loss = BinaryCrossEntropyLoss(model, pos_weight=tensor(float(settings.negatives)))
        evaluator = reranking_evaluator(training.data)

        # 4. Training to the end; then the model, its card and the log are saved
        return RerankerTrainer(model, training, loss=loss, evaluator=evaluator).complete()


def reranking_evaluator(data: TrainingData) -> CrossEncoderRerankingEvaluator | None:
    """Ranks the right documents of the first 200 `retrieval` queries among 20 others, the same ones in every run."""
    if "retrieval" not in data.evaluation:
        return None
    rows = data.evaluation["retrieval"].rows
    documents = rows.unique("positive")
    generator = random.Random(0)
    samples = []
    for query, right in list(positives_of_queries(rows).items())[:200]:
        drawn = generator.sample(documents, min(20 + len(right), len(documents)))
        wrong = [text for text in drawn if text not in right][:20]
        samples.append({"query": query, "positive": sorted(right), "negative": wrong})
    return CrossEncoderRerankingEvaluator(samples, name="reranking", write_csv=False)
