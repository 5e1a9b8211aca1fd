"""Promise 2: the FlashAttention route of Transformers, up to the kernel, which a stand-in replaces."""

import pytest
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model
from tests.model.flash_kernel import CALLS, flash_model, stand_in


NAMES = ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"]


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    stand_in(monkeypatch)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("implementation", NAMES)
def test_every_layout_reaches_the_right_kernel(implementation, unpad):
    if "/" in implementation:  # What loading a kernel from the Hub registers.
        ALL_ATTENTION_FUNCTIONS.register(implementation, flash_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    expected, model = small_model(NeoBERTForMaskedLM), flash_model(NeoBERTForMaskedLM, implementation, unpad=unpad)
    ids, mask = ragged_batch(side="left")
    packed_ids, packed = packed_batch()
    for inputs, kernel in (
        ({"input_ids": ids}, "dense"),
        ({"input_ids": ids, "attention_mask": mask}, "varlen"),
        ({"input_ids": packed_ids, **packed}, "varlen"),
        ({"input_ids": packed_ids, "position_ids": positions_of((13, 7, 1, 10))}, "varlen"),
    ):
        CALLS.clear()
        found = model(**inputs)
        assert (found.logits - expected(**inputs).logits).abs().max() <= 1e-5
        assert CALLS == [kernel] * 2
        found.logits.sum().backward()
