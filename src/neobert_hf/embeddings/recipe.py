"""What the recipes that train embedding models and rerankers share: settings, data, and what a resume compares."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from neobert_hf.common.fingerprints import checkpoint_fingerprint, data_fingerprint
from neobert_hf.embeddings.datasets import PairDataset, load_pairs, most_negatives, read_descriptions
from neobert_hf.embeddings.trainers import EmbeddingArguments
from neobert_hf.training.run_checkpoints import newest_checkpoint, step_of


# Of the training arguments, those that change the trained weights; the others may differ when a run is resumed.
RESULT_SETTINGS = (
    "optim learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps max_steps weight_decay adam_beta1 "
    "adam_beta2 adam_epsilon max_grad_norm bf16 fp16 seed per_device_train_batch_size batch_sampler"
).split()


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
class RecipeData:
    """What the file of `datasets` describes.

    Args:
        descriptions: of the training datasets.
        train: their rows of `query`, `positive` and `negatives`, by name.
        evaluation: descriptions of the datasets for evaluation, by kind.
        retrieval: the rows of the one for retrieval.
    """

    descriptions: list[PairDataset]
    train: DatasetDict
    evaluation: dict[str, PairDataset]
    retrieval: Dataset | None

    @property
    def query_prompts(self) -> dict[str, dict[str, str]]:
        """The instruction of each dataset, as `prompts` of trainers that encode queries by themselves."""
        return {one.name: {"query": one.prompt} if one.prompt else {} for one in self.descriptions}


def read_data(settings: RecipeArguments, arguments: EmbeddingArguments) -> RecipeData:
    """Load the datasets, one process after the other.

    Raises:
        ValueError: where the settings contradict the file; see `load_pairs` for what else is refused.
    """
    if arguments.prompts is not None:
        raise ValueError(f"`prompts` is set; instructions stand in {settings.datasets}, one for each dataset.")
    with arguments.main_process_first(desc="reading the datasets"):
        descriptions, evaluation = read_descriptions(settings.datasets, settings.only or None)
        train = DatasetDict({one.name: load_pairs(one, settings.max_negatives) for one in descriptions})
        retrieval = load_pairs(evaluation["retrieval"]) if "retrieval" in evaluation else None
    return RecipeData(descriptions, train, evaluation, retrieval)


def rows_of_batches(descriptions: list[PairDataset], train: DatasetDict, batch_size: int) -> dict[str, int]:
    """Rows of a batch by dataset: the more hard negatives, the fewer, so that all batches are of so many texts.

    Raises:
        ValueError: if they are fewer than 2, so that no row has others to be contrasted with.
    """
    rows = {}
    for description in descriptions:
        texts = 2 + most_negatives(train[description.name])
        rows[description.name] = min(2 * batch_size // texts, description.batch_size or batch_size)
        if rows[description.name] < 2:
            raise ValueError(
                f"Dataset {description.name}: {2 * batch_size} texts are fewer than 2 rows with up to {texts - 2} hard "
                "negatives each, and every row is contrasted with the others of its batch. Set a smaller "
                f"`max_negatives`, or a `per_device_train_batch_size` of {texts} or more."
            )
    return rows


def retrieval_evaluator(
    data: RecipeData, cls: type[InformationRetrievalEvaluator] = InformationRetrievalEvaluator
) -> InformationRetrievalEvaluator | None:
    """Every query against all positives of the dataset for retrieval, if there is one.

    Args:
        data: what was read.
        cls: the evaluator for the kind of model.
    """
    if data.retrieval is None:
        return None
    relevant = positives_of_queries(data.retrieval)
    return cls(
        queries={query: query for query in relevant},
        corpus={text: text for text in data.retrieval.unique("positive")},
        relevant_docs=relevant,
        query_prompt=data.evaluation["retrieval"].prompt or None,
        name="retrieval",
        write_csv=False,
    )


def positives_of_queries(pairs: Dataset) -> dict[str, set[str]]:
    relevant = {}
    for query, positive in zip(pairs["query"], pairs["positive"]):
        relevant.setdefault(query, set()).add(positive)
    return relevant


def result_settings(settings: RecipeArguments, arguments: EmbeddingArguments, data: RecipeData) -> dict:
    """All settings that the trained weights depend on, as JSON gives them back."""
    values = asdict(settings) | {name: getattr(arguments, name) for name in RESULT_SETTINGS}
    # What the file says counts, not its path.
    values["datasets"] = {
        one.name: asdict(one)
        | {"rows": len(data.train[one.name]), "fingerprint": data_fingerprint(data.train[one.name])}
        for one in data.descriptions
    }
    values["weights"] = checkpoint_fingerprint(settings.model)
    values["batches_per_step"] = arguments.world_size * arguments.gradient_accumulation_steps
    return json.loads(json.dumps(values, default=str))


def find_resume(model: str, arguments: EmbeddingArguments, values: dict) -> tuple[Path | None, str]:
    """The checkpoint to resume from, if there is one, and what the model is to be built from.

    Raises:
        CheckpointError: if the checkpoint is damaged or of a run with other settings.
    """
    resume, _ = newest_checkpoint(Path(arguments.output_dir), values)
    # On resume the Trainer loads the weights, unless there is nothing left to train.
    return resume, str(resume) if resume and step_of(resume) == arguments.max_steps else model
