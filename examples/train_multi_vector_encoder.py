"""Train a late-interaction model (ColBERT): it gives a vector for every token, and texts are compared by MaxSim.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_multi_vector_encoder.py \\
        --config configs/embeddings/multi_vector.yaml --model runs/pretrain/model

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `MultiVectorEncoder(...)`, with a model card) and `log.json`.
"""

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

from neobert_hf.common.script_errors import run_script
from neobert_hf.embeddings.arguments import RecipeArguments
from neobert_hf.embeddings.models import build
from neobert_hf.embeddings.recipe import prepare_run, retrieval_evaluator
from neobert_hf.embeddings.trainer import MultiVectorTrainer


def main(args: list[str] | None = None) -> None:
    # 1. Settings, data with an instruction for the queries of each dataset, and the checkpoint to resume from
    with prepare_run(RecipeArguments, args) as run:
        settings = run.settings

        # 2. Model, loss and evaluation
        model = build(MultiVectorEncoder, settings.model, settings.max_length, settings.trust_remote_code)
        loss = MultiVectorMultipleNegativesRankingLoss(model)
        evaluator = retrieval_evaluator(run.data, MultiVectorInformationRetrievalEvaluator)

        # 3. Training to the end; then the model, its card and the log are saved
        trainer = MultiVectorTrainer(model, run, loss=loss, evaluator=evaluator)
        trainer.complete()


if __name__ == "__main__":
    run_script(main)
