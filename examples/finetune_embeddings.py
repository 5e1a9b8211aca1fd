"""Contrastive fine-tuning of any encoder into an embedding model (paper, section 5.2.1 and appendix D).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/finetune_embeddings.py \\
        --config configs/embeddings/paper.yaml --model chandar-lab/NeoBERT

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

from dataclasses import dataclass, field

from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from transformers import set_seed

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.datasets import PairDataset, load_scored_pairs
from neobert_hf.embeddings.recipe import (
    RecipeArguments,
    find_resume,
    read_data,
    result_settings,
    retrieval_evaluator,
    rows_of_batches,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, EmbeddingTrainer, build_encoder, build_loss


@dataclass
class FinetuningArguments(RecipeArguments):
    """What is trained, on which data, with which loss."""

    temperature: float = field(default=0.07, metadata={"help": "of the cosine similarities in the loss"})
    mini_batch_size: int | None = field(
        default=None, metadata={"help": "texts computed at a time, for batches beyond the memory (GradCache)"}
    )
    matryoshka_dims: list[int] = field(
        default_factory=list, metadata={"help": "train these prefixes of the embeddings as well"}
    )


def sts_evaluator(description: PairDataset) -> EmbeddingSimilarityEvaluator:
    first, second, scores = load_scored_pairs(description)
    # Both sides are queries. This evaluator takes no prompt.
    first, second = ([description.prompt + text for text in texts] for texts in (first, second))
    return EmbeddingSimilarityEvaluator(first, second, scores, name="sts", write_csv=False)


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(FinetuningArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = data.query_prompts
    batch_sizes = rows_of_batches(data.descriptions, data.train, arguments.per_device_train_batch_size)
    evaluators = [evaluator] if (evaluator := retrieval_evaluator(data)) else []
    if "sts" in data.evaluation:
        with arguments.main_process_first(desc="reading the STS dataset"):
            evaluators.append(sts_evaluator(data.evaluation["sts"]))

    # 3. Model, and the checkpoint to resume from
    values = result_settings(settings, arguments, data)
    resume, source = find_resume(settings.model, arguments, values)
    model = build_encoder(source, settings.max_length, settings.trust_remote_code)
    loss = build_loss(model, settings.temperature, settings.mini_batch_size, settings.matryoshka_dims)

    # 4. Training, evaluation, model with its card, and numbers
    evaluator = SequentialEvaluator(evaluators) if evaluators else None
    trainer = EmbeddingTrainer(
        model, arguments, data.train, batch_sizes, settings.alpha, values, loss=loss, evaluator=evaluator
    )
    trainer.run(resume, settings.model)


if __name__ == "__main__":
    main()
