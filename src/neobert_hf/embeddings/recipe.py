"""What the recipes that train embedding models and rerankers share: settings, data, evaluation, and resuming."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict
from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from transformers import set_seed

from neobert_hf.common.files import check_inputs
from neobert_hf.common.fingerprints import depends_on, fingerprint, model_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.settings import parse_config
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.data.held_out import report_repeated
from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.datasets import PairDataset, load_pairs, positives_of_queries, read_descriptions
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.run_checkpoints import newest_checkpoint, training_folder


# What is written to `output_dir` besides checkpoints, model and log.
WRITES = ("mined", "clusters")


@dataclass
class TrainingData:
    """What the file of `datasets` describes.

    Args:
        descriptions: of the training datasets, by name.
        train: their rows of `query`, `positive` and `negatives`, by name.
        evaluation: descriptions of the datasets for evaluation, `retrieval` and `sts`, if there are any.
        held_out: their rows; those of `sts` also have a `score`.
    """

    descriptions: dict[str, PairDataset]
    train: DatasetDict
    evaluation: dict[str, PairDataset]
    held_out: dict[str, Dataset]

    def dataset_of_queries(self) -> PairDataset:
        """The training dataset whose instruction becomes the prompt `query` of the model.

        It is the first of these that exists: the dataset that is marked as the `default`, one with the instruction that
        retrieval is evaluated with, the largest one.
        """
        retrieval = self.evaluation.get("retrieval")
        for dataset in self.descriptions.values():
            if dataset.default:
                return dataset
        for dataset in self.descriptions.values():
            if retrieval is not None and dataset.prompt == retrieval.prompt:
                return dataset
        return max(self.descriptions.values(), key=lambda dataset: len(self.train[dataset.name]))

    def prompts(self) -> dict[str, str]:
        """The prompts that the model keeps, by the names of the table in `prompts.py`."""
        prompts = {}
        if len(self.descriptions) > 1:
            # Also an empty one: for a task that has the name of a dataset, MTEB's own wrapper would otherwise put the
            # query prompt before documents, too.
            prompts |= {f"{name}-document": dataset.document_prompt for name, dataset in self.descriptions.items()}
            prompts |= {name: dataset.prompt for name, dataset in self.descriptions.items()}
        default = self.dataset_of_queries()
        return prompts | {"query": default.prompt, "document": default.document_prompt}


@dataclass
class Run:
    """A run of a recipe, ready for its model.

    Args:
        identity: all that the trained weights depend on, stored in checkpoints and compared on resume.
        checkpoint: from which an interrupted run is resumed; None for a new run.
    """

    settings: RecipeArguments
    arguments: EmbeddingArguments
    data: TrainingData
    identity: dict
    checkpoint: Path | None


@contextmanager
def prepare_run(settings_class: type[RecipeArguments], args: list[str] | None = None) -> Iterator[Run]:
    """Read settings and data, and find the checkpoint to resume from. `output_dir` is locked while the block runs.

    Raises:
        SettingsMismatch: if the checkpoint is of a run with other settings.
    """
    settings, arguments = parse_config(settings_class, EmbeddingArguments, args=args)
    models = settings.models()
    with training_folder(arguments, "embedding training", WRITES, models | {"datasets": settings.datasets}):
        for name, path in models.items():
            check_model_exists(path, name)
        set_seed(arguments.seed)
        data = read_data(settings, arguments)
        identity = run_identity(settings, arguments, data)
        checkpoint, _ = newest_checkpoint(Path(arguments.output_dir), identity)
        yield Run(settings, arguments, data, identity, checkpoint)


def read_data(settings: RecipeArguments, arguments: EmbeddingArguments) -> TrainingData:
    """Load the datasets, one process after the other. See `load_pairs` for what is refused."""
    with arguments.main_process_first(desc="reading the datasets"):
        tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
        descriptions, evaluation = read_descriptions(settings.datasets, settings.only, tokenizer)
        for dataset in (*descriptions, *evaluation.values()):
            check_inputs(arguments.output_dir, WRITES, {f"source of {dataset.name}": dataset.sources()})
        train = {dataset.name: load_pairs(dataset, settings.max_negatives) for dataset in descriptions}
        held_out = {kind: load_pairs(dataset, scored=kind == "sts") for kind, dataset in evaluation.items()}
    if "retrieval" in held_out:
        _report_pairs_of_both(train.values(), held_out["retrieval"])
    return TrainingData({each.name: each for each in descriptions}, DatasetDict(train), evaluation, held_out)


def _report_pairs_of_both(train: Iterable[Dataset], retrieval: Dataset) -> None:
    held_out, trained = list(zip(retrieval["query"][:], retrieval["positive"][:])), set()
    queries = pa.array([query for query, _ in held_out], pa.string())
    for table in train:
        # A Python set of millions of pairs would not fit in memory.
        found = pc.is_in(table.data.column("query"), value_set=queries).to_numpy()
        rows = table.select(np.flatnonzero(found))
        trained |= set(zip(rows["query"][:], rows["positive"][:]))
    report_repeated(trained, held_out, "the retrieval dataset")


def run_identity(settings: RecipeArguments, arguments: EmbeddingArguments, data: TrainingData) -> dict:
    """All that the trained weights depend on, by name."""
    keys = ("instruction", "document_instruction", "separator", "batch_size")
    datasets = {
        # The rows, wherever they are from.
        name: {key: getattr(data.descriptions[name], key) for key in keys} | {"content": fingerprint(rows)}
        for name, rows in data.train.items()
    }
    return depends_on(
        settings,
        result_settings(arguments),
        # `prompts` are the instructions of the datasets.
        leave_out=("prompts", "gradient_accumulation_steps"),
        datasets=datasets,
        batches_per_step=arguments.world_size * arguments.gradient_accumulation_steps,
        **{name: model_fingerprint(path) for name, path in settings.models().items()},
    )


def retrieval_evaluator(
    data: TrainingData, evaluator_class: type[InformationRetrievalEvaluator] = InformationRetrievalEvaluator
) -> InformationRetrievalEvaluator | None:
    """Every query against all positives of the dataset for retrieval; None if there is no such dataset."""
    if "retrieval" not in data.held_out:
        return None
    rows, description = data.held_out["retrieval"], data.evaluation["retrieval"]
    positives = positives_of_queries(rows)
    return evaluator_class(
        queries={query: query for query in positives},
        corpus={text: text for text in rows.unique("positive")},
        relevant_docs=positives,
        # Unlike None, an empty prompt also keeps the model from using its own.
        query_prompt=description.prompt,
        corpus_prompt=description.document_prompt,
        name="retrieval",
        write_csv=False,
    )


def dense_evaluator(data: TrainingData) -> SequentialEvaluator | None:
    """Retrieval and similarity of sentences (STS), if there are datasets for them; None if there are none."""
    evaluators = [retrieval_evaluator(data)] if "retrieval" in data.held_out else []
    if "sts" in data.held_out:
        rows, prompt = data.held_out["sts"], data.evaluation["sts"].prompt
        # Both sides are queries. This evaluator takes no prompt, so it is added here.
        first, second = ([prompt + text for text in rows[side]] for side in ("query", "positive"))
        evaluators.append(EmbeddingSimilarityEvaluator(first, second, rows["score"][:], name="sts", write_csv=False))
    return SequentialEvaluator(evaluators) if evaluators else None


def reranking_evaluator(data: TrainingData) -> CrossEncoderRerankingEvaluator | None:
    """Ranks the right documents of the first 200 `retrieval` queries among 20 others, the same ones in every run."""
    if "retrieval" not in data.held_out:
        return None
    rows = data.held_out["retrieval"]
    documents = rows.unique("positive")
    generator = random.Random(0)
    samples = []
    for query, right in list(positives_of_queries(rows).items())[:200]:
        drawn = generator.sample(documents, min(20 + len(right), len(documents)))
        wrong = [text for text in drawn if text not in right][:20]
        samples.append({"query": query, "positive": sorted(right), "negative": wrong})
    return CrossEncoderRerankingEvaluator(samples, name="reranking", write_csv=False)
