"""Batches of contrastive training: each from one dataset, in an order that depends on the seed alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile

import torch
from datasets import Dataset
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler, NoDuplicatesBatchSampler
from sentence_transformers.cross_encoder.data_collator import CrossEncoderDataCollator
from sentence_transformers.multi_vector_encoder.data_collator import MultiVectorEncoderDataCollator
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch.utils.data import BatchSampler, ConcatDataset


def sampling_probabilities(sizes: Sequence[int], alpha: float) -> torch.Tensor:
    """The probability of each dataset: its size to the power of alpha, normalised.

    References:
        The paper, section D.2, with an alpha of 0.5; 1 is proportional to the size, 0 uniform.
    """
    weights = torch.tensor(sizes, dtype=torch.float64) ** alpha
    return weights / weights.sum()


class FullBatchSampler(NoDuplicatesBatchSampler):
    """Full batches in which no text occurs twice. A pass ends at the first batch that cannot be filled.

    The sampler of Sentence Transformers would try to fill a batch from each of the remaining rows, and read all other
    rows each time: once the rarer of two labels was used up, 1,000 rows took 17 seconds, and the time grows with the
    square of the number of rows.
    """

    def __init__(self, pairs: Dataset, batch_size: int, seed: int):
        # Without the hard negatives: two rows that have none would count as having a text in common.
        texts = pairs.select_columns(["query", "positive"])
        # With `drop_last=True`, `_iter_one_pass` would not see the first batch that is not full.
        super().__init__(texts, batch_size, drop_last=False, generator=torch.Generator(), seed=seed)

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def _iter_one_pass(self, *functions) -> Iterator[list[int]]:
        yield from takewhile(lambda rows: len(rows) == self.batch_size, super()._iter_one_pass(*functions))


class MixtureBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches that each come from one dataset. The dataset may change from one optimizer step to the next.

    One optimizer step takes `batches_per_step` batches in a row from its dataset: those of all processes and all
    micro-batches. So processes never mix datasets, and the rows of a step do not depend on how many processes there
    are. A dataset whose rows have all been used starts again in another order.

    Nothing depends on earlier iterations, so skipping the batches that were trained on leads back to where a run
    stopped.

    Args:
        dataset: all datasets, one after the other.
        batch_samplers: one for each dataset, with `set_epoch`.
        alpha: see `sampling_probabilities`.
        steps: optimizer steps.
        batches_per_step: processes times micro-batches.
        seed: of the draws.

    Attributes:
        draws: the number of the dataset that each optimizer step takes its rows from.
    """

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        alpha: float,
        steps: int,
        batches_per_step: int,
        seed: int,
    ):
        super().__init__(dataset, batch_samplers)
        # It differs between datasets. If it were a number, Accelerate would drop all batches of other sizes.
        self.batch_size = None
        self.batches_per_step = batches_per_step
        # A separate generator: Sentence Transformers gives one to all samplers, and those of the datasets reseed it.
        generator = torch.Generator().manual_seed(seed)
        probabilities = sampling_probabilities([len(part) for part in dataset.datasets], alpha)
        self.draws = torch.multinomial(probabilities, steps, replacement=True, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        first_rows = [0, *accumulate(len(part) for part in self.dataset.datasets)]
        streams = [_endless(sampler) for sampler in self.batch_samplers]
        for number in self.draws:
            for _ in range(self.batches_per_step):
                yield [first_rows[number] + row for row in next(streams[number])]

    def __len__(self) -> int:
        return len(self.draws) * self.batches_per_step


def _endless(sampler: BatchSampler) -> Iterator[list[int]]:
    """The batches of one dataset, in another order in each pass over it."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from sampler


def split_negatives(features: list[dict]) -> tuple[list[dict], list[list[str]]]:
    """Rows without their hard negatives, and the hard negatives of each that are not the positive of any row.

    As a positive of another row, a text is its negative already, and of that row itself it would be a false negative.
    """
    positives = {row["positive"] for row in features}
    rows = [{key: row[key] for key in row if key != "negatives"} for row in features]
    return rows, [[text for text in row["negatives"] if text not in positives] for row in features]


class ContrastiveCollator(SentenceTransformerDataCollator):
    """Tokenises rows of `query`, `positive` and `negatives`, a list of any length.

    The hard negatives of all rows become one column, so that rows may have none, and each query is contrasted with all
    of them.
    """

    def __call__(self, features: list[dict]) -> dict:
        rows, negatives = split_negatives(features)
        batch = super().__call__(rows)
        if different := dict.fromkeys(text for texts in negatives for text in texts):
            # The prompts are chosen by the name of the dataset.
            name = {"dataset_name": batch["dataset_name"]} if "dataset_name" in batch else {}
            batch |= super().__call__([{"hard_negative": text} | name for text in different])
        return batch


class MultiVectorCollator(MultiVectorEncoderDataCollator):
    """As `ContrastiveCollator`, with the columns `negative_0`, `negative_1`, ... that the multi-vector losses need.

    There are as many of these columns as every row of the batch can fill. If a row has no hard negatives, all rows of
    the batch are contrasted with each other's documents only.
    """

    def __call__(self, features: list[dict]) -> dict:
        rows, negatives = split_negatives(features)
        every = range(min(map(len, negatives)))
        columns = [{f"negative_{number}": texts[number] for number in every} for texts in negatives]
        return super().__call__([row | texts for row, texts in zip(rows, columns)])


@dataclass
class RerankingCollator(CrossEncoderDataCollator):
    """Pairs of `query` and `document` with the `label` 1 or 0, from rows of `query`, `positive` and `negatives`.

    Of rows with a `score`, or with `scores` of the positive and each hard negative, these are the labels.

    Args:
        negatives: the number of documents with the label 0 for each query. The query's own hard negatives come first,
            then the positives of the rows that follow in the batch, whose order is random and which have no scores.
    """

    negatives: int = 4

    def __call__(self, features: list[dict]) -> dict:
        pairs = []
        for number, row in enumerate(features):
            query = {key: row[key] for key in ("query", "dataset_name") if key in row}
            if scores := row.get("scores") or ([row["score"]] if "score" in row else None):
                texts = [row["positive"], *row["negatives"][: self.negatives]]
                pairs += [query | {"document": text, "label": score} for text, score in zip(texts, scores)]
                continue
            following = features[number + 1 :] + features[:number]
            wrong = dict.fromkeys(row["negatives"] + [other["positive"] for other in following])
            wrong.pop(row["positive"], None)
            pairs.append(query | {"document": row["positive"], "label": 1.0})
            pairs += [query | {"document": text, "label": 0.0} for text in list(wrong)[: self.negatives]]
        return super().__call__(pairs)
