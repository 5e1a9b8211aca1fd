"""What the recipes that train embedding models and rerankers share: settings, data, evaluation, and resuming."""

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict
from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

from neobert_hf.common.fingerprints import checkpoint_fingerprint, data_fingerprint
from neobert_hf.embeddings.descriptions import PairDataset, read_descriptions
from neobert_hf.embeddings.pairs import load_pairs, load_scored_pairs, most_negatives, positives_of_queries
from neobert_hf.embeddings.trainers import EmbeddingArguments
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.run_checkpoints import newest_checkpoint, step_of


@dataclass
class RecipeArguments:
    """What is trained, on which data."""

    model: str = field(metadata={"help": "an encoder: path or Hub id"})
    datasets: str = field(metadata={"help": "YAML file that describes the datasets"})
    only: list[str] = field(default_factory=list, metadata={"help": "use these datasets of the file; all if empty"})
    max_length: int = field(default=1024, metadata={"help": "tokens; longer texts are cut"})
    max_negatives: int | None = field(default=None, metadata={"help": "hard negatives of a row; all if unset"})
    alpha: float = field(default=0.5, metadata={"help": "datasets are drawn by their size to the power of this"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


@dataclass
class DenseArguments(RecipeArguments):
    """What is trained, on which data, with which loss."""

    temperature: float = field(default=0.07, metadata={"help": "of the cosine similarities in the loss"})
    mini_batch_size: int | None = field(
        default=None, metadata={"help": "texts computed at a time, for batches beyond the memory (GradCache)"}
    )
    matryoshka_dims: list[int] = field(
        default_factory=list, metadata={"help": "train these prefixes of the embeddings as well"}
    )


@dataclass
class SparseArguments(RecipeArguments):
    """What is trained, on which data, and how sparse it becomes (regularisers: https://arxiv.org/abs/2205.04733)."""

    query_weight: float = field(default=5e-5, metadata={"help": "of the FLOPS regulariser of queries"})
    document_weight: float = field(default=3e-5, metadata={"help": "of the FLOPS regulariser of documents"})


@dataclass
class RerankerArguments(RecipeArguments):
    """What is trained, on which data, against which documents."""

    negatives: int = field(default=4, metadata={"help": "wrong documents of a query: its hard negatives, then others"})
    miner: str | None = field(
        default=None, metadata={"help": "embedding model that finds hard negatives where a dataset has none"}
    )


@dataclass
class TrainingData:
    """What the file of `datasets` describes.

    Args:
        descriptions: of the training datasets.
        train: their rows of `query`, `positive` and `negatives`, by name.
        evaluation: descriptions of the datasets for evaluation, by kind.
        retrieval: the rows of the one for retrieval, if there is one.
    """

    descriptions: list[PairDataset]
    train: DatasetDict
    evaluation: dict[str, PairDataset]
    retrieval: Dataset | None

    @property
    def query_prompts(self) -> dict[str, dict[str, str]]:
        """The instruction of each dataset, as `prompts` of trainers that encode queries by themselves."""
        return {
            description.name: {"query": description.prompt} if description.prompt else {}
            for description in self.descriptions
        }


def read_data(settings: RecipeArguments, arguments: EmbeddingArguments) -> TrainingData:
    """Load the datasets, one process after the other.

    Raises:
        ValueError: where the settings contradict the file; see `load_pairs` for what else is refused.
    """
    if arguments.prompts is not None:
        raise ValueError(f"`prompts` is set; instructions stand in {settings.datasets}, one for each dataset.")
    with arguments.main_process_first(desc="reading the datasets"):
        descriptions, evaluation = read_descriptions(settings.datasets, settings.only or None)
        train = {description.name: load_pairs(description, settings.max_negatives) for description in descriptions}
        retrieval = load_pairs(evaluation["retrieval"]) if "retrieval" in evaluation else None
    return TrainingData(descriptions, DatasetDict(train), evaluation, retrieval)


def rows_of_batches(data: TrainingData, batch_size: int) -> dict[str, int]:
    """Rows of a batch by dataset: the more hard negatives, the fewer rows, so that every batch has as many texts.

    Args:
        data: the training datasets.
        batch_size: rows of a dataset without hard negatives.

    Raises:
        ValueError: if they are fewer than 2, so that no row has others to be contrasted with.
    """
    batch_sizes = {}
    for description in data.descriptions:
        name = description.name
        texts = 2 + most_negatives(data.train[name])
        batch_sizes[name] = min(2 * batch_size // texts, description.batch_size or batch_size)
        if batch_sizes[name] < 2:
            raise ValueError(
                f"Dataset {name}: {2 * batch_size} texts are fewer than 2 rows with up to {texts - 2} hard negatives "
                "each, and every row is contrasted with the others of its batch. Set a smaller `max_negatives`, or a "
                f"`per_device_train_batch_size` of {texts} or more."
            )
    return batch_sizes


def run_settings(settings: RecipeArguments, arguments: EmbeddingArguments, data: TrainingData) -> dict:
    """All settings that the trained weights depend on, as JSON gives them back."""
    # Prompts are the instructions of the datasets.
    values = asdict(settings) | result_settings(arguments, leave_out={"prompts", "gradient_accumulation_steps"})
    # What the file says counts, not its path.
    values["datasets"] = {}
    for description in data.descriptions:
        rows = data.train[description.name]
        content = {"rows": len(rows), "fingerprint": data_fingerprint(rows)}
        values["datasets"][description.name] = asdict(description) | content
    values["weights"] = checkpoint_fingerprint(settings.model)
    values["batches_per_step"] = arguments.world_size * arguments.gradient_accumulation_steps
    return json.loads(json.dumps(values, default=str))


def find_checkpoint(model: str, arguments: EmbeddingArguments, values: dict) -> tuple[Path | None, str]:
    """The checkpoint where an interrupted run goes on, if there is one, and what the model is to be built from.

    Args:
        model: what a run starts from.
        arguments: `output_dir` and `max_steps` count.
        values: see `run_settings`.

    Raises:
        CheckpointError: if the checkpoint is damaged or of a run with other settings.
    """
    checkpoint, _ = newest_checkpoint(Path(arguments.output_dir), values)
    if checkpoint is not None and step_of(checkpoint) == arguments.max_steps:
        # Nothing is left to train. Otherwise the Trainer loads the checkpoint's weights by itself.
        return checkpoint, str(checkpoint)
    return checkpoint, model


def retrieval_evaluator(
    data: TrainingData, evaluator_class: type[InformationRetrievalEvaluator] = InformationRetrievalEvaluator
) -> InformationRetrievalEvaluator | None:
    """Every query against all positives of the dataset for retrieval; None if there is no such dataset.

    Args:
        data: what was read.
        evaluator_class: the one for the kind of model.
    """
    if data.retrieval is None:
        return None
    positives = positives_of_queries(data.retrieval)
    return evaluator_class(
        queries={query: query for query in positives},
        corpus={text: text for text in data.retrieval.unique("positive")},
        relevant_docs=positives,
        query_prompt=data.evaluation["retrieval"].prompt or None,
        name="retrieval",
        write_csv=False,
    )


def dense_evaluator(data: TrainingData, arguments: EmbeddingArguments) -> SequentialEvaluator | None:
    """Retrieval and similarity of sentences (STS), as far as there are datasets for them; None if there are none."""
    evaluators = [retrieval_evaluator(data)] if data.retrieval is not None else []
    if "sts" in data.evaluation:
        description = data.evaluation["sts"]
        with arguments.main_process_first(desc="reading the STS dataset"):
            first, second, scores = load_scored_pairs(description)
        # Both sides are queries. This evaluator takes no prompt.
        first = [description.prompt + text for text in first]
        second = [description.prompt + text for text in second]
        evaluators.append(EmbeddingSimilarityEvaluator(first, second, scores, name="sts", write_csv=False))
    return SequentialEvaluator(evaluators) if evaluators else None


def reranking_evaluator(data: TrainingData) -> CrossEncoderRerankingEvaluator | None:
    """The right documents of the first 200 queries, each among 20 others, the same in every run.

    None if there is no dataset for retrieval.
    """
    if data.retrieval is None:
        return None
    prompt = data.evaluation["retrieval"].prompt
    documents = data.retrieval.unique("positive")
    generator = random.Random(0)
    samples = []
    for query, right in list(positives_of_queries(data.retrieval).items())[:200]:
        drawn = generator.sample(documents, min(20 + len(right), len(documents)))
        wrong = [text for text in drawn if text not in right][:20]
        samples.append({"query": prompt + query, "positive": sorted(right), "negative": wrong})
    return CrossEncoderRerankingEvaluator(samples, name="reranking", write_csv=False)
