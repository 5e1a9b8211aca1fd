"""Training a late-interaction model (ColBERT): a vector for every token, compared by MaxSim.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_multi_vector_encoder.py \\
        --config configs/embeddings/multi_vector.yaml --model runs/pretrain/model

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `MultiVectorEncoder(...)`, with a model card) and `log.json`.

References:
    ColBERT: https://arxiv.org/abs/2004.12832.
"""

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
from transformers import set_seed

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.settings import parse_config
from neobert_hf.common.token_limits import tokens_read
from neobert_hf.embeddings.recipe import (
    RecipeArguments,
    find_resume,
    read_data,
    result_settings,
    retrieval_evaluator,
    rows_of_batches,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, MultiVectorTrainer


def build_multi_vector_encoder(model: str, max_length: int, trust_remote_code: bool = False) -> MultiVectorEncoder:
    """An encoder, a linear layer to 128 numbers and unit length for every token.

    The linear layer is new unless the model is a late-interaction model. Arguments as of `load_transformer`.
    """
    encoder = MultiVectorEncoder(model, trust_remote_code=trust_remote_code, model_kwargs={"dtype": torch.float32})
    encoder.max_seq_length = tokens_read(encoder[0].model, max_length, encoder.max_seq_length)
    return encoder


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(RecipeArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = data.query_prompts
    batch_sizes = rows_of_batches(data.descriptions, data.train, arguments.per_device_train_batch_size)
    evaluator = retrieval_evaluator(data, MultiVectorInformationRetrievalEvaluator)

    # 3. Model, and the checkpoint to resume from
    values = result_settings(settings, arguments, data)
    resume, source = find_resume(settings.model, arguments, values)
    model = build_multi_vector_encoder(source, settings.max_length, settings.trust_remote_code)
    loss = MultiVectorMultipleNegativesRankingLoss(model)

    # 4. Training, evaluation, model with its card, and numbers
    trainer = MultiVectorTrainer(
        model, arguments, data.train, batch_sizes, settings.alpha, values, loss=loss, evaluator=evaluator
    )
    trainer.run(resume, settings.model)


if __name__ == "__main__":
    main()
