"""Training a late-interaction model (ColBERT): a vector for every token, compared by MaxSim.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_multi_vector_encoder.py \\
        --config configs/embeddings/multi_vector.yaml --model runs/pretrain/model

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `MultiVectorEncoder(...)`, with a model card) and `log.json`.
"""

from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
from transformers import set_seed

from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.batches import Mixture
from neobert_hf.embeddings.models import build_multi_vector_encoder
from neobert_hf.embeddings.recipe import (
    RecipeArguments,
    find_checkpoint,
    read_data,
    retrieval_evaluator,
    rows_of_batches,
    run_settings,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, MultiVectorTrainer


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(RecipeArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = data.query_prompts
    batch_sizes = rows_of_batches(data, arguments.per_device_train_batch_size)
    evaluator = retrieval_evaluator(data, MultiVectorInformationRetrievalEvaluator)

    # 3. The checkpoint to resume from, and the model
    values = run_settings(settings, arguments, data)
    checkpoint, source = find_checkpoint(settings.model, arguments, values)
    model = build_multi_vector_encoder(source, settings.max_length, settings.trust_remote_code)
    loss = MultiVectorMultipleNegativesRankingLoss(model)

    # 4. Training, evaluation, model with its card, and numbers
    mixture = Mixture(data.train, batch_sizes, settings.alpha)
    trainer = MultiVectorTrainer(model, arguments, mixture, values, loss=loss, evaluator=evaluator)
    trainer.run(checkpoint, settings.model)


if __name__ == "__main__":
    main()
