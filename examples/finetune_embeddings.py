"""Contrastive fine-tuning of any encoder into an embedding model (paper, section 5.2.1 and appendix D).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/finetune_embeddings.py \\
        --config configs/embeddings/paper.yaml --model chandar-lab/NeoBERT

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

from neobert_hf.common.script_errors import run_script
from neobert_hf.embeddings.arguments import DenseArguments
from neobert_hf.embeddings.losses import info_nce_loss
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build_encoder, load_trained_model
from neobert_hf.embeddings.recipe import dense_evaluator, prepare_run
from neobert_hf.embeddings.trainer import EmbeddingTrainer


def main(args: list[str] | None = None) -> None:
    # 1. Settings, data with an instruction for the queries of each dataset, and the checkpoint to resume from
    with prepare_run(DenseArguments, args) as run:
        settings = run.settings

        # 2. Hard negatives for the datasets that have none
        if settings.miner is not None:
            add_mined_negatives(run)

        # 3. Model, loss and evaluation
        model = build_encoder(settings.model, settings.max_length, settings.trust_remote_code)
        guide = load_trained_model(settings.guide, "guide", settings.trust_remote_code) if settings.guide else None
        loss = info_nce_loss(model, settings.temperature, settings.mini_batch_size, settings.matryoshka_dims, guide)
        evaluator = dense_evaluator(run.data)

        # 4. Training to the end; then the model, its card and the log are saved
        trainer = EmbeddingTrainer(model, run, loss=loss, evaluator=evaluator)
        trainer.complete()


if __name__ == "__main__":
    run_script(main)
