"""Contrastive fine-tuning of any encoder into an embedding model (paper, section 5.2.1 and appendix D).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/finetune_embeddings.py \\
        --config configs/embeddings/paper.yaml --model chandar-lab/NeoBERT

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from transformers import set_seed

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.arguments import parse_config
from neobert_hf.checkpoints import newest_checkpoint, step_of
from neobert_hf.embedding_batches import sampling_probabilities
from neobert_hf.embedding_data import PairDataset, load_pairs, load_scored_pairs, most_negatives, read_descriptions
from neobert_hf.embedding_training import EmbeddingArguments, EmbeddingTrainer, build_encoder, build_loss
from neobert_hf.launch import check_launch, leave
from neobert_hf.whole_files import write_json


# Of the training arguments, those that change the trained weights; the others may differ when a run is resumed.
RESULT_SETTINGS = (
    "optim learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps max_steps weight_decay adam_beta1 "
    "adam_beta2 adam_epsilon max_grad_norm bf16 fp16 seed per_device_train_batch_size batch_sampler"
).split()


@dataclass
class FinetuningArguments:
    """What is trained, on which data."""

    model: str = field(metadata={"help": "an encoder: path or Hub id"})
    datasets: str = field(metadata={"help": "YAML file that describes the datasets"})
    only: list[str] = field(default_factory=list, metadata={"help": "use these datasets of the file; all if empty"})
    max_length: int = field(default=1024, metadata={"help": "tokens; longer texts are cut"})
    max_negatives: int | None = field(default=None, metadata={"help": "hard negatives of a row; all if unset"})
    alpha: float = field(default=0.5, metadata={"help": "datasets are drawn by their size to the power of this"})
    temperature: float = field(default=0.07, metadata={"help": "of the cosine similarities in the loss"})
    mini_batch_size: int | None = field(
        default=None, metadata={"help": "texts computed at a time, for batches beyond the memory (GradCache)"}
    )
    matryoshka_dims: list[int] = field(
        default_factory=list, metadata={"help": "train these prefixes of the embeddings as well"}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


def read_data(settings: FinetuningArguments) -> tuple[list[PairDataset], DatasetDict, SequentialEvaluator | None]:
    """Descriptions and rows of the training datasets, and the evaluators."""
    descriptions, evaluation = read_descriptions(settings.datasets, settings.only or None)
    train = DatasetDict({one.name: load_pairs(one, settings.max_negatives) for one in descriptions})
    evaluators = []
    if "retrieval" in evaluation:
        evaluators.append(retrieval_evaluator(evaluation["retrieval"], load_pairs(evaluation["retrieval"])))
    if "sts" in evaluation:
        first, second, scores = load_scored_pairs(evaluation["sts"])
        prompt = evaluation["sts"].prompt
        # Both sides are queries. This evaluator takes no prompt.
        first, second = ([prompt + text for text in texts] for texts in (first, second))
        evaluators.append(EmbeddingSimilarityEvaluator(first, second, scores, name="sts", write_csv=False))
    return descriptions, train, SequentialEvaluator(evaluators) if evaluators else None


def retrieval_evaluator(description: PairDataset, pairs: Dataset) -> InformationRetrievalEvaluator:
    """Every query against all positives of the dataset."""
    texts, relevant = dict.fromkeys(pairs["positive"]), {}
    for query, positive in zip(pairs["query"], pairs["positive"]):
        relevant.setdefault(query, set()).add(positive)
    return InformationRetrievalEvaluator(
        queries={query: query for query in relevant},
        corpus={text: text for text in texts},
        relevant_docs=relevant,
        query_prompt=description.prompt or None,
        name="retrieval",
        write_csv=False,
    )


def rows_of_batches(descriptions: list[PairDataset], train: DatasetDict, batch_size: int) -> dict[str, int]:
    """Rows of a batch by dataset: the more hard negatives, the fewer, so that all batches are of so many texts."""
    rows = {}
    for description in descriptions:
        texts = 2 + most_negatives(train[description.name])
        rows[description.name] = max(1, min(2 * batch_size // texts, description.batch_size or batch_size))
    return rows


def result_settings(settings: FinetuningArguments, arguments: EmbeddingArguments, descriptions, rows) -> dict:
    """All settings that the trained weights depend on, as JSON gives them back."""
    values = asdict(settings) | {name: getattr(arguments, name) for name in RESULT_SETTINGS}
    # What the file says counts, not its path.
    values["datasets"] = {one.name: asdict(one) | {"rows": rows[one.name]} for one in descriptions}
    values["batches_per_step"] = arguments.world_size * arguments.gradient_accumulation_steps
    return json.loads(json.dumps(values, default=str))


def describe(trainer: EmbeddingTrainer, model: SentenceTransformer, rows: dict[str, int], alpha: float) -> str:
    """The datasets with their sizes, probabilities and batches, and the machine."""
    lines = [f"{'dataset':<20}{'rows':>12}{'drawn':>8}{'rows of a batch':>17}"]
    for name, probability in zip(rows, sampling_probabilities(list(rows.values()), alpha).tolist()):
        lines.append(f"{name:<20}{rows[name]:>12,}{probability:>8.1%}{trainer.batch_sizes[name]:>17}")
    arguments = trainer.args
    lines.append(
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters; {arguments.world_size} x "
        f"{arguments.device.type}; {arguments.gradient_accumulation_steps} batches a step and process"
    )
    return "\n".join(lines)


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(FinetuningArguments, EmbeddingArguments, args=args)
    if arguments.prompts is not None:
        raise ValueError(f"`prompts` is set; instructions stand in {settings.datasets}, one for each dataset.")
    set_seed(arguments.seed)
    output = Path(arguments.output_dir)

    # 2. Data, with one instruction for the queries of each dataset
    with arguments.main_process_first(desc="reading the datasets"):
        descriptions, train, evaluator = read_data(settings)
    if evaluator is None and arguments.eval_strategy != "no":
        raise ValueError(f"`eval_strategy` asks for an evaluation, and {settings.datasets} has no `evaluation`.")
    rows = {name: len(dataset) for name, dataset in train.items()}
    batch_sizes = rows_of_batches(descriptions, train, arguments.per_device_train_batch_size)
    arguments.prompts = {one.name: {"query": one.prompt} if one.prompt else {} for one in descriptions}

    # 3. Model, and the checkpoint to resume from
    values = result_settings(settings, arguments, descriptions, rows)
    resume, _ = newest_checkpoint(output, values)
    # On resume the Trainer loads the weights, unless there is nothing left to train.
    source = str(resume) if resume and step_of(resume) == arguments.max_steps else settings.model
    model = build_encoder(source, settings.max_length, settings.trust_remote_code)
    loss = build_loss(model, settings.temperature, settings.mini_batch_size, settings.matryoshka_dims)

    # 4. Training
    trainer = EmbeddingTrainer(
        model, arguments, train, batch_sizes, settings.alpha, values, loss=loss, evaluator=evaluator
    )
    check_launch(trainer.accelerator)
    if trainer.is_world_process_zero():
        print(describe(trainer, model, rows, settings.alpha), flush=True)
        print(f"resuming from {resume}" if resume else f"starting from {settings.model}", flush=True)
    trainer.train_to_the_end(resume)

    # 5. Evaluation, model with its card, and numbers
    evaluated = any(
        "eval_runtime" in entry and entry["step"] == arguments.max_steps for entry in trainer.state.log_history
    )
    if evaluator is not None and not evaluated:
        trainer.evaluate()
    trainer.save_whole(output / "model")
    if trainer.is_world_process_zero():
        write_json(output / "log.json", trainer.state.log_history)
        print(f"{output / 'model'}, {output / 'log.json'}", flush=True)
    leave(trainer.accelerator)


if __name__ == "__main__":
    main()
