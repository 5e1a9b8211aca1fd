"""How many tokens recipes cut texts at: what the model reads, also where its RoPE is scaled."""

import pytest

from neobert_hf import NeoBERTModel
from neobert_hf.common.tokenizers import length_to_cut_at
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.mark.parametrize(
    "rope, of_tokenizer, wanted, expected",
    [
        ({}, 64, 32, 32),
        ({}, 64, 128, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 1000, 128, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 1000, 1000, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 100, 128, 100),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, 128, 64),
    ],
)
def test_length(rope, of_tokenizer, wanted, expected, capsys):
    model = small_model(NeoBERTModel, max_length=64, **({"rope_parameters": rope} if rope else {}))
    assert length_to_cut_at(model, small_tokenizer(model_max_length=of_tokenizer), wanted) == expected
    said = f"Texts are cut at {expected:,} tokens, the model's limit; `max_length` is {wanted:,}.\n"
    assert capsys.readouterr().out == ("" if expected == wanted else said)
