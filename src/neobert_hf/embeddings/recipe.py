"""What the recipes that train embedding models and rerankers share: data, resuming, and the evaluation of retrieval."""

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
from transformers import IntervalStrategy, set_seed

from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.paths import check_complete
from neobert_hf.data.held_out import report_repeated
from neobert_hf.data.sources import name_of, read_rows
from neobert_hf.embeddings.arguments import EmbeddingArguments, PairSettings
from neobert_hf.embeddings.datasets import (
    PairDataset,
    TrainingData,
    describe_table,
    hold_out_queries,
    load_pairs,
    positives_of_queries,
    read_descriptions,
)
from neobert_hf.embeddings.models import check_reranker, check_trained, kind_of
from neobert_hf.training.run import Run


# What is written to `output_dir` besides checkpoints, model and log.
WRITES = ("mined", "scored", "clusters")
# The rows, instructions and the number of batches of a step are part of a run's identity by themselves.
LEAVE_OUT = ("query", "positive", "score", "instruction", "held_out", "prompts", "gradient_accumulation_steps")


@dataclass
class PairTraining:
    """A training on pairs, ready for its model.

    Args:
        run: its folder, identity and checkpoint.
    """

    settings: PairSettings
    arguments: EmbeddingArguments
    data: TrainingData
    run: Run

    def replace_rows(
        self, dataset: PairDataset, folder: str, identity: list[Any], make: Callable[[Path], None]
    ) -> None:
        """Replace the rows of a dataset by others, which a model makes of them once, in the first start of the run.

        Args:
            folder: where they are stored, in `output_dir`.
            identity: what they depend on besides the rows and prompts of the dataset.
            make: makes them, and stores them in the file that it is given; see `write_parquet`.

        Raises:
            FileNotFoundError: if training has begun with such rows, and the file is missing.
        """
        described = [dataset.name, dataset.prompt, dataset.document_prompt]
        file = self.run.folder / folder / f"{fingerprint(dataset.rows, described, identity)}.parquet"
        with self.arguments.main_process_first(desc=folder):
            if not file.exists():
                if self.run.checkpoint is not None:
                    raise FileNotFoundError(
                        f"{file}, with which this run began, is missing: restore it, or use another `output_dir`."
                    )
                make(file)
        dataset.rows = Dataset.from_parquet(str(file))
        # Loading a model may have drawn random numbers, on which a new head must not depend.
        set_seed(self.arguments.seed)


@contextmanager
def prepare_training(recipe: str, settings: PairSettings, arguments: EmbeddingArguments) -> Iterator[PairTraining]:
    """Read the data of a run, which keeps `output_dir` while the block runs, and find the checkpoint to go on from.

    Args:
        recipe: its name.

    Raises:
        SettingsMismatch: if the checkpoint is of a run with other settings, data or models.
    """
    data = describe_data(settings)
    models = settings.models()
    datasets = [*data.train.values(), *data.evaluation.values()]
    sources = {f"source of {dataset.name}": dataset.sources() for dataset in datasets}
    sources = sources if settings.pairs is None else {"pairs": settings.pairs}
    folder = {"inputs": models | {"datasets": settings.datasets}, "sources": sources}
    with Run.start(recipe, arguments, settings, **folder, writes=WRITES, leave_out=LEAVE_OUT) as run:
        check_complete(settings.model, "model")
        kind_of(settings.model, settings.trust_remote_code)
        for name in models.keys() - {"model"}:
            check = check_reranker if name == "teacher" else check_trained
            check(models[name], name, settings.trust_remote_code)
        set_seed(arguments.seed)
        load_data(data, settings, arguments)
        keys = ("instruction", "document_instruction", "batch_size")
        best = arguments.load_best_model_at_end
        run.identify(
            datasets={
                # The rows, wherever they are from.
                name: {key: getattr(dataset, key) for key in keys} | {"content": fingerprint(dataset.rows)}
                for name, dataset in data.train.items()
            },
            batches_per_step=arguments.world_size * arguments.gradient_accumulation_steps,
            chosen_by=(arguments.metric_for_best_model, arguments.eval_steps) if best else None,
            **{name: model_fingerprint(path) for name, path in models.items()},
        )
        yield PairTraining(settings, arguments, data, run)


def describe_data(settings: PairSettings) -> TrainingData:
    """The datasets of the settings, without their rows."""
    if settings.pairs is not None:
        columns = next(read_rows(settings.pairs)).cells
        for name in ("query", "positive", "score"):
            column = getattr(settings, name, None)
            if column is not None and column.split(".")[0] not in columns:
                found = ", ".join(map(repr, columns))
                raise ValueError(f"`{name}` is {column!r}, but {name_of(settings.pairs)} has the columns {found}.")
        score = getattr(settings, "score", None)
        return describe_table(settings.pairs, settings.query, settings.positive, settings.instruction, score)
    data = read_descriptions(settings.datasets, settings.only)
    scored = [name for name, dataset in data.train.items() if dataset.is_scored]
    if scored and not settings.learns_scores:
        raise ValueError(f"{settings.datasets}, dataset {scored[0]}: only `train_reranker` learns a `score`.")
    return data


def load_data(data: TrainingData, settings: PairSettings, arguments: EmbeddingArguments) -> None:
    """Load the rows of the datasets, one process after the other. See `load_pairs` for what is refused."""
    with arguments.main_process_first(desc="reading the datasets"):
        for dataset in data.train.values():
            dataset.rows = load_pairs(dataset, settings.max_negatives)
        for dataset in data.evaluation.values():
            dataset.rows = load_pairs(dataset)
    if settings.pairs is not None and settings.held_out and not hold_out_queries(data, settings.held_out):
        arguments.eval_strategy = IntervalStrategy.NO
    if "retrieval" in data.evaluation:
        _report_pairs_of_both(data)


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
