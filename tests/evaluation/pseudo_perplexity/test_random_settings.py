"""Random settings of pseudo-perplexity and the positions, batches and means written out here."""

import random
import string

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from neobert_hf.evaluation.pseudo_perplexity.recipe import PseudoPerplexityArguments, read_texts
from neobert_hf.evaluation.pseudo_perplexity.report import score_texts
from neobert_hf.evaluation.pseudo_perplexity.scoring import masked_batches
from tests.helpers.properties import reproducible
from tests.helpers.small_tokenizer import small_tokenizer


LETTERS = (12, 38, 8, 22, 38, 3, 30)
numbers = {
    "min_tokens": st.integers(0, 30),
    "max_documents": st.none() | st.integers(1, 8),
    "stride": st.integers(1, 9),
    "seed": st.integers(0, 2**40),
    "batch_tokens": st.integers(1, 200),
}
cuts = st.fixed_dictionaries({"max_length": st.none() | st.integers(3, 50)}) | st.fixed_dictionaries(
    {"lengths": st.lists(st.integers(3, 32), min_size=1, max_size=2, unique=True)}
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> tuple[str, list[str]]:
    draw, file = random.Random(0), tmp_path_factory.mktemp("documents") / "a.parquet"
    # Some positions cannot be masked: [SEP] in the middle of a text.
    texts = [" ".join(draw.choices([*string.ascii_lowercase, "[SEP]"], k=letters)) for letters in LETTERS]
    Dataset.from_dict({"text": texts}).to_parquet(file)
    return str(file), texts


def test_positions_batches_and_means(documents):
    source, texts = documents
    tokenizer = small_tokenizer(model_input_names=["input_ids", "attention_mask"])
    # [CLS] ... [SEP]; a text is cut before its own [SEP].
    tokens = [tokenizer(text)["input_ids"] for text in texts]

    @reproducible(80)
    @given(st.fixed_dictionaries(numbers), cuts, st.none() | st.integers(2, 12))
    def check(values, cut, sample):
        if sample is not None:
            values |= {"stride": 1, "sample": sample}
        settings = PseudoPerplexityArguments(["m=m"], source, "unused", **values | cut)
        try:
            found = read_texts(settings, tokenizer)
        except ValueError as error:
            # No document has as many tokens.
            assert f"at least {max(values['min_tokens'], *cut.get('lengths', [0]), 0):,} tokens" in str(error), error
            return
        kept = [row for row, ids in enumerate(tokens) if len(ids) >= values["min_tokens"]][: values["max_documents"]]
        for length in cut.get("lengths", [None]):
            long_enough = [row for row in kept if len(tokens[row]) >= (length or 0)]
            whole = length or cut.get("max_length") or 10**6
            expected = [(row, [*tokens[row][: whole - 1], 3] if len(tokens[row]) > whole else tokens[row])
                        for row in long_enough]  # fmt: skip
            expected.sort(key=lambda row: (len(row[1]), row[0]))
            assert [(text.document, text.ids.tolist()) for text in found[length]] == expected
            check_positions(found[length], values)
            check_batches(found[length], settings.batch_tokens)
            check_means(found[length])

    check()


def check_positions(texts, values: dict) -> None:
    for text in texts:
        # The first five entries of the vocabulary are the special tokens.
        maskable = [place for place, token in enumerate(text.ids.tolist()) if token >= 5]
        chosen = text.positions.tolist()
        assert text.maskable == len(maskable)
        if values.get("sample") is None:
            assert chosen == maskable[:: values["stride"]]
        else:
            assert len(chosen) == min(values["sample"], len(maskable)) == len(set(chosen))
            assert chosen == sorted(chosen) and set(chosen) <= set(maskable)


def check_batches(texts, budget: int) -> None:
    batches = list(masked_batches(texts, budget))
    rows = [(text.document, int(place)) for batch in batches for text, place in batch]
    assert rows == [(text.document, int(place)) for text in texts for place in text.positions]
    for batch in batches:
        assert len({len(text.ids) for text, _ in batch}) == 1
        assert len(batch) == 1 or len(batch) * len(batch[0][0].ids) <= budget
    # Nothing that still fitted was left for the next one.
    for batch, following in zip(batches, batches[1:]):
        length = len(batch[0][0].ids)
        assert len(following[0][0].ids) != length or (len(batch) + 1) * length > budget


def check_means(texts) -> None:
    draw = np.random.default_rng(0)
    losses = [draw.exponential(size=len(text.positions)) for text in texts]
    for text, own, row in zip(texts, losses, score_texts(texts, np.concatenate(losses).tolist())):
        assert row["mean_loss"] == pytest.approx(own.mean()) and row["positions"] == len(own)
        assert row["pseudo_perplexity"] == pytest.approx(np.exp(own.mean()))
        if len(own) == text.maskable:
            assert row["low"] == row["high"] == row["pseudo_perplexity"]
        elif len(own) > 1:
            spread = stats.sem(own) * (1 - len(own) / text.maskable) ** 0.5
            ends = np.exp(stats.t.interval(0.95, len(own) - 1, own.mean(), spread))
            assert (row["low"], row["high"]) == pytest.approx(tuple(ends))
