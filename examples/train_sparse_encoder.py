"""Training a sparse encoder (SPLADE) on the MLM head of a pretrained model: texts become weights of vocabulary entries.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_sparse_encoder.py \\
        --config configs/embeddings/sparse.yaml --model runs/pretrain/model

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `SparseEncoder(...)`, with a model card) and `log.json`.

References:
    SPLADE-max: https://arxiv.org/abs/2109.10086; the weights of its regularisers: https://arxiv.org/abs/2205.04733.
"""

from dataclasses import dataclass, field

from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import set_seed

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.flattening import flatten_inputs
from neobert_hf.embeddings.recipe import (
    RecipeArguments,
    find_resume,
    read_data,
    result_settings,
    retrieval_evaluator,
    rows_of_batches,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, SparseTrainer, load_transformer


@dataclass
class SparseArguments(RecipeArguments):
    """What is trained, on which data, and how sparse it becomes."""

    query_weight: float = field(default=5e-5, metadata={"help": "of the FLOPS regulariser of queries"})
    document_weight: float = field(default=3e-5, metadata={"help": "of the FLOPS regulariser of documents"})


def build_sparse_encoder(model: str, max_length: int, trust_remote_code: bool = False) -> SparseEncoder:
    """The MLM head's logits, log(1 + relu), and the maximum over the tokens; arguments as of `load_transformer`.

    Raises:
        ValueError: if the model has no trained MLM head.
    """
    transformer = load_transformer(model, max_length, trust_remote_code, "fill-mask")
    encoder = SparseEncoder(modules=[transformer, SpladePooling("max")], similarity_fn_name="dot")
    if isinstance(transformer.model, NeoBERTForMaskedLM):
        # No decoder's row for padding, in time and memory.
        flatten_inputs(encoder)
    # Loading refuses a NeoBERT without the head. Others get a new one from Transformers, at most with a warning.
    elif not any(name.endswith("ForMaskedLM") for name in transformer.model.config.architectures or []):
        raise ValueError(
            f"{model} has no trained MLM head: `architectures` in its config.json is "
            f"{transformer.model.config.architectures}, and no name in it ends with ForMaskedLM. Give a pretrained "
            "model with its head."
        )
    return encoder


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(SparseArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = data.query_prompts
    batch_sizes = rows_of_batches(data.descriptions, data.train, arguments.per_device_train_batch_size)
    evaluator = retrieval_evaluator(data, SparseInformationRetrievalEvaluator)

    # 3. Model, and the checkpoint to resume from
    values = result_settings(settings, arguments, data)
    resume, source = find_resume(settings.model, arguments, values)
    model = build_sparse_encoder(source, settings.max_length, settings.trust_remote_code)
    # Dot products of sparse vectors are large: no temperature.
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(
        model,
        ranking,
        document_regularizer_weight=settings.document_weight,
        query_regularizer_weight=settings.query_weight,
    )

    # 4. Training, evaluation, model with its card, and numbers
    trainer = SparseTrainer(
        model, arguments, data.train, batch_sizes, settings.alpha, values, loss=loss, evaluator=evaluator
    )
    trainer.run(resume, settings.model)


if __name__ == "__main__":
    main()
