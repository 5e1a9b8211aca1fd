"""Masks: how many, of what, and always the same for the same document; the layouts hold the same documents."""

import numpy as np
import pytest
import torch
from transformers import BertTokenizer

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import DocumentKey
from tests.helpers.models import small_model


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(95))]
LENGTHS = (13, 7, 3, 40, 25)


@pytest.fixture(scope="module")
def tokenizer():
    return BertTokenizer(vocab={token: index for index, token in enumerate(VOCABULARY)})


def documents(lengths=LENGTHS, epoch=0):
    generator = np.random.default_rng(0)
    ids = [np.concatenate([[2], generator.integers(5, 100, size=length - 2), [3]]) for length in lengths]
    return [{"input_ids": row, "key": DocumentKey(index, epoch, 0)} for index, row in enumerate(ids)]


@pytest.mark.parametrize("layout", ["packed", "padded", "naive"])
def test_every_batch_has_something_to_predict(tokenizer, layout):
    """Chance often masks nothing of 13 tokens, or, in the naive layout, only what is cut off; a step had no loss."""
    collator = MLMCollator(tokenizer, mlm_probability=0.05, layout=layout, max_length=8)
    batches = [collator(documents([15], epoch)) for epoch in range(50)]
    labels = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert min(labels) == 1 and max(labels) > 1
    for batch in batches:
        chosen = batch["labels"] != -100
        assert (batch["input_ids"][chosen] == tokenizer.mask_token_id).all() and (batch["labels"][chosen] > 4).all()


def test_masks_are_a_function_of_seed_and_document(tokenizer):
    def labels(**changes):
        settings = {"seed": 0, "key": DocumentKey(5, 1, 0), "company": 0} | changes
        collator = MLMCollator(tokenizer, seed=settings["seed"])
        document = documents([200])[0] | {"key": settings["key"]}
        return collator([*documents()[: settings["company"]], document])["labels"][0, -200:].tolist()

    torch.manual_seed(1)
    first = labels()
    torch.manual_seed(2)
    assert labels() == first
    assert labels(company=3) == first
    others = [labels(seed=1), *(labels(key=DocumentKey(*key)) for key in ((6, 1, 0), (5, 2, 0), (5, 1, 1)))]
    assert all(other != first for other in others)


def test_layouts_hold_the_same_documents_with_the_same_masks(tokenizer):
    packed = MLMCollator(tokenizer)(documents())
    padded = MLMCollator(tokenizer, layout="padded")(documents())
    naive = MLMCollator(tokenizer, layout="naive", max_length=16)(documents())
    mask = padded["attention_mask"].bool()
    assert packed["input_ids"].shape == (1, sum(LENGTHS))
    assert padded["input_ids"].shape == (5, 40) and padded["input_ids"].shape[1] % 8 == 0
    assert mask.sum(1).tolist() == list(LENGTHS)
    assert packed["cu_seq_lens_q"].tolist() == [0, 13, 20, 23, 63, 88] and packed["max_length_q"] == 40
    for name in ("input_ids", "labels"):
        assert torch.equal(padded[name][mask], packed[name][0])
        assert naive[name].shape == (88 // 16, 16)
        assert torch.equal(naive[name].flatten(), packed[name][0, :80])
    assert (padded["labels"][~mask] == -100).all() and (padded["input_ids"][~mask] == 0).all()
    assert set(naive) == {"input_ids", "labels"}


def test_rows_that_are_filled_up_have_the_same_loss(tokenizer):
    """What fills a packed row is documents of padding, which have no labels."""
    plain = MLMCollator(tokenizer)(documents())
    filled = MLMCollator(tokenizer, row_multiple=64)(documents())
    total = sum(LENGTHS)
    assert filled["input_ids"].shape == (1, 128) and filled["cu_seq_lens_q"].tolist()[-2:] == [total, 128]
    assert (filled["input_ids"][0, total:] == 0).all() and (filled["labels"][0, total:] == -100).all()
    for name in ("input_ids", "labels"):
        assert torch.equal(filled[name][:, :total], plain[name])
    # Without RoPE there are no positions beyond the length.
    in_pieces = MLMCollator(tokenizer, row_multiple=64, max_length=50)(documents())
    assert torch.equal(in_pieces["input_ids"], filled["input_ids"]) and in_pieces["max_length_q"] <= 50
    model = small_model(NeoBERTForMaskedLM)
    with torch.no_grad():
        assert model(**filled).loss.item() == pytest.approx(model(**plain).loss.item(), rel=1e-6)
