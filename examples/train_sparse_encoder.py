"""Train a sparse encoder (SPLADE) on the MLM head of a pretrained model: a text becomes weights of vocabulary entries.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_sparse_encoder.py \\
        --config configs/embeddings/sparse.yaml --model runs/pretrain/model

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `SparseEncoder(...)`, with a model card) and `log.json`.
"""

from dataclasses import dataclass, field

from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

from neobert_hf.common.script_errors import run_script
from neobert_hf.embeddings.arguments import RecipeArguments
from neobert_hf.embeddings.models import build_sparse_encoder
from neobert_hf.embeddings.recipe import prepare_run, retrieval_evaluator
from neobert_hf.embeddings.trainer import SparseTrainer


@dataclass
class SparseArguments(RecipeArguments):
    """The model, the data and the sparsity of sparse embeddings (regularisers: https://arxiv.org/abs/2205.04733)."""

    query_weight: float = field(default=5e-5, metadata={"help": "weight of the FLOPS regulariser of queries"})
    document_weight: float = field(default=3e-5, metadata={"help": "weight of the FLOPS regulariser of documents"})


def main(args: list[str] | None = None) -> None:
    # 1. Settings, data with an instruction for the queries of each dataset, and the checkpoint to resume from
    with prepare_run(SparseArguments, args) as run:
        settings = run.settings

        # 2. Model, loss and evaluation
        model = build_sparse_encoder(settings.model, settings.max_length, settings.trust_remote_code)
        loss = SpladeLoss(
            model,
            # Dot products of sparse vectors are large, so they need no temperature.
            SparseMultipleNegativesRankingLoss(model),
            document_regularizer_weight=settings.document_weight,
            query_regularizer_weight=settings.query_weight,
        )
        evaluator = retrieval_evaluator(run.data, SparseInformationRetrievalEvaluator)

        # 3. Training to the end; then the model, its card and the log are saved
        trainer = SparseTrainer(model, run, loss=loss, evaluator=evaluator)
        trainer.complete()


if __name__ == "__main__":
    run_script(main)
