"""Training a sparse encoder (SPLADE) on the MLM head of a pretrained model: texts become weights of vocabulary entries.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_sparse_encoder.py \\
        --config configs/embeddings/sparse.yaml --model runs/pretrain/model

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `SparseEncoder(...)`, with a model card) and `log.json`.
"""

from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from transformers import set_seed

from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.batches import Mixture
from neobert_hf.embeddings.models import build_sparse_encoder
from neobert_hf.embeddings.recipe import (
    SparseArguments,
    find_checkpoint,
    read_data,
    retrieval_evaluator,
    rows_of_batches,
    run_settings,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, SparseTrainer


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(SparseArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = data.query_prompts
    batch_sizes = rows_of_batches(data, arguments.per_device_train_batch_size)
    evaluator = retrieval_evaluator(data, SparseInformationRetrievalEvaluator)

    # 3. The checkpoint to resume from, and the model
    values = run_settings(settings, arguments, data)
    checkpoint, source = find_checkpoint(settings.model, arguments, values)
    model = build_sparse_encoder(source, settings.max_length, settings.trust_remote_code)
    loss = SpladeLoss(
        model,
        # Dot products of sparse vectors are large: no temperature.
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=settings.document_weight,
        query_regularizer_weight=settings.query_weight,
    )

    # 4. Training, evaluation, model with its card, and numbers
    mixture = Mixture(data.train, batch_sizes, settings.alpha)
    trainer = SparseTrainer(model, arguments, mixture, values, loss=loss, evaluator=evaluator)
    trainer.run(checkpoint, settings.model)


if __name__ == "__main__":
    main()
