"""Batches of contrastive training: each from one dataset, in an order that depends on the seed alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler
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


class TemperatureBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of one dataset each, which is drawn anew for every optimizer step.

    One optimizer step takes `batches_per_step` batches in a row from its dataset: those of all processes and all
    micro-batches. So processes never mix datasets, and the rows of a step do not depend on how many there are.

    Which dataset comes when is drawn from a generator of its own: Sentence Transformers gives all samplers one, which
    the samplers of the datasets reseed. A dataset that is through starts again in another order. Nothing depends on
    earlier calls, so skipping the batches that were trained on leads back to where a run stopped.

    Args:
        dataset: all datasets, one after the other.
        batch_samplers: of each, with `set_epoch`.
        steps: optimizer steps of the whole training.
        batches_per_step: processes times micro-batches.
        alpha: see `sampling_probabilities`.
        seed: of the draws.
    """

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        steps: int,
        batches_per_step: int,
        alpha: float = 0.5,
        seed: int = 0,
    ):
        super().__init__(dataset, batch_samplers, generator=torch.Generator(), seed=seed)
        # Datasets differ in it. With a number here, Accelerate drops all batches of other sizes.
        self.batch_size = None
        self.steps = steps
        self.batches_per_step = batches_per_step
        self.probabilities = sampling_probabilities([len(part) for part in dataset.datasets], alpha)

    def draws(self) -> list[int]:
        """The dataset of every step."""
        self.generator.manual_seed(self.seed)
        return torch.multinomial(self.probabilities, self.steps, replacement=True, generator=self.generator).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        offsets = [0, *accumulate(len(part) for part in self.dataset.datasets)]
        streams = [_endless(sampler) for sampler in self.batch_samplers]
        for number in self.draws():
            for _ in range(self.batches_per_step):
                yield [offsets[number] + index for index in next(streams[number])]

    def __len__(self) -> int:
        return self.steps * self.batches_per_step


def _endless(sampler: BatchSampler) -> Iterator[list[int]]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from sampler
        epoch += 1


def true_negatives(features: list[dict]) -> list[list[str]]:
    """The hard negatives of each row that are not the positive of any row in the batch."""
    positives = {row["positive"] for row in features}
    return [[text for text in row["negatives"] if text not in positives] for row in features]


class ContrastiveCollator(SentenceTransformerDataCollator):
    """Tokenises rows of `query`, `positive` and `negatives`, a list of any length.

    The hard negatives of all rows become one column, so that rows may have none, and each query is contrasted with all
    of them. A negative that is the positive of another row is left out: it would be a false one there.
    """

    def __call__(self, features: list[dict]) -> dict:
        texts = dict.fromkeys(text for negatives in true_negatives(features) for text in negatives)
        batch = super().__call__([{key: row[key] for key in row if key != "negatives"} for row in features])
        if texts:
            names = {key: features[0][key] for key in features[0] if key == "dataset_name"}
            batch |= super().__call__([{"hard_negative": text} | names for text in texts])
        return batch


class MultiVectorCollator(MultiVectorEncoderDataCollator):
    """As `ContrastiveCollator`, with the columns `negative_0`, `negative_1`, ... that the multi-vector losses need.

    They are as many as every row of the batch can fill. Where rows lack hard negatives, all are contrasted with the
    documents of the batch alone.
    """

    def __call__(self, features: list[dict]) -> dict:
        negatives = true_negatives(features)
        count = min(map(len, negatives))
        rows = []
        for row, texts in zip(features, negatives):
            columns = {f"negative_{number}": text for number, text in enumerate(texts[:count])}
            rows.append({key: row[key] for key in row if key != "negatives"} | columns)
        return super().__call__(rows)


@dataclass
class RerankingCollator(CrossEncoderDataCollator):
    """Pairs of `query` and `document` with the `label` 1 or 0, from rows of `query`, `positive` and `negatives`.

    Args:
        negatives: documents with the label 0 of each query: its own hard negatives first, then positives of the rows
            that follow in the batch, whose order is random.
    """

    negatives: int = 4

    def __call__(self, features: list[dict]) -> dict:
        pairs = []
        for number, row in enumerate(features):
            names = {key: row[key] for key in ("query", "dataset_name") if key in row}
            others = features[number + 1 :] + features[:number]
            texts = dict.fromkeys(row["negatives"] + [other["positive"] for other in others])
            texts.pop(row["positive"], None)
            pairs.append(names | {"document": row["positive"], "label": 1.0})
            pairs += [names | {"document": text, "label": 0.0} for text in list(texts)[: self.negatives]]
        return super().__call__(pairs)
