from pathlib import Path

import pytest

from tests.helpers.glue_runs import save_encoder
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer(model_max_length=128, model_input_names=["input_ids", "attention_mask"])


@pytest.fixture(scope="session")
def encoder(tokenizer, tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), tokenizer)
