"""Which documents make up each micro-batch of pretraining: order, mixture, packing, and exact resumption.

The plan is a pure function of the settings and a small cursor. Every process computes the whole plan and takes its
share, so the micro-batches of an optimizer step are the same on any number of devices. A checkpoint stores only the
cursor, so resuming takes no longer at step 900,000 than at step 1. See benchmarks/results/scaling.md for why the data
are memory-mapped Arrow shards and not a stream.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from neobert_hf.common.settings import check_numbers
from neobert_hf.data.collator import BatchLayout
from neobert_hf.data.documents import DocumentKey, PreparedDocuments
from neobert_hf.data.shards import check_max_length


@dataclass
class DataArguments:
    """Which data are read, and how they become micro-batches."""

    train_data: list[str] = field(
        metadata={
            "help": "folders or URLs that `prepare_data` wrote; with several, each may have a weight behind a colon "
            "(data/domain:1 data/general:0.3), in whose proportion micro-batches are drawn",
            "path": True,
        }
    )
    max_length: int = field(metadata={"help": "tokens; longer documents are cut"})
    validation_data: list[str] | None = field(
        default=None,
        metadata={"help": "held-out folders that `prepare_data` wrote, each with a loss of its own", "path": True},
    )
    init_from: str | None = field(
        default=None,
        metadata={"help": "start from this run, checkpoint or model instead of random weights", "path": "or Hub id"},
    )
    continue_optimizer: bool = field(
        default=False, metadata={"help": "with init_from: also take over its optimizer state"}
    )
    global_batch_tokens: int = field(default=2**21, metadata={"help": "tokens of an optimizer step, over all devices"})
    micro_batch_tokens: int = field(default=2**15, metadata={"help": "tokens of one forward pass on one device"})
    layout: BatchLayout = field(default="packed", metadata={"help": "packed, padded, or naive (ablation M6)"})
    mlm_probability: float = field(default=0.2, metadata={"help": "share of the tokens to predict"})
    final_mlm_probability: float | None = field(
        default=None,
        metadata={"help": "if set, that share at the last step; it changes by the same amount at each step"},
    )
    validation_mlm_probability: float | None = field(
        default=None, metadata={"help": "share of the held-out tokens to predict; `mlm_probability` if unset"}
    )
    mask_replace_prob: float = field(default=1.0, metadata={"help": "share of those that [MASK] replaces"})
    random_replace_prob: float = field(default=0.0, metadata={"help": "share of those that a random token replaces"})
    min_lengths: list[int] = field(
        default_factory=lambda: [0], metadata={"help": "for each subset, the fewest tokens of a document"}
    )
    probabilities: list[float] = field(
        default_factory=lambda: [1.0], metadata={"help": "probability of drawing each subset"}
    )
    shuffle_shards: int = field(default=8, metadata={"help": "shards whose documents are shuffled together"})
    cache_gb: float = field(
        default=100, metadata={"help": "most gigabytes of shards at URLs (s3://, hf://) that are kept on this machine"}
    )

    def __post_init__(self):
        check_max_length(self.max_length)
        ranges = dict.fromkeys(("global_batch_tokens", "micro_batch_tokens", "shuffle_shards"), "1 or more")
        masks = ("mlm_probability", "final_mlm_probability", "validation_mlm_probability")
        masks = dict.fromkeys((*masks, "mask_replace_prob", "random_replace_prob"), "0 to 1")
        check_numbers(self, ranges | masks | {"min_lengths": "0 or more", "cache_gb": "above 0"})
        if (replaced := self.mask_replace_prob + self.random_replace_prob) > 1:
            raise ValueError(
                f"`mask_replace_prob` and `random_replace_prob` add up to {replaced}; it must be 1 or less."
            )
        shares = self.probabilities
        if len(self.min_lengths) != len(shares) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(
                f"`probabilities` is {shares}; it must give each of `min_lengths`, {self.min_lengths}, a share of the "
                "micro-batches, and the sum must be 1."
            )
        if self.micro_batch_tokens < self.max_length:
            raise ValueError(
                f"`micro_batch_tokens` is {self.micro_batch_tokens:,}, less than one document of `max_length` = "
                f"{self.max_length:,} tokens. Raise it to {self.max_length:,} or more."
            )

    def train_folders(self) -> dict[str, float]:
        """The folders to train on, each with its share of the micro-batches."""
        weights = {}
        for entry in self.train_data:
            folder, _, weight = entry.rpartition(":")
            # What stands behind the colon of a URL is no number.
            weighted = folder and re.fullmatch(r"[0-9.]+", weight)
            folder, weight = (folder, float(weight)) if weighted else (entry, 1.0)
            if not weight:
                raise ValueError(f"`train_data` gives {folder} the weight 0: raise it, or leave the folder out.")
            if folder in weights:
                raise ValueError(f"`train_data` names {folder} twice.")
            weights[folder] = weight
        return {folder: weight / sum(weights.values()) for folder, weight in weights.items()}

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches of each process in a step, so that the global batch is the same for any number of processes."""
        steps, rest = divmod(self.global_batch_tokens, self.micro_batch_tokens * world_size)
        if rest or not steps:
            raise ValueError(
                f"`global_batch_tokens` is {self.global_batch_tokens:,}; it must be a multiple of `micro_batch_tokens` "
                f"({self.micro_batch_tokens:,}) times the number of processes ({world_size}). Change one of them."
            )
        return steps


