"""Bad input: an error that names the argument and what is allowed, before a number comes out."""

import math

import pytest
import torch
import transformers

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)
from tests.helpers.models import CPU_BACKENDS, packed_batch, ragged_batch, small_model


IDS, MASK = ragged_batch()
PACKED_IDS, PACKED = packed_batch()
TOTAL = PACKED_IDS.shape[1]


def offsets(*values) -> dict:
    return {"input_ids": PACKED_IDS, "cu_seq_lens_q": torch.tensor(values)}


BAD = {
    "neither": ({}, "exactly one of `input_ids` and `inputs_embeds`; got neither"),
    "both": ({"input_ids": IDS, "inputs_embeds": torch.zeros(4, 13, 64)}, "got both"),
    "id_too_large": (
        {"input_ids": torch.tensor([[5, 100]])},
        "`input_ids` runs from 5 to 100, but only 0 to 99 are allowed",
    ),
    "id_negative": ({"input_ids": torch.tensor([[5, -1]])}, "`input_ids` runs from -1 to 5"),
    "ids_1d": ({"input_ids": torch.tensor([5, 1])}, r"`input_ids` has shape \(2,\), it must be \(batch, length\)"),
    "ids_float": ({"input_ids": torch.ones(1, 3)}, "`input_ids` has dtype torch.float32"),
    "ids_empty": ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "at least one row and one column"),
    "embeds_width": ({"inputs_embeds": torch.zeros(2, 3, 32)}, "`inputs_embeds` has shape .*hidden_size=64"),
    "embeds_int": ({"inputs_embeds": torch.zeros(2, 3, 64, dtype=torch.long)}, "`inputs_embeds` has dtype"),
    "mask_shape": ({"input_ids": IDS, "attention_mask": MASK[:, :5]}, r"`attention_mask` has shape \(4, 5\)"),
    "mask_4d": ({"input_ids": IDS, "attention_mask": torch.ones(4, 1, 13, 13)}, r"shape \(4, 1, 13, 13\)"),
    "mask_half": ({"input_ids": IDS, "attention_mask": MASK / 2}, "of a floating dtype must hold only 0 and 1"),
    "mask_infinite": ({"input_ids": IDS, "attention_mask": (1 - MASK) * -1e38 * 10}, "a 1 in every row; this one does"),
    "mask_hides_nothing": ({"input_ids": IDS, "attention_mask": torch.zeros(MASK.shape)}, "and a 1 in every row"),
    "mask_nan": ({"input_ids": IDS, "attention_mask": MASK * math.nan}, "must hold only 0 and 1"),
    "mask_complex": ({"input_ids": IDS, "attention_mask": MASK * 1j}, "`attention_mask` has dtype torch.complex64"),
    "cache": (
        {"input_ids": IDS, "use_cache": True},
        "`use_cache` is given, but NeoBERT is an encoder and does not use it",
    ),
    "past": ({"input_ids": IDS, "past_key_values": ()}, "`past_key_values` is given"),
    "mask_additive": ({"input_ids": IDS, "attention_mask": (MASK - 1) * 10000}, "`attention_mask` runs from -10000"),
    "mask_documents": ({"input_ids": IDS, "attention_mask": MASK * 2}, "`attention_mask` runs from 0 to 2"),
    "pad_mask": ({"input_ids": IDS, "pad_mask": MASK}, "has no argument `pad_mask`"),
    "typo": ({"input_ids": IDS, "atention_mask": MASK}, "has no argument `atention_mask`"),
    "causal": ({"input_ids": IDS, "is_causal": True}, "has no argument `is_causal`"),
    "positions_shape": ({"input_ids": IDS, "position_ids": torch.zeros(2, 13).long()}, "`position_ids` has shape"),
    "positions_negative": ({"input_ids": IDS[:1], "position_ids": torch.arange(-1, 12)[None]}, "`position_ids` runs"),
    "positions_zero": (
        {"input_ids": IDS, "attention_mask": MASK, "position_ids": torch.zeros_like(IDS)},
        "`position_ids` is all 0, in rows of up to .* every token would be a document of its own",
    ),
    "positions_large": (
        {"input_ids": IDS[:1, :3], "position_ids": torch.arange(3)[None] + 2**24},
        "`position_ids` runs from 16777216 to 16777218, but only 0 to 16777216 are allowed",
    ),
    "items_none": ({"input_ids": IDS, "num_items_in_batch": 0}, "`num_items_in_batch` holds 0, it must be 1 or more"),
    "items_negative": ({"input_ids": IDS, "num_items_in_batch": torch.tensor(-3)}, "`num_items_in_batch` holds -3"),
    "items_nan": ({"input_ids": IDS, "num_items_in_batch": math.nan}, "`num_items_in_batch` holds nan"),
    "positions_fall": (
        {"input_ids": IDS[:1, :4], "position_ids": torch.tensor([[0, 3, 1, 2]])},
        "`position_ids` goes from 3 to 1 in row 0, column 2",
    ),
    "positions_hidden_restart": (
        {
            "input_ids": IDS[:1, :6],
            "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
            "attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1]]),
        },
        "`position_ids` restarts at masked tokens before row 0, column 4",
    ),
    "cu_start": (offsets(1, TOTAL), "`cu_seq_lens_q` is .*must rise from 0"),
    "cu_end": (offsets(0, 5, TOTAL - 1), f"number of tokens .{TOTAL}."),
    "cu_falls": (offsets(0, 9, 5, TOTAL), "must rise from 0"),
    "cu_empty_document": (offsets(0, 5, 5, TOTAL), "at least one token per document"),
    "cu_float": (offsets(0.0, float(TOTAL)), "`cu_seq_lens_q` has dtype"),
    "cu_differ": (
        offsets(0, 5, TOTAL) | {"cu_seq_lens_k": torch.tensor([0, 6, TOTAL])},
        "`cu_seq_lens_q` and `cu_seq_lens_k` differ",
    ),
    "cu_k_alone": ({"input_ids": PACKED_IDS, "cu_seq_lens_k": torch.tensor([0, TOTAL])}, "without `cu_seq_lens_q`"),
    "max_length": (offsets(0, 5, TOTAL) | {"max_length_q": 5}, f"`max_length_q` is 5, but .* {TOTAL - 5} tokens"),
    "max_length_nan": (offsets(0, 5, TOTAL) | {"max_length_q": math.nan}, "`max_length_q` is nan"),
    "max_length_k_alone": ({"input_ids": PACKED_IDS, "max_length_k": TOTAL}, "without `cu_seq_lens_q`"),
    "max_length_k_without_q": (
        offsets(0, TOTAL) | {"max_length_k": TOTAL},
        "`max_length_q` is None and `max_length_k`",
    ),
    "max_lengths_differ": (
        offsets(0, TOTAL) | {"max_length_q": TOTAL, "max_length_k": TOTAL + 1},
        "`max_length_q` is .* and `max_length_k` is .* pass the same value for both",
    ),
    "seq_idx_alone": (
        {"input_ids": PACKED_IDS, "seq_idx": (torch.arange(TOTAL)[None] >= 5).int()},
        "`seq_idx` alone separates nothing: also pass `cu_seq_lens_q`",
    ),
    "seq_idx_differs": (
        offsets(0, 5, TOTAL) | {"seq_idx": (torch.arange(TOTAL)[None] >= 6).int()},
        "`seq_idx` changes at other tokens",
    ),
    "seq_idx_shape": (offsets(0, TOTAL) | {"seq_idx": torch.zeros(TOTAL).int()}, "`seq_idx` has shape"),
    "cu_rows": ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 13])}, "the batch has 4 rows"),
    "cu_and_mask": (
        offsets(0, TOTAL) | {"attention_mask": torch.tensor([[1] * (TOTAL - 1) + [0]])},
        "`cu_seq_lens_q` cannot be combined with padding in `attention_mask`",
    ),
    "cu_and_positions": (
        offsets(0, 5, TOTAL) | {"position_ids": torch.cat([torch.arange(7), torch.arange(TOTAL - 7)])[None]},
        "`position_ids` does not increase within every document",
    ),
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, backend):
    kwargs, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=message):
        small_model(attn_implementation=backend)(**kwargs)


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_other_models_take_means_the_same_here(dtype, backend):
    """PEFT's prompts make masks of floating dtypes, and trainers switch caches off that no encoder has."""
    # More tokens than bfloat16 can count.
    ids, mask = ragged_batch([300, 13, 1])
    inert = {"use_cache": False, "past_key_values": None, "cache_position": None, "head_mask": None}
    for head in (NeoBERTForMaskedLM, NeoBERTForTokenClassification, NeoBERTForSequenceClassification):
        pooling = {"classifier_pooling": "mean"} if head is NeoBERTForSequenceClassification else {}
        model = small_model(head, attn_implementation=backend, max_length=512, **pooling).eval()
        expected = model(ids, attention_mask=mask).logits
        assert torch.equal(model(ids, attention_mask=mask.to(dtype), **inert).logits, expected)
    # The labels' loss gets the same keywords.
    loss = small_model(NeoBERTForMaskedLM).eval()(IDS, attention_mask=MASK.to(dtype), labels=IDS, use_cache=None).loss
    assert loss.isfinite()


