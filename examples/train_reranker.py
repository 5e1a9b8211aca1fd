"""Training a reranker (cross-encoder): query and document are read together and get one score.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_reranker.py \\
        --config configs/embeddings/reranker.yaml --model runs/pretrain/model

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.
"""

from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from torch import tensor
from transformers import set_seed

from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.batches import Mixture, RerankingCollator
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build_reranker, describe_reranker
from neobert_hf.embeddings.recipe import (
    RerankerArguments,
    find_checkpoint,
    read_data,
    reranking_evaluator,
    run_settings,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, RerankerTrainer


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(RerankerArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)
    rows = arguments.per_device_train_batch_size
    if not 0 < settings.negatives < rows:
        raise ValueError(f"`negatives` is {settings.negatives}; batches of {rows} rows allow 1 to {rows - 1}.")

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = {description.name: description.prompt for description in data.descriptions}
    batch_sizes = {description.name: min(rows, description.batch_size or rows) for description in data.descriptions}
    evaluator = reranking_evaluator(data)

    # 3. The checkpoint to resume from; then hard negatives for the datasets that have none
    values = run_settings(settings, arguments, data)
    checkpoint, source = find_checkpoint(settings.model, arguments, values)
    if settings.miner is not None:
        add_mined_negatives(data, settings, arguments)

    # 4. Model
    model = build_reranker(source, settings.max_length, settings.trust_remote_code)
    # The right document of a query weighs as much as all of its wrong ones together.
    loss = BinaryCrossEntropyLoss(model, pos_weight=tensor(float(settings.negatives)))

    # 5. Training, evaluation, model with its card, and numbers
    mixture = Mixture(data.train, batch_sizes, settings.alpha)
    collator = RerankingCollator(model.preprocess, prompts=arguments.prompts, negatives=settings.negatives)
    trainer = RerankerTrainer(model, arguments, mixture, values, loss=loss, evaluator=evaluator, data_collator=collator)
    trainer.run(checkpoint, describe_reranker(settings.model, settings.trust_remote_code))


if __name__ == "__main__":
    main()