class Subset(NamedTuple):
    """A part of a mixture: the documents of some shards with at least `min_length` tokens."""

    shards: np.ndarray
    min_length: int
    probability: float
    """Probability that the next micro-batch comes from this subset."""


class MLMBatchSampler(Sampler[list[DocumentKey]]):
    """Endless micro-batches of one process.

    Documents are shuffled within groups of `shuffle_shards` shards, and each epoch groups the shards anew. So reading
    stays nearly sequential, and memory is bounded by a group however large the corpus is. Each micro-batch draws its
    subset (paper, section 3.2: full, 1,024+ and 2,048+ with probabilities 20/40/40; the released code also draws once
    per micro-batch). A micro-batch never spans two groups, so the last one of a group may be smaller.

    With `final_mlm_probability`, the share of tokens to predict changes linearly over the steps, from 30% to 15% in
    Ankner et al. (2023, arXiv 2305.15096).

    Args:
        documents: the corpus.
        settings: used are `micro_batch_tokens`, `layout`, `min_lengths`, `probabilities` and `shuffle_shards`; with
            `final_mlm_probability` also `mlm_probability` and `global_batch_tokens`. A padded micro-batch has
            `micro_batch_tokens // max_length` documents, the paper's way of counting; others have at most
            `micro_batch_tokens` real tokens.
        seed: seed of the order and the mixture.
        rank, world_size: micro-batch number n goes to process n % world_size.
        shares: the share of each folder of `documents` in the micro-batches. Each has the subsets of `min_lengths`.

    Attributes:
        max_steps: optimizer steps of the training; needed if the share of tokens to predict changes.
        cursor: the position of training, as checkpoints store it: `micro_batches` since the start, over all processes,
            and for each of the `subsets` the `epoch`, the `group` in the epoch and the `document` in the group.

    Raises:
        ValueError: before the first batch, if a subset holds no document.
    """

    def __init__(
        self,
        documents: PreparedDocuments,
        settings: DataArguments,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shares: Sequence[float] = (1.0,),
    ):
        self.documents = documents
        self.settings = settings
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.subsets, first = [], 0
        for size, share in zip(documents.shards_in_folder, shares, strict=True):
            shards = np.arange(first, first + size)
            first += size
            for least, probability in zip(settings.min_lengths, settings.probabilities):
                self.subsets.append(Subset(shards, least, share * probability))
        # The group of each subset that is read, and, as loader workers read ahead, of each that is trained on. A group
        # of 8 shards of 100,000 documents takes 13 MB.
        self._shuffled_group = lru_cache(2 * len(self.subsets))(self._shuffle_group)
        # If something is wrong with the data of a subset, it shows now, not in the middle of a run.
        for subset, progress in enumerate(self._start()["subsets"]):
            self._take_documents(subset, progress)
        self.cursor = self._start()
        self.max_steps: int | None = None

    def _start(self) -> dict:
        """The cursor before anything is read."""
        return {"micro_batches": 0, "subsets": [{"epoch": 0, "group": 0, "document": 0} for _ in self.subsets]}

    def __iter__(self) -> Iterator[list[DocumentKey]]:
        cursor = copy.deepcopy(self.cursor)
        while True:
            number = cursor["micro_batches"]
            rows, epoch, subset = self._next_micro_batch(cursor)
            if number % self.world_size == self.rank:
                share = self.mlm_probability(number)
                yield [DocumentKey(row, epoch, subset, share) for row in rows.tolist()]

    def mlm_probability(self, number: int) -> float | None:
        """The share of tokens to predict in a micro-batch, numbered over all processes; None if it never changes."""
        first, last = self.settings.mlm_probability, self.settings.final_mlm_probability
        if last is None:
            return None
        step = number // (self.settings.global_batch_tokens // self.settings.micro_batch_tokens)
        return first + (last - first) * min(1.0, step / max(1, self.max_steps - 1))

    def advance(self, micro_batches: int) -> None:
        """Move the cursor to this number of micro-batches, over all processes, since the start of training.

        Loader workers read ahead, so the sampler's own position is ahead of training: the trainer calls this when it
        saves. It takes 20 to 60 microseconds per micro-batch.
        """
        while self.cursor["micro_batches"] < micro_batches:
            self._next_micro_batch(self.cursor)

    def epoch(self) -> float:
        """Passes over the first subset at the cursor."""
        progress = self.cursor["subsets"][0]
        rows, _ = self._shuffled_group(0, progress["epoch"], progress["group"])
        share_of_group = progress["document"] / max(len(rows), 1)
        return progress["epoch"] + (progress["group"] + share_of_group) / self._groups(0)

    def micro_batches_in(self, epochs: float) -> int:
        """How many micro-batches, over all processes, there are in so many passes over the first subset."""
        cursor, self.cursor = self.cursor, self._start()
        while self.epoch() < epochs:
            self._next_micro_batch(self.cursor)
        micro_batches, self.cursor = self.cursor["micro_batches"], cursor
        return micro_batches

    def _groups(self, subset: int) -> int:
        return -(-len(self.subsets[subset].shards) // self.settings.shuffle_shards)

    def _next_micro_batch(self, cursor: dict) -> tuple[np.ndarray, int, int]:
        """Return rows, epoch and subset of the micro-batch at the cursor, and move the cursor on."""
        probabilities, subset = [each.probability for each in self.subsets], 0
        if len(probabilities) > 1:
            draw = np.random.default_rng([self.seed, 1, cursor["micro_batches"]]).random()
            subset = int(np.searchsorted(np.cumsum(probabilities)[:-1], draw, side="right"))
        cursor["micro_batches"] += 1
        return *self._take_documents(subset, cursor["subsets"][subset]), subset

    def _take_documents(self, subset: int, progress: dict) -> tuple[np.ndarray, int]:
        """Return the rows of the next documents of a subset and their epoch, and move its progress on."""
        # Look through the rest of this epoch and all of the next one, which has other groups.
        for _ in range(2 * self._groups(subset)):
            rows, ends = self._shuffled_group(subset, progress["epoch"], progress["group"])
            if len(rows):
                break
            self._start_next_group(subset, progress)
        else:
            raise ValueError(
                f"No document has {self.subsets[subset].min_length:,} tokens: this subset of the mixture is empty. "
                "Lower its entry in `min_lengths` or drop it."
            )
        start, epoch = progress["document"], progress["epoch"]
        if self.settings.layout == "padded":
            stop = min(start + self.settings.micro_batch_tokens // self.settings.max_length, len(rows))
        else:
            stop = end_of_pack(ends, start, self.settings.micro_batch_tokens)
        progress["document"] = stop
        if stop == len(rows):
            self._start_next_group(subset, progress)
        return rows[start:stop], epoch

    def _start_next_group(self, subset: int, progress: dict) -> None:
        progress["document"] = 0
        progress["group"] += 1
        if progress["group"] == self._groups(subset):
            progress["group"] = 0
            progress["epoch"] += 1

    def _shuffle_group(self, subset: int, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a group in the order of this epoch, and the running total of their tokens."""
        group_size = self.settings.shuffle_shards
        shards = np.random.default_rng([self.seed, 2, subset, epoch]).permutation(self.subsets[subset].shards)
        rows, lengths = [], []
        for shard in shards[group * group_size : (group + 1) * group_size]:
            tokens = self.documents.lengths(shard)
            kept = np.flatnonzero(tokens >= self.subsets[subset].min_length)
            rows.append(self.documents.first(shard) + kept)
            lengths.append(tokens[kept])
        rows, lengths = np.concatenate(rows), np.concatenate(lengths)
        order = np.random.default_rng([self.seed, 3, subset, epoch, group]).permutation(len(rows))
        return rows[order], np.minimum(lengths[order], self.settings.max_length).cumsum()


def end_of_pack(ends: np.ndarray, start: int, tokens: int) -> int:
    """Where a pack of `tokens` from document `start` on ends; `ends` is the running total of the documents' tokens."""
    before = ends[start - 1] if start else 0
    return int(np.searchsorted(ends, before + tokens, side="right"))


class HeldOutBatchSampler(Sampler[list[DocumentKey]]):
    """Every document once, in order and packed: the same micro-batches and masks at each evaluation.

    Every process gets the same number of micro-batches, because engines that shard the weights synchronise in each
    forward pass. If the last round has too few, the last micro-batch is repeated; `is_repeat` says which to leave out.

    Args:
        micro_batch_tokens: most tokens of a micro-batch.

    Attributes:
        tokens: of all documents.
    """

    def __init__(self, documents: PreparedDocuments, micro_batch_tokens: int, rank: int, world_size: int):
        lengths = np.concatenate([documents.lengths(shard) for shard in range(len(documents.shards))])
        ends = np.minimum(lengths, documents.max_length).cumsum()
        self.tokens = int(ends[-1])
        self.batches: list[list[DocumentKey]] = []
        start = 0
        while start < len(ends):
            stop = end_of_pack(ends, start, micro_batch_tokens)
            self.batches.append([DocumentKey(row, epoch=0, subset=0) for row in range(start, stop)])
            start = stop
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world_size)

    def __iter__(self) -> Iterator[list[DocumentKey]]:
        for number in range(self.rank, len(self) * self.world_size, self.world_size):
            yield self.batches[min(number, len(self.batches) - 1)]

    def is_repeat(self, number: int) -> bool:
        """Whether the `number`-th micro-batch of this process is a repetition, to be left out of the mean."""
        return number * self.world_size + self.rank >= len(self.batches)
