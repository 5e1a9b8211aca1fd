"""Promise 2: the FlashAttention route of Transformers, up to the kernel, which a stand-in replaces."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn import functional as F
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.helpers.models import batch_of, small_model


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


@pytest.mark.parametrize("states_wanted", [False, True])
@pytest.mark.parametrize("implementation", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_every_layout_reaches_the_right_kernel(implementation, states_wanted, monkeypatch):
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    if "/" in implementation:  # What loading a kernel from the Hub registers.
        ALL_ATTENTION_FUNCTIONS.register(implementation, flash_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    expected, model = small_model(), small_model()
    # Past the check for an installed flash-attn, which asks for the package and not for the kernel.
    model.config._attn_implementation = implementation
    for layout in ("dense", "left", "cu_seq_lens", "position_ids"):
        CALLS.clear()
        ids, kwargs, _ = batch_of(layout)
        found = model(ids, **kwargs, output_hidden_states=states_wanted)
        assert (found.last_hidden_state - expected(ids, **kwargs).last_hidden_state).abs().max() <= 1e-5
        assert CALLS == ["dense" if layout == "dense" else "varlen"] * 2
        assert all(state.shape == (*ids.shape, 64) for state in found.hidden_states or ())
        found.last_hidden_state.sum().backward()
