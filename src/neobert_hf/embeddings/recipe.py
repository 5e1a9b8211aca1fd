"""What the recipes that train embedding models and rerankers share: settings, data, resuming, and evaluation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import set_seed

from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.run import check_inputs, identity_of
from neobert_hf.common.settings import parse_config
from neobert_hf.data.held_out import report_repeated
from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.datasets import (
    PairDataset,
    TrainingData,
    load_pairs,
    positives_of_queries,
    read_descriptions,
)
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.run import newest_checkpoint, training_folder


# What is written to `output_dir` besides checkpoints, model and log.
WRITES = ("mined", "clusters")


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

    def replace_rows(
        self, dataset: PairDataset, folder: str, made_with: list[Any], make: Callable[[Path], None]
    ) -> None:
        """Replace the rows of a dataset by others, which a model makes of them once, in the first start of the run.

        Args:
            folder: where they are stored, in `output_dir`.
            made_with: what they depend on besides the rows and prompts of the dataset.
            make: makes them, and stores them in the file that it is given; see `write_parquet`.

        Raises:
            FileNotFoundError: if training has begun with such rows, and the file is missing.
        """
        made_of = [dataset.name, dataset.prompt, dataset.document_prompt]
        file = Path(self.arguments.output_dir, folder, f"{fingerprint(dataset.rows, made_of, made_with)}.parquet")
        with self.arguments.main_process_first(desc=folder):
            if not file.exists():
                if self.checkpoint is not None:
                    raise FileNotFoundError(
                        f"{file}, with which this run began, is missing: restore it, or use another `output_dir`."
                    )
                make(file)
        dataset.rows = Dataset.from_parquet(str(file))
        # Loading a model may have drawn random numbers, on which a new head must not depend.
        set_seed(self.arguments.seed)


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
        checkpoint = newest_checkpoint(Path(arguments.output_dir), identity)
        yield Run(settings, arguments, data, identity, checkpoint)


def read_data(settings: RecipeArguments, arguments: EmbeddingArguments) -> TrainingData:
    """Load the datasets, one process after the other. See `load_pairs` for what is refused."""
    data = read_descriptions(settings.datasets, settings.only)
    for dataset in (*data.train.values(), *data.evaluation.values()):
        check_inputs(arguments.output_dir, WRITES, {f"source of {dataset.name}": dataset.sources()})
    with arguments.main_process_first(desc="reading the datasets"):
        for dataset in data.train.values():
            dataset.rows = load_pairs(dataset, settings.max_negatives)
        for kind, dataset in data.evaluation.items():
            dataset.rows = load_pairs(dataset, scored=kind == "sts")
    if "retrieval" in data.evaluation:
        _report_pairs_of_both(data)
    return data


def _report_pairs_of_both(data: TrainingData) -> None:
    retrieval = data.evaluation["retrieval"].rows
    held_out, trained = list(zip(retrieval["query"][:], retrieval["positive"][:])), set()
    queries = pa.array([query for query, _ in held_out], pa.string())
    for dataset in data.train.values():
        # A Python set of millions of pairs would not fit in memory.
        found = pc.is_in(dataset.rows.data.column("query"), value_set=queries).to_numpy()
        rows = dataset.rows.select(np.flatnonzero(found))
        trained |= set(zip(rows["query"][:], rows["positive"][:]))
    report_repeated(trained, held_out, "the retrieval dataset")


def run_identity(settings: RecipeArguments, arguments: EmbeddingArguments, data: TrainingData) -> dict:
    """All that the trained weights depend on, by name."""
    keys = ("instruction", "document_instruction", "batch_size")
    datasets = {
        # The rows, wherever they are from.
        name: {key: getattr(dataset, key) for key in keys} | {"content": fingerprint(dataset.rows)}
        for name, dataset in data.train.items()
    }
    return identity_of(
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
    if "retrieval" not in data.evaluation:
        return None
    dataset = data.evaluation["retrieval"]
    positives = positives_of_queries(dataset.rows)
    return evaluator_class(
        queries={query: query for query in positives},
        corpus={text: text for text in dataset.rows.unique("positive")},
        relevant_docs=positives,
        # Unlike None, an empty prompt also keeps the model from using its own.
        query_prompt=dataset.prompt,
        corpus_prompt=dataset.document_prompt,
        name="retrieval",
        write_csv=False,
    )
