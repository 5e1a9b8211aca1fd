"""Contextual document embeddings (CDE) on any NeoBERT (paper, section 5.2.2 and appendix G).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_contextual.py \\
        --config configs/embeddings/contextual.yaml --model runs/embeddings/model

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets `clusters/`, checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

from neobert_hf.common.script_errors import run_script
from neobert_hf.embeddings.arguments import ContextualArguments
from neobert_hf.embeddings.clusters import add_clusters
from neobert_hf.embeddings.contextual import build_contextual_encoder
from neobert_hf.embeddings.contextual_training import ContextualLoss, ContextualRetrievalEvaluator, ContextualTrainer
from neobert_hf.embeddings.recipe import prepare_run, retrieval_evaluator


def main(args: list[str] | None = None) -> None:
    # 1. Settings, data with an instruction for the queries of each dataset, and the checkpoint to resume from
    with prepare_run(ContextualArguments, args) as run:
        settings, rows = run.settings, run.arguments.per_device_train_batch_size
        if settings.context_size > rows:
            raise ValueError(
                f"`context_size` is {settings.context_size}, but a batch, whose documents are the context, has {rows} "
                f"rows: set it to {rows} or less, or `per_device_train_batch_size` to {settings.context_size}."
            )

        # 2. Clusters of similar rows, and the vectors by which false negatives are recognised
        add_clusters(run)

        # 3. Two stages that start from the same encoder, a loss that trains both, and an evaluation with a context
        model = build_contextual_encoder(settings.model, settings.max_length, **settings.context)
        loss = ContextualLoss(model, settings.temperature, settings.mini_batch_size)
        evaluator = retrieval_evaluator(run.data, ContextualRetrievalEvaluator)

        # 4. Training to the end; then the model, its card and the log are saved
        trainer = ContextualTrainer(model, run, loss=loss, evaluator=evaluator)
        trainer.complete()


if __name__ == "__main__":
    run_script(main)
