"""Rerankers (cross-encoders): they read a query and a document together and give the pair one score."""

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from datasets import Dataset, concatenate_datasets
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import (
    CrossEncoderCorrelationEvaluator,
    CrossEncoderRerankingEvaluator,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss, MSELoss

from neobert_hf.common.files import remove, write_parquet
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.settings import check_numbers
from neobert_hf.embeddings.arguments import EmbeddingArguments, MiningSettings
from neobert_hf.embeddings.datasets import PairDataset, TrainingData, positives_of_queries
from neobert_hf.embeddings.mining import add_mined_negatives
from neobert_hf.embeddings.models import build, check_reranker, kind_of
from neobert_hf.embeddings.recipe import PairTraining, prepare_training
from neobert_hf.embeddings.trainer import RerankerTrainer
from neobert_hf.training.adapters import LoraArguments
from neobert_hf.training.arguments import use_fast_bfloat16


# Rows that a teacher scores before they are stored.
ROWS_OF_PART = 1_000


@dataclass
class RerankerSettings(LoraArguments, MiningSettings):
    """The model, the data and the negatives of a reranker."""

    learns_scores: ClassVar = True

    score: str | None = field(
        default=None, metadata={"help": "column of `pairs` with a number for each pair, which the model learns"}
    )
    teacher: str | None = field(
        default=None,
        metadata={"help": "a reranker whose scores of texts and hard negatives the model learns", "path": "or Hub id"},
    )
    negatives: int = field(
        default=4,
        metadata={"help": "negatives of a query: first its hard negatives, then right documents of other rows"},
    )

    def __post_init__(self):
        MiningSettings.__post_init__(self)
        LoraArguments.__post_init__(self)
        check_numbers(self, {"negatives": "1 or more"})
        if self.score is not None and self.pairs is None:
            raise ValueError("`score` is a column of `pairs`: give it in the file `datasets`, or name `pairs`.")


@recipe
def train_reranker(settings: RerankerSettings, arguments: EmbeddingArguments) -> Result:
    """Train a reranker (cross-encoder) on pairs of a query and a right text.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.

    Returns:
        The model's folder; `scores` of the ranking of 20 texts for held-out queries, or of the correlation with the
        numbers of held-out pairs, and those `before` training.
    """
    # 1. Data and the checkpoint to go on from
    with prepare_training("train_reranker", settings, arguments) as training:
        if kind_of(settings.model, settings.trust_remote_code) == "CrossEncoder":
            check_reranker(settings.model, "model", settings.trust_remote_code)
        scored = check_scores(training)

        # 2. Hard negatives for the datasets that have none, found by a model that reads the instructions
        if settings.miner is not None:
            add_mined_negatives(training)

        # 3. What a teacher says of each pair
        if settings.teacher is not None:
            add_scores(training)

        # 4. Model, loss and evaluation
        model = build(CrossEncoder, settings.model, settings.max_length, settings.trust_remote_code)
        if scored:
            # The model gives the numbers that it learned, not their sigmoid.
            model.activation_fn = torch.nn.Identity()
            loss = MSELoss(model)
        else:
            # The positive of a query weighs as much as all of its negatives together.
            loss = BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(float(settings.negatives)))
        evaluator = reranking_evaluator(training.data)

        # 5. Training to the end; then the model, its card and the log are saved
        return RerankerTrainer(model, training, loss=loss, evaluator=evaluator).complete()


def check_scores(training: PairTraining) -> bool:
    """Whether numbers are learned in place of right and wrong.

    Raises:
        ValueError: if some pairs have a number and others have none, or if a teacher would have nothing to compare.
    """
    settings, datasets = training.settings, training.data.train.values()
    tables = [bool(table.score) for dataset in datasets for table in dataset.tables]
    if any(tables):
        if not all(tables):
            raise ValueError("Some of the tables have a `score` and others have none: give all of them one.")
        for name in ("teacher", "miner"):
            if (given := getattr(settings, name)) is not None:
                raise ValueError(f"`{name}` is {given!r}, but the pairs have a `score` already: leave it out.")
    if settings.teacher is not None and settings.miner is None:
        for dataset in datasets:
            if not dataset.most_negatives():
                raise ValueError(
                    f"Dataset {dataset.name} has no hard negatives for the teacher to compare: name a `miner`."
                )
    return any(tables) or settings.teacher is not None


def add_scores(training: PairTraining) -> None:
    """Give the rows of the training datasets the teacher's `scores`, of the positive and of each hard negative.

    They are computed once, into `output_dir/scored`.
    """
    settings = training.settings
    identity = [model_fingerprint(settings.teacher), settings.negatives]
    for dataset in training.data.train.values():
        training.replace_rows(dataset, "scored", identity, partial(score_pairs, settings, dataset))


def score_pairs(settings: RerankerSettings, dataset: PairDataset, file: Path) -> None:
    """Store the rows of a dataset with the teacher's logits. An interruption loses one part of the rows at most."""
    teacher = CrossEncoder(settings.teacher, trust_remote_code=settings.trust_remote_code)
    # A cross-encoder of 12 layers scored pairs 2.5 times as fast so, with logits that differed by 0.06 at most.
    use_fast_bfloat16(teacher.float(), teacher.device)
    folder, parts = file.with_suffix(".parts"), []
    for start in range(0, len(dataset.rows), ROWS_OF_PART):
        part = folder / f"{start:09}.parquet"
        if not part.exists():
            rows = dataset.rows.select(range(start, min(start + ROWS_OF_PART, len(dataset.rows))))
            texts = [[row["positive"], *row["negatives"][: settings.negatives]] for row in rows]
            pairs = [(row["query"], text) for row, found in zip(rows, texts) for text in found]
            logits = iter(teacher.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False).tolist())
            write_parquet(part, rows.add_column("scores", [[next(logits) for _ in found] for found in texts]))
            print(f"scored: {start + len(rows):,} of {len(dataset.rows):,} rows of {dataset.name}", flush=True)
        parts.append(Dataset.from_parquet(str(part)))
    write_parquet(file, concatenate_datasets(parts))
    remove(folder)


def reranking_evaluator(data: TrainingData) -> CrossEncoderRerankingEvaluator | CrossEncoderCorrelationEvaluator | None:
    """Ranks the right documents of the first 200 `retrieval` queries among 20 others, the same ones in every run.

    If the pairs have a number, its correlation with the model's.
    """
    if "retrieval" not in data.evaluation:
        return None
    rows = data.evaluation["retrieval"].rows
    if "score" in rows.column_names:
        pairs = list(zip(rows["query"], rows["positive"]))
        return CrossEncoderCorrelationEvaluator(pairs, rows["score"][:], name="scores", write_csv=False)
    documents = rows.unique("positive")
    generator = random.Random(0)
    samples = []
    for query, right in list(positives_of_queries(rows).items())[:200]:
        drawn = generator.sample(documents, min(20 + len(right), len(documents)))
        wrong = [text for text in drawn if text not in right][:20]
        samples.append({"query": query, "positive": sorted(right), "negative": wrong})
    return CrossEncoderRerankingEvaluator(samples, name="reranking", write_csv=False)
