"""Which rows make a batch of contrastive training, and what the collator makes of them."""

import pytest
from accelerate.data_loader import SkipBatchSampler
from datasets import Dataset
from torch.utils.data import ConcatDataset

from neobert_hf.embeddings.batches import (
    ContrastiveCollator,
    FullBatchSampler,
    MixtureBatchSampler,
    MultiVectorCollator,
    RerankingCollator,
    sampling_probabilities,
)


SIZES = (900, 100, 25)
BATCHES = (8, 4, 5)


def sampler(steps: int = 600, batches_per_step: int = 1) -> MixtureBatchSampler:
    columns = ({side: [f"{side} {row}" for row in range(size)] for side in ("query", "positive")} for size in SIZES)
    parts = [Dataset.from_dict(each) for each in columns]
    samplers = [FullBatchSampler(part, size, seed=0) for part, size in zip(parts, BATCHES)]
    return MixtureBatchSampler(ConcatDataset(parts), samplers, 0.5, steps, batches_per_step, seed=0)


def part_of(batch: list[int]) -> int:
    (part,) = {0 if row < 900 else 1 if row < 1000 else 2 for row in batch}
    return part


def test_rows_of_unequal_labels_are_not_tried_one_by_one(monkeypatch):
    """One label has 9 of 10 rows: where the other is used up, no batch can be filled."""
    texts = {"query": [f"text {n}" for n in range(100)], "positive": ["ba"[n % 10 == 0] for n in range(100)]}
    rows, reads, read = Dataset.from_dict(texts), [], Dataset.__getitem__
    monkeypatch.setattr(Dataset, "__getitem__", lambda self, row: reads.append(row) or read(self, row))
    batches = list(FullBatchSampler(rows, 2, seed=3))
    # 3 passes of 10 rows of the rarer label. Sentence Transformers' own sampler reads 11,000 rows for them.
    assert len(batches) == 30 and all({row % 10 == 0 for row in batch} == {True, False} for batch in batches)
    assert len(reads) < 2_000


def test_each_batch_is_from_one_dataset_drawn_with_the_papers_probabilities():
    # n^0.5: 30, 10, 5.
    expected = [30 / 45, 10 / 45, 5 / 45]
    assert sampling_probabilities(SIZES, 0.5).tolist() == pytest.approx(expected)
    assert sampling_probabilities(SIZES, 0.0).tolist() == pytest.approx([1 / 3] * 3)
    batches = list(sampler())
    assert len(batches) == len(sampler()) == 600
    assert all(len(set(batch)) == BATCHES[part_of(batch)] for batch in batches)
    # Four standard deviations of a share of 4,000 draws are at most 0.032.
    shares = [sampler(steps=4000).draws.count(part) / 4000 for part in range(3)]
    assert shares == pytest.approx(expected, abs=0.032)
    # A dataset is read through before it starts again, in another order.
    small = [batch for batch in batches if part_of(batch) == 2]
    passes = [[row for batch in small[start : start + 5] for row in batch] for start in range(0, 20, 5)]
    assert all(sorted(rows) == list(range(1000, 1025)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 4
    # Skipping batches, as a resumed run does, leads back to the same ones.
    assert list(SkipBatchSampler(sampler(), 57)) == batches[57:]
    # All processes and micro-batches of a step take theirs from one dataset.
    parts = [part_of(batch) for batch in sampler(steps=100, batches_per_step=4)]
    assert len(parts) == 400 and all(len(set(parts[step : step + 4])) == 1 for step in range(0, 400, 4))


# What the collators make of rows: each shows the texts instead of tokens.


def show(texts, prompt=None, task=None):
    return {"texts": texts, "prompt": prompt, "called": task}


ROWS = [
    {"query": f"q{number}", "positive": f"p{number}", "negatives": negatives, "dataset_name": "d"}
    for number, negatives in enumerate((["n0", "n1"], ["p0", "n2", "n3"], ["n4", "n5", "n6"]))
]


def test_all_hard_negatives_are_one_column_without_the_positives_of_the_batch():
    collator = ContrastiveCollator(show, prompts={"d": {"query": "Find. ", "hard_negative": "Text. "}})
    batch = collator([*ROWS, ROWS[0] | {"negatives": []}])
    assert batch["hard_negative_texts"] == ["n0", "n1", "n2", "n3", "n4", "n5", "n6"]
    prompts = (batch[f"{column}_prompt"] for column in ("query", "positive", "hard_negative"))
    assert tuple(prompts) == ("Find. ", None, "Text. ")
    assert collator(ROWS[1:])["hard_negative_texts"][0] == "p0"
    assert "hard_negative_texts" not in collator([ROWS[0] | {"negatives": []}])


def test_late_interaction_gets_as_many_negatives_as_every_row_has():
    batch = MultiVectorCollator(show, prompts={"d": {"query": "Find. "}})(ROWS)
    texts = {name.removesuffix("_texts"): value for name, value in batch.items() if name.endswith("_texts")}
    assert texts == {
        "query": ["q0", "q1", "q2"],
        "positive": ["p0", "p1", "p2"],
        "negative_0": ["n0", "n2", "n4"],
        "negative_1": ["n1", "n3", "n5"],
    }
    assert (batch["query_called"], batch["positive_called"], batch["negative_1_called"]) == ("query", *2 * ["document"])
    batch = MultiVectorCollator(show)([*ROWS, ROWS[0] | {"negatives": []}])
    assert not any(name.startswith("negative") for name in batch)


def test_a_reranker_gets_hard_negatives_first_and_then_other_rows_documents():
    batch = RerankingCollator(None, negatives=3)([*ROWS[:2], ROWS[2] | {"negatives": []}])
    assert batch["label"].tolist() == [1, 0, 0, 0] * 2 + [1, 0, 0]
    assert batch["query"] == ["q0"] * 4 + ["q1"] * 4 + ["q2"] * 3
    assert batch["document"] == ["p0", "n0", "n1", "p1", "p1", "p0", "n2", "n3", "p2", "p0", "p1"]
