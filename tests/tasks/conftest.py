from pathlib import Path

import pytest

from tests.helpers.glue_runs import save_encoder
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import asked_rows, tagged_rows, text_rows, write_conll, write_csv, write_squad


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer(model_max_length=128, model_input_names=["input_ids", "attention_mask"])


@pytest.fixture(scope="session")
def encoder(tokenizer, tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), tokenizer)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory) -> Path:
    return write_csv(tmp_path_factory.mktemp("labelled") / "rows.csv", text_rows(100))


@pytest.fixture(scope="session")
def tagged(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tagged")
    for seed, (name, number) in enumerate({"train": 120, "dev": 30, "test": 20}.items()):
        write_conll(folder / f"{name}.conll", tagged_rows(number, seed))
    return folder


@pytest.fixture(scope="session")
def asked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    for seed, (name, number) in enumerate({"train": 200, "dev": 30}.items()):
        write_squad(folder / f"{name}.json", asked_rows(number, seed, none=0.3, length=16))
    return folder
