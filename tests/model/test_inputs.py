"""Promise 5: arguments that do not fit are errors that name the argument; what other models are given is ignored."""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForMultipleChoice, NeoBERTForSequenceClassification
from tests.helpers.models import CLASSES, ragged_batch, small_model


IDS, MASK = ragged_batch()


def offsets(*values, ids=IDS[:1], **more) -> dict:
    return {"input_ids": ids, "cu_seq_lens_q": torch.tensor(values), **more}


BAD = {
    "additive mask": ({"input_ids": IDS, "attention_mask": (1 - MASK) * -10000}, "attention_mask"),
    "mask of numbers": ({"input_ids": IDS, "attention_mask": MASK * 2}, "attention_mask"),
    "mask of nan": ({"input_ids": IDS, "attention_mask": MASK * float("nan")}, "attention_mask"),
    "shorter mask": ({"input_ids": IDS, "attention_mask": MASK[:, :5]}, "attention_mask"),
    "4D mask": ({"input_ids": IDS, "attention_mask": torch.ones(4, 1, 13, 13)}, "attention_mask"),
    "mask of embeddings": ({"inputs_embeds": torch.zeros(4, 12, 64), "attention_mask": MASK}, "attention_mask"),
    "id too large": ({"input_ids": torch.tensor([[5, 100]])}, "input_ids"),
    "negative id": ({"input_ids": torch.tensor([[5, -1]])}, "input_ids"),
    "neither": ({"attention_mask": MASK}, "input_ids"),
    "both": ({"input_ids": IDS, "inputs_embeds": torch.zeros(4, 13, 64)}, "inputs_embeds"),
    "a document for each token": ({"input_ids": IDS, "position_ids": torch.zeros_like(IDS)}, "position_ids"),
    "late offsets": (offsets(1, 13), "cu_seq_lens_q"),
    "early end": (offsets(0, 5, 12), "cu_seq_lens_q"),
    "late end": (offsets(0, 5, 14), "cu_seq_lens_q"),
    "falling offsets": (offsets(0, 8, 5, 13), "cu_seq_lens_q"),
    "empty document": (offsets(0, 5, 5, 13), "cu_seq_lens_q"),
    "offsets of rows": (offsets(0, 13, ids=IDS), "cu_seq_lens_q"),
    "offsets and padding": (offsets(0, 13, ids=IDS[1:2], attention_mask=MASK[1:2]), "cu_seq_lens_q"),
}


@pytest.mark.parametrize("case", BAD)
def test_values_that_do_not_fit(case):
    arguments, name = BAD[case]
    with pytest.raises(ValueError, match=f"`{name}`"):
        small_model()(**arguments)


MISSPELT = ["pad_mask", "attention_masks", "position_id", "input_embeds", "label", "cu_seqlens_q", "Attention_mask"]


@pytest.mark.parametrize("cls", CLASSES)
def test_misspelt_keywords(cls):
    model, ids = small_model(cls), IDS.view(2, 2, -1) if cls is NeoBERTForMultipleChoice else IDS
    for keyword in MISSPELT:
        with pytest.raises(TypeError, match=f"`{keyword}`"):
            model(ids, **{keyword: torch.ones_like(ids)})


@torch.no_grad()
@pytest.mark.parametrize("cls", CLASSES)
def test_what_other_models_are_given_is_ignored(cls):
    """Fields of tokenizers, collators and Sentence Transformers' features, and switches of decoders."""
    ids, mask = (x.view(2, 2, -1) if cls is NeoBERTForMultipleChoice else x for x in (IDS, MASK))
    extra = {"special_tokens_mask": mask, "offset_mapping": torch.stack((ids, ids), -1), "length": mask.sum(-1)}
    extra |= {"overflow_to_sample_mapping": mask, "seq_idx": mask, "use_cache": False, "past_key_values": None}
    extra |= {"sentence_embedding": torch.ones(4, 64), "prompt_length": 3, "modality": "text"}
    model = small_model(cls)
    expected, found = (model(ids, attention_mask=mask, **more)[0] for more in ({}, extra))
    assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_and_ids_of_any_dtype(dtype):
    """PEFT's prompts make masks of floating dtypes. There are more tokens here than bfloat16 can count."""
    ids, mask = ragged_batch((300, 13, 1))
    for cls in (NeoBERTForMaskedLM, NeoBERTForSequenceClassification):
        model = small_model(cls, classifier_pooling="mean", max_length=512)
        expected = model(ids, attention_mask=mask).logits
        assert torch.equal(model(ids.int(), attention_mask=mask.to(dtype)).logits, expected)


@torch.no_grad()
def test_the_same_batch_in_other_words():
    model = small_model()
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    embeds = model.get_input_embeddings()(IDS)
    for arguments in (
        {"inputs_embeds": embeds},
        {"input_ids": IDS, "token_type_ids": MASK},
        {"input_ids": IDS, "position_ids": torch.arange(13)[None]},
        {"input_ids": IDS, "position_ids": torch.arange(13).expand(4, 13)},
    ):
        assert torch.equal(model(attention_mask=MASK, **arguments).last_hidden_state, expected)