def test_bad_labels():
    model = small_model(NeoBERTForMaskedLM)
    with pytest.raises(ValueError, match=r"`labels` has shape \(4, 12\), it must be \(4, 13\)"):
        model(IDS, attention_mask=MASK, labels=IDS[:, 1:])
    with pytest.raises(ValueError, match=r"`labels` has shape \(13, 4\), it must be \(4, 13\)"):
        small_model(NeoBERTForTokenClassification)(IDS, labels=IDS.T % 2)
    with pytest.raises(ValueError, match=r"`labels` has shape \(1,\), it must be \(4,\)"):
        small_model(NeoBERTForSequenceClassification, num_labels=1)(IDS, labels=torch.tensor([0.5]))
    with pytest.raises(ValueError, match="`start_positions` holds -1"):
        answers = {"start_positions": torch.tensor([-1, 0, 0, 0]), "end_positions": torch.zeros(4).long()}
        small_model(NeoBERTForQuestionAnswering)(IDS, **answers)


CLASSES = torch.tensor([0, 1, 2, 1])
EMPTY_ROW = MASK.index_fill(0, torch.tensor([2]), 0)


@pytest.mark.parametrize(
    ("cls", "config", "kwargs", "message"),
    [
        (NeoBERTForMaskedLM, {}, {"labels": IDS * 0 + 100}, "`labels` holds 100, it must be 0 to 99, or -100"),
        (NeoBERTForMaskedLM, {}, {"labels": IDS * 0 - 1}, "`labels` holds -1"),
        (NeoBERTForMaskedLM, {}, {"labels": IDS.float()}, "`labels` has dtype torch.float32"),
        (NeoBERTForTokenClassification, {}, {"labels": IDS * 0 + 2}, "`labels` holds 2, it must be 0 to 1"),
        (NeoBERTForSequenceClassification, {}, {"labels": CLASSES}, "`labels` holds 2, it must be 0 to 1"),
        (
            NeoBERTForSequenceClassification,
            {"num_labels": 3},
            {"labels": CLASSES[:, None].repeat(1, 2)},
            "`labels` has shape",
        ),
        (
            NeoBERTForSequenceClassification,
            {"num_labels": 3},
            {"labels": torch.full((4, 3), 2.0)},
            "holds 2.0, .* 0 or 1",
        ),
        (NeoBERTForSequenceClassification, {"num_labels": 3}, {"labels": torch.full((4, 3), -100.0)}, "holds -100.0"),
        (NeoBERTForSequenceClassification, {"num_labels": 3}, {"labels": torch.full((4, 3), math.nan)}, "holds nan"),
        (
            NeoBERTForSequenceClassification,
            {"num_labels": 1},
            {"labels": torch.full((4,), math.nan)},
            "a finite number",
        ),
        (
            NeoBERTForSequenceClassification,
            # A mean squared error would broadcast them over the four columns.
            {"num_labels": 4, "problem_type": "regression"},
            {"labels": torch.zeros(4)},
            r"`labels` has shape \(4,\), it must be \(4, 4\)",
        ),
        (
            NeoBERTForQuestionAnswering,
            {},
            {"start_positions": CLASSES, "end_positions": CLASSES - torch.tensor([0, 0, 1, 0])},
            "`end_positions` holds 1 in row 2, before `start_positions`, 2",
        ),
        (NeoBERTForQuestionAnswering, {}, {"start_positions": CLASSES[:3], "end_positions": CLASSES[:3]}, "has shape"),
        (NeoBERTForSequenceClassification, {}, {"attention_mask": EMPTY_ROW}, "Row 2 of `attention_mask` is all 0"),
        (
            NeoBERTForSequenceClassification,
            {},
            {"attention_mask": EMPTY_ROW.bool()},
            "Row 2 of `attention_mask` is all 0",
        ),
        (NeoBERTForQuestionAnswering, {}, {"attention_mask": EMPTY_ROW}, "Row 2 of `attention_mask` is all 0"),
    ],
)
def test_labels_and_rows_that_give_no_number(cls, config, kwargs, message):
    with pytest.raises(ValueError, match=message):
        small_model(cls, **config)(IDS, **kwargs)


