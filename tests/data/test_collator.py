"""Masks: how many, of what, and always the same for the same document; the layouts hold the same documents."""

import math

import numpy as np
import pytest
import torch
from transformers import BertTokenizer, Trainer, TrainingArguments

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
    """Of three ordinary tokens, half of the batches would have no mask, and a step no loss."""
    collator = MLMCollator(tokenizer, layout=layout, max_length=5)
    batches = [collator(documents([5], epoch)) for epoch in range(50)]
    labels = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert min(labels) == 1 and max(labels) > 1
    for batch in batches:
        chosen = batch["labels"] != -100
        assert (batch["input_ids"][chosen] == tokenizer.mask_token_id).all() and (batch["labels"][chosen] > 4).all()


@pytest.mark.parametrize("layout", ["packed", "padded", "naive"])
def test_a_plain_trainer_goes_on_where_chance_masks_nothing(tokenizer, tmp_path, layout):
    """Of the naive layout, the end of a batch is cut off, maybe with all that was masked."""
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=1, logging_steps=1, logging_nan_inf_filter=False,
        remove_unused_columns=False, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    collator = MLMCollator(tokenizer, mlm_probability=0.02, layout=layout, max_length=8)
    trainer = Trainer(
        small_model(NeoBERTForMaskedLM), arguments, data_collator=collator, train_dataset=documents([15] * 6)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and all(map(math.isfinite, losses)) and min(losses) > 0


def test_masks_are_a_function_of_seed_and_document(tokenizer):
    def labels(**changes):
        settings = {"seed": 0, "key": DocumentKey(5, 1, 0), "company": 0} | changes
        collator = MLMCollator(tokenizer, seed=settings["seed"])
        batch = [
            *documents()[: settings["company"]],
            {"input_ids": documents([200])[0]["input_ids"], "key": settings["key"]},
        ]
        return collator(batch)["labels"][0, -200:].tolist()

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


def test_packed_and_padded_losses_are_equal_and_naive_is_not(tokenizer):
    model = small_model(NeoBERTForMaskedLM, sparse_prediction=True)
    losses = {}
    for layout in ("packed", "padded", "naive"):
        collator = MLMCollator(tokenizer, layout=layout, max_length=88)
        with torch.no_grad():
            losses[layout] = model(**collator(documents())).loss.item()
    # Float32 sums in another order.
    assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-6)
    assert abs(losses["naive"] - losses["packed"]) > 1e-4


def test_rows_that_are_filled_up_have_the_same_loss(tokenizer):
    """What fills a packed row is one more document, of padding; a bfloat16 row has the same loss and gradients."""
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
    exact = MLMCollator(tokenizer, row_multiple=total)(documents())
    assert exact["input_ids"].shape == (1, total)
    model = small_model(NeoBERTForMaskedLM, vocab_size=100).train()

    def loss_and_gradient(batch, bfloat16: bool):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        return loss.item(), model.model.encoder.weight.grad.clone()

    # A step of bfloat16 is 2^-8.
    for bfloat16, tolerance in ((False, 1e-6), (True, 2**-7)):
        loss, gradient = loss_and_gradient(plain, bfloat16)
        again, other = loss_and_gradient(filled, bfloat16)
        assert abs(again / loss - 1) < tolerance
        assert (other[1:] - gradient[1:]).norm() < tolerance * gradient.norm() and other[0].abs().max() == 0
