"""Train a reranker (cross-encoder): it reads a query and a document together and gives the pair one score.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_reranker.py \\
        --config configs/embeddings/reranker.yaml --model runs/pretrain/model

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.
"""

from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from torch import tensor

from neobert_hf.common.script_errors import run_script
from neobert_hf.embeddings.arguments import RerankerArguments
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build
from neobert_hf.embeddings.recipe import prepare_run, reranking_evaluator
from neobert_hf.embeddings.trainer import RerankerTrainer


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


if __name__ == "__main__":
    run_script(main)