def test_choices_that_give_no_number():
    model, ids, mask = small_model(NeoBERTForMultipleChoice), IDS.view(2, 2, -1), EMPTY_ROW.view(2, 2, -1)
    with pytest.raises(ValueError, match="Row 2 of `attention_mask` is all 0"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="`labels` holds 2, it must be 0 to 1"):
        model(ids, labels=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="`labels` has dtype torch.float32"):
        model(ids, labels=torch.tensor([0.0, 1.0]))


@torch.no_grad()
def test_labels_that_are_all_ignored_have_no_mean():
    """As in Transformers: there is no mean over nothing. A sum over a batch of several micro-batches is 0."""
    none = torch.full_like(IDS, -100)
    for sparse in (False, True):
        model = small_model(NeoBERTForMaskedLM, sparse_prediction=sparse)
        assert model(IDS, labels=none).loss.isnan()
        assert model(IDS, labels=none, num_items_in_batch=3).loss == 0
    assert small_model(NeoBERTForTokenClassification)(IDS, labels=none).loss.isnan()
    assert small_model(NeoBERTForSequenceClassification)(IDS, labels=none[:, 0]).loss.isnan()
    beyond = torch.full((4,), 13)
    assert small_model(NeoBERTForQuestionAnswering)(IDS, start_positions=beyond, end_positions=beyond).loss.isnan()


