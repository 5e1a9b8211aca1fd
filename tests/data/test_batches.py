"""Which documents make up a micro-batch: all of them, once an epoch, the same on any number of processes."""

import json
from itertools import islice

import numpy as np
import pytest
from transformers import AutoTokenizer

from neobert_hf.data.batches import DataArguments, HeldOutBatchSampler, MLMBatchSampler
from neobert_hf.data.documents import PreparedDocuments
from tests.helpers.shards import write_folder


LENGTHS = np.random.default_rng(0).integers(3, 200, size=1000)
SHARDS = [300, 1, 299, 250, 150]


@pytest.fixture
def folder_of(tmp_path):
    """Document i holds the id i, so that a batch shows what it was made from."""

    def write(lengths=LENGTHS, shards=SHARDS) -> str:
        documents = (np.full(length, index) for index, length in enumerate(lengths))
        return str(write_folder(tmp_path / str(shards), documents, shards))

    return write


@pytest.fixture
def sampler(folder_of):
    def plan(shards=SHARDS, seed=0, **changes) -> MLMBatchSampler:
        settings = {"max_length": 128, "micro_batch_tokens": 512, "shuffle_shards": 2} | changes
        documents = PreparedDocuments([folder_of(LENGTHS, shards)], 128)
        return MLMBatchSampler(documents, DataArguments(["unused"], **settings), seed)

    return plan


def test_an_epoch_is_every_document_once_shuffled_by_seed_and_epoch(sampler):
    def rows(epoch, **changes):
        plan = sampler(**changes)
        keys = [key for keys in islice(plan, plan.micro_batches_in(epoch + 1)) for key in keys]
        return [key.row for key in keys if key.epoch == epoch]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1) and sorted(rows(0)) == sorted(rows(1)) == list(range(1000))
    assert rows(0) != rows(0, seed=1)
    # Within a shard as well as among shards.
    assert rows(0, shards=[1000]) != rows(1, shards=[1000])
    shard_of = np.repeat(range(5), SHARDS)
    # Two large shards lie in one group: neighbours come from both. Other epochs begin with other shards.
    assert any(len(set(shard_of[rows(0)[start : start + 20]])) > 1 for start in (0, 300, 600))
    assert len({frozenset(shard_of[rows(0, seed=seed)[:100]]) for seed in range(6)}) > 1


def test_mixture_draws_subsets_with_their_probabilities(sampler):
    probabilities = (0.2, 0.4, 0.4)
    plan = sampler(min_lengths=(0, 100, 150), probabilities=probabilities)
    batches = list(islice(plan, 5000))
    subsets = [keys[0].subset for keys in batches]
    # Each draw is independent of the one before.
    repeats = sum(first == second for first, second in zip(subsets, subsets[1:])) / 4999
    assert abs(repeats - 0.36) < 4 * (0.36 * 0.64 / 4999) ** 0.5
    for subset, (minimum, probability) in enumerate(zip((0, 100, 150), probabilities)):
        of_subset = [keys for keys in batches if keys[0].subset == subset]
        # Four standard deviations of a binomial share.
        assert abs(len(of_subset) / 5000 - probability) < 4 * (probability * (1 - probability) / 5000) ** 0.5
        lengths = LENGTHS[[key.row for keys in of_subset for key in keys]]
        assert lengths.min() >= minimum
        assert {key.subset for keys in of_subset for key in keys} == {subset}
        first_epoch = [key.row for keys in of_subset for key in keys if key.epoch == 0]
        assert sorted(first_epoch) == np.flatnonzero(LENGTHS >= minimum).tolist()
    # A pass is one over the first subset.
    first = [key.row for keys in batches[: plan.micro_batches_in(1)] for key in keys if key.subset == 0]
    assert sorted(first) == list(range(1000))


