from pathlib import Path

import pytest

from tests.helpers.examples import load_example, to_flags
from tests.helpers.glue_runs import SMALL, make_rows, save_encoder, write_rows
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer(model_max_length=128, model_input_names=["input_ids", "attention_mask"])


@pytest.fixture(scope="session")
def encoder(tokenizer, tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), tokenizer)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    write_rows(make_rows(), folder)
    return folder


@pytest.fixture(scope="session")
def flags(data_dir, encoder):
    """The command line of a run in `output_dir`, with changes."""

    def build(output_dir, **changes) -> list[str]:
        settings = {"output_dir": output_dir, "model": encoder, "data_dir": data_dir, "task": "sst2"}
        return to_flags(settings | SMALL | changes)

    return build


@pytest.fixture(scope="session")
def finished(flags, tmp_path_factory) -> Path:
    """Three tasks, one with transfer, two seeds each."""
    folder = tmp_path_factory.mktemp("finished")
    load_example("run_glue").main(flags(folder, task="stsb sst2 mnli", seeds="0 1"))
    return folder
