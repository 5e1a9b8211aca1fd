"""What the recipes that train embedding models and rerankers share: settings, data, evaluation, and resuming."""

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import cached_file

from neobert_hf.common.files import check_inputs
from neobert_hf.common.fingerprints import depends_on, fingerprint, model_fingerprint
from neobert_hf.common.settings import parse_config
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.data.held_out import report_repeated
from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.descriptions import PairDataset, read_descriptions
from neobert_hf.embeddings.instructions import add_prompt
from neobert_hf.embeddings.pairs import load_pairs, load_scored_pairs, most_negatives, positives_of_queries
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.launching import training_folder
from neobert_hf.training.run_checkpoints import newest_checkpoint


# What is written to `output_dir` besides checkpoints, model and log.
WRITES = ("mined", "clusters")


@dataclass
class TrainingData:
    """What the file of `datasets` describes.

    Args:
        descriptions: of the training datasets, by name.
        train: their rows of `query`, `positive` and `negatives`, by name.
        evaluation: descriptions of the datasets for evaluation, `retrieval` and `sts`, if there are any.
        retrieval: the rows of the dataset for retrieval.
    """

    descriptions: dict[str, PairDataset]
    train: DatasetDict
    evaluation: dict[str, PairDataset]
    retrieval: Dataset | None

    def without_instructions(self) -> "TrainingData":
        descriptions, evaluation = (
            {name: replace(dataset, instruction="", document_instruction="") for name, dataset in datasets.items()}
            for datasets in (self.descriptions, self.evaluation)
        )
        return replace(self, descriptions=descriptions, evaluation=evaluation)


@dataclass
class Run:
    """A run of a recipe, ready for its model.

    Args:
        values: all settings that the trained weights depend on.
        checkpoint: from which an interrupted run is resumed; None for a new run.
    """

    settings: RecipeArguments
    arguments: EmbeddingArguments
    data: TrainingData
    values: dict
    checkpoint: Path | None


@contextmanager
def prepare_run(settings_class: type[RecipeArguments], args: list[str] | None = None) -> Iterator[Run]:
    """Read settings and data, and find the checkpoint to resume from. `output_dir` is locked while the block runs.

    Raises:
        SettingsMismatch: if the checkpoint is of a run with other settings.
    """
    settings, arguments = parse_config(settings_class, EmbeddingArguments, args=args)
    names = ("model", "datasets", "miner", "cross_encoder", "guide", "first_model")
    inputs = {name: getattr(settings, name, None) for name in names}
    with training_folder(arguments, "embedding training", WRITES, inputs):
        settings.check_models()
        set_seed(arguments.seed)
        data = read_data(settings, arguments)
        if arguments.eval_strategy != "no" and not data.evaluation:
            raise ValueError(
                f"{settings.datasets} describes no `evaluation`, and `eval_strategy` is "
                f"{arguments.eval_strategy.value}: describe one there, as configs/embeddings/small_datasets.yaml does, "
                "or train with `--eval_strategy no`."
            )
        values = run_settings(settings, arguments, data)
        checkpoint, _ = newest_checkpoint(Path(arguments.output_dir), values)
        yield Run(settings, arguments, data, values, checkpoint)


def read_data(settings: RecipeArguments, arguments: EmbeddingArguments) -> TrainingData:
    """Load the datasets, one process after the other. See `load_pairs` for what is refused."""
    if arguments.prompts is not None:
        raise ValueError(
            f"`prompts` is set: leave it out, and give each dataset an `instruction` in {settings.datasets}."
        )
    with arguments.main_process_first(desc="reading the datasets"):
        tokenizer_of_encoder = partial(_tokenizer_of_encoder, settings)
        descriptions, evaluation = read_descriptions(settings.datasets, settings.only or None, tokenizer_of_encoder)
        for dataset in (*descriptions, *evaluation.values()):
            check_inputs(arguments.output_dir, WRITES, {f"source of {dataset.name}": dataset.sources()})
        train = {dataset.name: load_pairs(dataset, settings.max_negatives) for dataset in descriptions}
        retrieval = load_pairs(evaluation["retrieval"]) if "retrieval" in evaluation else None
    by_name = {dataset.name: dataset for dataset in descriptions}
    if retrieval is not None:
        _report_repeated_pairs(train.values(), retrieval)
    return TrainingData(by_name, DatasetDict(train), evaluation, retrieval)


def _report_repeated_pairs(train: Iterable[Dataset], retrieval: Dataset) -> None:
    held_out, trained = list(zip(retrieval["query"][:], retrieval["positive"][:])), set()
    queries = pa.array([query for query, _ in held_out], pa.string())
    for table in train:
        # A Python set of millions of pairs would not fit in memory.
        found = pc.is_in(table.data.column("query"), value_set=queries).to_numpy()
        rows = table.select(np.flatnonzero(found))
        trained |= set(zip(rows["query"][:], rows["positive"][:]))
    report_repeated(trained, held_out, "the retrieval dataset")


