"""The FlashAttention route of Transformers, up to the kernel.

The kernel is that of tests/helpers/flash_kernel.py; everything before and after it is the real thing.
"""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.flash_kernel import CALLS, flash_model, stand_in
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    stand_in(monkeypatch)


NAMES = ["flash_attention_2", "flash_attention_3", "flash_attention_4", "kernels-community/flash-attn2"]


@torch.no_grad()
@pytest.mark.parametrize("implementation", NAMES)
def test_every_layout_reaches_the_right_kernel(implementation):
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "/" in implementation:  # What loading a kernel from the Hub registers.
        ALL_ATTENTION_FUNCTIONS.register(implementation, flash_attention_forward)
    expected, model = small_model(NeoBERTForMaskedLM), flash_model(NeoBERTForMaskedLM, implementation)
    ids, mask = ragged_batch(side="left")
    packed_ids, packed = packed_batch()
    for inputs, kernel in (
        ({"input_ids": ids}, "dense"),
        ({"input_ids": ids, "attention_mask": mask}, "varlen"),
        ({"input_ids": packed_ids, **packed}, "varlen"),
        ({"input_ids": packed_ids, "position_ids": positions_of((13, 7, 1, 10))}, "varlen"),
    ):
        CALLS.clear()
        assert (model(**inputs).logits - expected(**inputs).logits).abs().max() <= 1e-5
        assert CALLS == [kernel] * 2


@torch.no_grad()
def test_attentions_fall_back_to_eager():
    model = flash_model(NeoBERTForMaskedLM, "flash_attention_2")
    ids, mask = ragged_batch()
    outputs = model(ids, attention_mask=mask, output_attentions=True)
    assert not CALLS and outputs.attentions[0].shape == (4, 4, 13, 13)


def test_compiled_packing_by_positions_is_refused():
    """A flash mask cannot hold documents: without cu_seq_lens they would attend to each other."""
    model = flash_model(NeoBERTForMaskedLM, "flash_attention_2")
    packed_ids, packed = packed_batch()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="only by `cu_seq_lens_q`"):
        compiled(packed_ids, position_ids=positions_of((13, 7, 1, 10)))


def test_compiled_dynamic_rope_is_refused():
    """`max_length_q` may exceed the longest document, so it cannot stand for it."""
    model = flash_model(
        NeoBERTForMaskedLM, "flash_attention_2", rope_parameters={"rope_type": "dynamic", "factor": 2.0}
    )
    packed_ids, packed = packed_batch()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="depends on the longest document"):
        compiled(packed_ids, **packed)