@torch.no_grad()
def test_probabilities_are_labels_of_several_classes():
    model = small_model(NeoBERTForSequenceClassification, num_labels=3)
    labels = torch.tensor([[0.0, 0.25, 1.0]] * 4)
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    assert torch.allclose(outputs.loss, torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels))


def test_packed_rows_that_a_head_cannot_tell_apart():
    positions = {"input_ids": PACKED_IDS, "position_ids": torch.arange(TOTAL)[None] % 10}
    with pytest.raises(ValueError, match="pass `cu_seq_lens_q`"):
        small_model(NeoBERTForSequenceClassification)(**positions)
    answers = {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
    with pytest.raises(ValueError, match="softmax would run over all documents in the row"):
        small_model(NeoBERTForQuestionAnswering)(PACKED_IDS, **PACKED, **answers)
    with pytest.raises(ValueError, match="restarts within a row"):
        small_model(NeoBERTForQuestionAnswering)(**positions, **answers)
    with pytest.raises(ValueError, match="both `start_positions` and `end_positions`"):
        small_model(NeoBERTForQuestionAnswering)(IDS, start_positions=torch.tensor([1] * 4))
    with pytest.raises(ValueError, match="choices, length"):
        small_model(NeoBERTForMultipleChoice)(IDS)
    with pytest.raises(ValueError, match="choices cannot be packed"):
        small_model(NeoBERTForMultipleChoice)(PACKED_IDS[None], **PACKED)


def test_padding_without_a_mask_warns(caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.warning_once.cache_clear()
    small_model()(torch.tensor([[5, 6, 0]]))
    assert any("attention_mask" in record.message for record in caplog.records)


@torch.no_grad()
def test_good_input_of_every_kind():
    model = small_model()
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    for mask in (MASK.bool(), MASK.int(), MASK.to(torch.uint8)):
        assert torch.equal(model(IDS, attention_mask=mask).last_hidden_state, expected)
    types = torch.ones_like(IDS)
    assert torch.equal(model(IDS, attention_mask=MASK, token_type_ids=types).last_hidden_state, expected)
    embeds = model.get_input_embeddings()(IDS)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=MASK).last_hidden_state, expected)
    positions = torch.arange(13)[None]
    assert torch.equal(model(IDS, attention_mask=MASK, position_ids=positions).last_hidden_state, expected)
