"""The encoders that NeoBERT is compared with: their sizes and the operations that they need."""

import pytest
import torch
from encoders import ENCODERS, build_config, build_model, forward_flops
from torch.utils.flop_counter import FlopCounterMode


SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "pad_token_id": 1}
# Published, in millions, without the head for masked language modelling.
PARAMETERS = {
    "NeoBERT": 222, "BERT-base": 110, "BERT-large": 335, "NomicBERT": 137, "ModernBERT-base": 149, "EuroBERT-210m": 210,
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_published_sizes(name):
    """To 1.2%: published counts are rounded, and those of BERT have the pooler in them."""
    backbone = build_model(build_config(name), "meta").base_model
    assert sum(weight.numel() for weight in backbone.parameters()) / 1e6 == pytest.approx(PARAMETERS[name], rel=0.012)


@pytest.mark.parametrize("name", ENCODERS)
def test_flops_equal_those_of_torch(name):
    """Exactly, where nothing is padded, every label is wanted and the local window reaches over the whole sequence."""
    model = build_model(build_config(name, **SIZES), attention="eager").train()
    lengths = torch.tensor([24, 24])
    ids = torch.randint(5, 100, (2, 24))
    with FlopCounterMode(display=False) as forward:
        model.base_model(ids)
    assert forward.get_total_flops() == forward_flops(model, lengths)
    with FlopCounterMode(display=False) as training:
        model(ids, labels=ids).loss.backward()
    # The derivative by the first layer's input is not taken where the embedding stays: both are counted alike.
    assert training.get_total_flops() == 3 * forward_flops(model, lengths, 48)
