"""Promise 2: the FlashAttention route of Transformers, up to the kernel, which a stand-in replaces."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn import functional as F
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model


CALLS = []


def attend(q, k, v, softmax_scale):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale).transpose(-3, -2)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    assert not causal
    CALLS.append("dense")
    return attend(q, k, v, softmax_scale)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    assert not causal and cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff()
    assert max_seqlen_q == max_seqlen_k >= lengths.max() and cu_seqlens_q[-1] == len(q)
    CALLS.append("varlen")
    documents = zip(*(x.split(lengths.tolist()) for x in (q, k, v)))
    return torch.cat([attend(*states, softmax_scale) for states in documents])


NAMES = ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"]


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("implementation", NAMES)
def test_every_layout_reaches_the_right_kernel(implementation, unpad):
    if "/" in implementation:  # What loading a kernel from the Hub registers.
        ALL_ATTENTION_FUNCTIONS.register(implementation, flash_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    expected, model = small_model(NeoBERTForMaskedLM), small_model(NeoBERTForMaskedLM, unpad=unpad)
    # Past the check for an installed flash-attn, which asks for the package and not for the kernel.
    model.config._attn_implementation = implementation
    ids, mask = ragged_batch(side="left")
    packed_ids, packed = packed_batch()
    for inputs, kernel in (
        ({"input_ids": ids}, "dense"),
        ({"input_ids": ids, "attention_mask": mask}, "varlen"),
        ({"input_ids": packed_ids, **packed}, "varlen"),
        ({"input_ids": packed_ids, "position_ids": positions_of((13, 7, 1, 10))}, "varlen"),
    ):
        CALLS.clear()
        found = model(**inputs, output_hidden_states=True)
        assert all(state.shape == (*inputs["input_ids"].shape, 64) for state in found.hidden_states)
        assert (found.logits - expected(**inputs).logits).abs().max() <= 1e-5
        assert CALLS == [kernel] * 2
        found.logits.sum().backward()
