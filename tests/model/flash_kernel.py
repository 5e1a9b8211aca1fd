"""A stand-in for the FlashAttention kernels, none of which runs on a CPU, in Transformers' own dispatch."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn import functional as F

from tests.helpers.models import small_model


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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    CALLS.clear()


def flash_model(cls, implementation, **changes):
    model = small_model(cls, **changes)
    # Past the check for an installed flash-attn, which asks for the package and not for the kernel.
    model.config._attn_implementation = implementation
    return model
