"""Threads of a server share a model, and load models side by side."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import ragged_batch, small_model


def test_threads_load_one_after_the_other(tmp_path):
    """Transformers switches tying off and the default dtype over for all threads while one of them loads."""
    small_model(NeoBERTForMaskedLM, tie_word_embeddings=True).save_pretrained(tmp_path)
    dtypes = [torch.float32, torch.float16] * 10
    with ThreadPoolExecutor(4) as executor:
        models = list(executor.map(lambda dtype: NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=dtype), dtypes))
    assert [model.dtype for model in models] == dtypes
    assert all(model.decoder.weight is model.model.encoder.weight for model in models)
    assert torch.get_default_dtype() == torch.float32
    made = small_model(NeoBERTForMaskedLM, tie_word_embeddings=True)
    assert made.decoder.weight is made.model.encoder.weight


@pytest.mark.parametrize("prepared", [None, {}, {"int8": True}], ids=["as it is", "prepared", "int8"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_threads_do_not_see_each_others_texts(backend, prepared):
    model = small_model(attn_implementation=backend)
    if prepared is not None:
        model.prepare_for_inference(**prepared)
    batches = [
        ragged_batch((1 + number % 9, 17 - number % 5, 3 + number % 7)[: 1 + number % 3]) for number in range(60)
    ]

    def states(batch) -> torch.Tensor:
        ids, mask = batch
        with torch.no_grad():
            return model(ids, mask).last_hidden_state[mask.bool()]

    alone = [states(batch) for batch in batches]
    with ThreadPoolExecutor(6) as executor:
        together = list(executor.map(states, batches * 4))
    assert all(torch.equal(found, expected) for found, expected in zip(together, alone * 4, strict=True))
