"""Small checkpoints of every kind."""

import os

import pytest

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from tests.helpers.models import save_checkpoint


# No client may ask a server, which would take minutes where there is no network.
os.environ |= dict.fromkeys(
    ("ANONYMIZED_TELEMETRY", "HAYSTACK_TELEMETRY_ENABLED", "INFINITY_ANONYMOUS_USAGE_STATS"), "False"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Saves a small random model with its tokenizer, and returns the folder."""

    def save(cls, **changes) -> str:
        return str(save_checkpoint(tmp_path_factory.mktemp(cls.__name__), cls, **changes))

    return save


@pytest.fixture(scope="session")
def encoder(checkpoint) -> str:
    return checkpoint(NeoBERTModel)


@pytest.fixture(scope="session")
def masked_lm(checkpoint) -> str:
    return checkpoint(NeoBERTForMaskedLM)


@pytest.fixture(scope="session")
def classifier(checkpoint) -> str:
    return checkpoint(NeoBERTForSequenceClassification, num_labels=2)