def test_the_share_of_masks_goes_from_one_to_the_other_by_steps_on_any_number_of_processes(sampler):
    course = {"mlm_probability": 0.3, "final_mlm_probability": 0.1, "global_batch_tokens": 2048}
    shares = {}
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            plan = sampler(**course)
            plan.rank, plan.world_size, plan.max_steps = rank, world_size, 5
            for number, keys in enumerate(islice(plan, 20 // world_size)):
                shares.setdefault(number * world_size + rank, set()).update(key.mlm_probability for key in keys)
    # Four micro-batches of a step have the same share.
    expected = [0.3, 0.25, 0.2, 0.15, 0.1]
    for number in range(20):
        (share,) = shares[number]
        assert share == pytest.approx(expected[number // 4])
    assert {key.mlm_probability for keys in islice(sampler(), 20) for key in keys} == {None}


def test_each_folder_has_its_share_and_its_subsets(folder_of):
    """The first three shards are in one folder, and the last two, with half as much weight, in another."""
    sizes = {"micro_batch_tokens": 512, "shuffle_shards": 2, "min_lengths": [0, 100], "probabilities": [0.75, 0.25]}
    data = DataArguments(["domain:1", "general:0.5"], 128, **sizes)
    shares = data.train_folders()
    assert list(shares) == ["domain", "general"] and list(shares.values()) == pytest.approx([2 / 3, 1 / 3])
    folders = [folder_of(LENGTHS[:600], SHARDS[:3]), folder_of(LENGTHS[600:], SHARDS[3:])]
    batches = list(islice(MLMBatchSampler(PreparedDocuments(folders, 128), data, shares=list(shares.values())), 2000))
    subsets = [keys[0].subset for keys in batches]
    assert all({key.row >= 600 for key in keys} == {keys[0].subset >= 2} for keys in batches)
    assert all(LENGTHS[key.row] >= 100 for keys in batches for key in keys if key.subset in (1, 3))
    found = [subsets.count(subset) / 2000 for subset in range(4)]
    assert found == pytest.approx([1 / 2, 1 / 6, 1 / 4, 1 / 12], abs=0.04)
    # Every document of the second folder, an epoch after the other.
    second = [key.row for keys in batches for key in keys if key.subset == 2 and key.epoch == 0]
    assert sorted(second) == list(range(600, 1000))


@pytest.mark.parametrize("entry, folder", [("data", "data"), ("data:3", "data"), ("s3://data", "s3://data")])
def test_one_folder_needs_no_weight(entry, folder):
    assert DataArguments([entry], 64).train_folders() == {folder: 1.0}


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"probabilities": [0.5, 0.4], "min_lengths": [0, 10]}, "`probabilities`"),
        ({"micro_batch_tokens": 127}, "`micro_batch_tokens`"),
        ({"train_data": ["a", "a:2"]}, "`train_data`"),
        ({"train_data": ["a:0"]}, "`train_data` gives a the weight 0"),
    ],
)
def test_settings_that_fit_no_data_are_errors_before_the_first_batch(changes, name):
    with pytest.raises(ValueError, match=name):
        DataArguments(**{"train_data": ["a"], "max_length": 128} | changes).train_folders()


def test_documents_are_cut_as_the_tokenizer_cuts(prepared):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    texts = [json.loads(line)["text"] for line in (prepared / "train.jsonl").read_text().splitlines()]
    for max_length in (16, 4096):
        documents = PreparedDocuments([prepared / "train"], max_length)
        for row in (0, 7, 499):
            expected = tokenizer(texts[row], truncation=True, max_length=max_length)["input_ids"]
            assert documents[row].tolist() == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_held_out_documents_count_once(folder_of, world_size):
    counted, rounds = [], set()
    for rank in range(world_size):
        held_out = HeldOutBatchSampler(PreparedDocuments([folder_of()], 128), 512, rank, world_size)
        rounds.add(len(list(held_out)))
        counted += [key.row for number, keys in enumerate(held_out) if not held_out.is_repeat(number) for key in keys]
    assert sorted(counted) == list(range(1000))
    assert len(rounds) == 1
