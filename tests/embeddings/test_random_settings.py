"""Random settings of embedding models and the numbers of the formulas written out here."""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from neobert_hf.embeddings.arguments import DenseArguments, EmbeddingArguments, RecipeArguments, RerankerArguments
from neobert_hf.embeddings.batches import RerankingCollator, draw_datasets, sampling_probabilities
from neobert_hf.embeddings.descriptions import read_descriptions
from neobert_hf.embeddings.models import build_encoder, info_nce_loss
from neobert_hf.embeddings.pairs import load_pairs
from neobert_hf.embeddings.trainers import MixtureTrainer
from tests.helpers.properties import reproducible


def recipe_with(cls: type, values: dict):
    return cls(model="unused", datasets="unused", **values)


TEXTS = ["the value of a name", "lists", "how a class is made", "a", "it is an error", "the end of the line", "ab"]
dense = {"temperature": st.floats(0.01, 2), "mini_batch_size": st.none() | st.integers(1, 5)}


def test_losses(encoder):
    """InfoNCE (section 5.2.1) of the whole embeddings, and beside it of each prefix."""
    model = build_encoder(str(encoder), 48).eval()
    embeddings = torch.tensor(model.encode(TEXTS)).double()

    @reproducible(20)
    @given(
        st.fixed_dictionaries(dense),
        st.lists(st.integers(1, 32), max_size=2),
        st.integers(1, 3),
        st.integers(0, 2),
    )
    def check(values, prefixes, rows, negatives):
        settings = recipe_with(DenseArguments, values | {"matryoshka_dims": prefixes})
        loss = info_nce_loss(model, settings.temperature, settings.mini_batch_size, settings.matryoshka_dims)
        places = [range(rows), range(rows, 2 * rows), range(6, 6 - negatives, -1)]
        columns = [model.preprocess([TEXTS[place] for place in part]) for part in places if len(part)]
        found = loss(columns, None).item()
        queries, documents = embeddings[:rows], embeddings[[place for part in places[1:] for place in part]]
        expected = 0.0
        for size in {32, *prefixes}:
            cosines = F.normalize(queries[:, :size], dim=1) @ F.normalize(documents[:, :size], dim=1).T
            expected -= (cosines / settings.temperature).log_softmax(1).diagonal().mean().item()
        # Cosines are right to 1e-6 in float32, and divided by the temperature.
        close = 1e-5 * max(1, 1 / settings.temperature)
        assert math.isfinite(found) and found == pytest.approx(expected, abs=close, rel=1e-5)

    check()


@reproducible(80)
@given(
    st.lists(st.integers(2, 10**9), min_size=1, max_size=5),
    st.fixed_dictionaries({"alpha": st.floats(0, 3)}),
    st.integers(0, 99),
)
def test_shares_of_datasets(sizes, values, seed):
    alpha = recipe_with(RecipeArguments, values).alpha
    # Relative to the largest one, so that no power is beyond what a number holds.
    weights = [math.exp(alpha * (math.log(size) - math.log(max(sizes)))) for size in sizes]
    shares = [weight / sum(weights) for weight in weights]
    assert sampling_probabilities(sizes, alpha).tolist() == pytest.approx(shares, rel=1e-6, abs=1e-12)
    draws = draw_datasets(sizes, alpha, 1_000, seed)
    for number, share in enumerate(shares):
        # Five standard deviations; rare events have longer tails.
        assert abs(draws.count(number) - 1_000 * share) <= 5 * (1_000 * share * (1 - share)) ** 0.5 + 5


def test_hard_negatives_of_a_row(data):
    (description,), _ = read_descriptions(str(data / "datasets.yaml"), ["nested"])
    stored = Dataset.from_parquet(str(data / "nested.parquet"))["set"]

    @reproducible(12)
    @given(st.fixed_dictionaries({"max_negatives": st.none() | st.integers(0, 3)}))
    def check(values):
        kept = recipe_with(RecipeArguments, values).max_negatives
        pairs = load_pairs(description, kept)
        assert pairs["negatives"][:] == [row["neg"][: len(row["neg"]) if kept is None else kept] for row in stored]
        assert pairs["query"][:] == [row["query"] for row in stored]

    check()


@reproducible(30)
@given(
    st.fixed_dictionaries({"per_device_train_batch_size": st.integers(8, 200)}),
    st.integers(0, 6),
    st.none() | st.integers(2, 50),
)
def test_rows_of_a_batch(values, negatives, limit):
    """At most as many texts as two for each row of a dataset without hard negatives, and no row more would fit."""
    rows = Dataset.from_dict({"negatives": [["text"] * negatives, ["text"]]})
    data = SimpleNamespace(descriptions={"a": SimpleNamespace(batch_size=limit)}, train={"a": rows})
    arguments = EmbeddingArguments("unused", use_cpu=True, bf16=False, report_to="none", **values)
    size = arguments.per_device_train_batch_size
    (found,) = MixtureTrainer.choose_batch_sizes(data, size).values()
    texts = 2 + max(1, negatives)
    assert 2 <= found <= (limit or found) and found * texts <= 2 * size
    assert found == limit or (found + 1) * texts > 2 * size


@reproducible(60)
@given(
    st.fixed_dictionaries({"negatives": st.integers(1, 6)}),
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=5),
)
def test_wrong_documents_of_a_reranker(values, rows):
    count = recipe_with(RerankerArguments, values).negatives
    features = [
        {"query": f"q{number}", "positive": f"d{right}", "negatives": [f"d{wrong}" for wrong in own]}
        for number, (right, own) in enumerate(rows)
    ]
    batch = RerankingCollator(None, negatives=count)(features)
    found = list(zip(batch["query"], batch["document"], batch["label"].tolist()))
    expected = []
    for place, row in enumerate(features):
        others = [features[(place + step) % len(rows)]["positive"] for step in range(1, len(rows))]
        wrong = []
        for text in row["negatives"] + others:
            if text != row["positive"] and text not in wrong and len(wrong) < count:
                wrong.append(text)
        expected += [(row["query"], row["positive"], 1.0)] + [(row["query"], text, 0.0) for text in wrong]
    assert found == expected
