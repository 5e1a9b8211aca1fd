"""Contrastive fine-tuning of any encoder into an embedding model (paper, section 5.2.1 and appendix D).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/finetune_embeddings.py \\
        --config configs/embeddings/paper.yaml --model chandar-lab/NeoBERT

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

from transformers import set_seed

from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.batches import Mixture
from neobert_hf.embeddings.models import build_encoder, info_nce_loss
from neobert_hf.embeddings.recipe import (
    DenseArguments,
    dense_evaluator,
    find_checkpoint,
    read_data,
    rows_of_batches,
    run_settings,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, EmbeddingTrainer


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(DenseArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = data.query_prompts
    batch_sizes = rows_of_batches(data, arguments.per_device_train_batch_size)
    evaluator = dense_evaluator(data, arguments)

    # 3. The checkpoint to resume from, and the model
    values = run_settings(settings, arguments, data)
    checkpoint, source = find_checkpoint(settings.model, arguments, values)
    model = build_encoder(source, settings.max_length, settings.trust_remote_code)
    loss = info_nce_loss(model, settings.temperature, settings.mini_batch_size, settings.matryoshka_dims)

    # 4. Training, evaluation, model with its card, and numbers
    mixture = Mixture(data.train, batch_sizes, settings.alpha)
    trainer = EmbeddingTrainer(model, arguments, mixture, values, loss=loss, evaluator=evaluator)
    trainer.run(checkpoint, settings.model)


if __name__ == "__main__":
    main()
