"""Train a reranker (cross-encoder): it reads a query and a document together and gives the pair one score.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_reranker.py \\
        --config configs/embeddings/reranker.yaml --model runs/pretrain/model

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.
"""

import random
from dataclasses import dataclass, field

from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from torch import tensor

from neobert_hf.common.script_errors import run_script
from neobert_hf.embeddings.arguments import MiningArguments
from neobert_hf.embeddings.datasets import TrainingData, positives_of_queries
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build
from neobert_hf.embeddings.recipe import prepare_run
from neobert_hf.embeddings.trainer import RerankerTrainer
from neobert_hf.training.adapters import LoraArguments


@dataclass
class RerankerArguments(LoraArguments, MiningArguments):
    """The model, the data and the negatives of a reranker."""

    negatives: int = field(
        default=4,
        metadata={"help": "negatives of a query: first its hard negatives, then right documents of other rows"},
    )


def main(args: list[str] | None = None) -> None:
    # 1. Settings, data and the checkpoint to resume from
    with prepare_run(RerankerArguments, args) as run:
        settings = run.settings

        # 2. Hard negatives for the datasets that have none, found by a model that reads the instructions
        if settings.miner is not None:
            add_mined_negatives(run)

        # 3. Model, loss and evaluation
        model = build(CrossEncoder, settings.model, settings.max_length, settings.trust_remote_code)
        # The positive of a query weighs as much as all of its negatives together.
        loss = BinaryCrossEntropyLoss(model, pos_weight=tensor(float(settings.negatives)))
        evaluator = reranking_evaluator(run.data)

        # 4. Training to the end; then the model, its card and the log are saved
        trainer = RerankerTrainer(model, run, loss=loss, evaluator=evaluator)
        trainer.complete()


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


if __name__ == "__main__":
    run_script(main)