def run_settings(settings: RecipeArguments, arguments: EmbeddingArguments, data: TrainingData) -> dict:
    """All that the trained weights depend on."""
    helpers = ["guide", "first_model"]
    # The miner is not used if all datasets have hard negatives.
    mines = getattr(settings, "miner", None) and not all(map(most_negatives, data.train.values()))
    if mines:
        helpers += ["miner", "cross_encoder"]
    # `prompts` are the instructions of the datasets.
    unused = {"prompts", "gradient_accumulation_steps"} | (set() if mines else {"relative_margin", "absolute_margin"})
    return depends_on(
        settings,
        result_settings(arguments),
        leave_out=unused,
        model=model_fingerprint(settings.model),
        datasets={name: _content(data.descriptions[name], rows) for name, rows in data.train.items()},
        batches_per_step=arguments.world_size * arguments.gradient_accumulation_steps,
        **{name: model_fingerprint(helper) for name in helpers if (helper := getattr(settings, name, None))},
    )


def _content(description: PairDataset, rows: Dataset) -> dict:
    """What training depends on of a dataset: its rows, wherever they are from, its instructions and its batch size."""
    names = ("instruction", "document_instruction", "separator", "batch_size")
    described = {name: getattr(description, name) for name in names}
    return described | {"rows": len(rows), "content": fingerprint(rows)}


def _tokenizer_of_encoder(settings: RecipeArguments) -> PreTrainedTokenizerBase:
    subfolder = _subfolder_of_encoder(settings)
    return load_tokenizer(settings.model, subfolder=subfolder, trust_remote_code=settings.trust_remote_code)


def _subfolder_of_encoder(settings: RecipeArguments) -> str:
    modules = read_beside_model(settings.model, "modules.json")
    return json.loads(modules)[0]["path"] if modules else ""


def read_beside_model(model: str, name: str) -> str:
    """The content of a file of a model (folder or Hub id); empty if there is no such file."""
    file = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return Path(file).read_text(encoding="utf-8") if file else ""


def retrieval_evaluator(
    data: TrainingData, evaluator_class: type[InformationRetrievalEvaluator] = InformationRetrievalEvaluator
) -> InformationRetrievalEvaluator | None:
    """Every query against all positives of the dataset for retrieval; None if there is no such dataset."""
    if data.retrieval is None:
        return None
    positives = positives_of_queries(data.retrieval)
    return evaluator_class(
        queries={query: query for query in positives},
        corpus={text: text for text in data.retrieval.unique("positive")},
        relevant_docs=positives,
        # Unlike None, an empty prompt also keeps the model from using its own.
        query_prompt=data.evaluation["retrieval"].prompt,
        corpus_prompt=data.evaluation["retrieval"].document_prompt,
        name="retrieval",
        write_csv=False,
    )


def dense_evaluator(run: Run) -> SequentialEvaluator | None:
    """Retrieval and similarity of sentences (STS), if there are datasets for them; None if there are none."""
    evaluators = [retrieval_evaluator(run.data)] if run.data.retrieval is not None else []
    if "sts" in run.data.evaluation:
        description = run.data.evaluation["sts"]
        with run.arguments.main_process_first(desc="reading the STS dataset"):
            first, second, scores = load_scored_pairs(description)
        # Both sides are queries. This evaluator takes no prompt, so it is added here.
        first, second = (add_prompt(description.prompt, texts) for texts in (first, second))
        evaluators.append(EmbeddingSimilarityEvaluator(first, second, scores, name="sts", write_csv=False))
    return SequentialEvaluator(evaluators) if evaluators else None


def reranking_evaluator(data: TrainingData) -> CrossEncoderRerankingEvaluator | None:
    """Ranks the right documents of the first 200 `retrieval` queries among 20 others, the same ones in every run."""
    if data.retrieval is None:
        return None
    prompt = data.evaluation["retrieval"].prompt
    documents = data.retrieval.unique("positive")
    generator = random.Random(0)
    samples = []
    for query, right in list(positives_of_queries(data.retrieval).items())[:200]:
        drawn = generator.sample(documents, min(20 + len(right), len(documents)))
        wrong = [text for text in drawn if text not in right][:20]
        samples.append({"query": add_prompt(prompt, [query])[0], "positive": sorted(right), "negative": wrong})
    # Queries have their prompt already. That of documents is empty, so the model does not add one of its own.
    return CrossEncoderRerankingEvaluator(samples, name="reranking", prompt_name="document", write_csv=False)
