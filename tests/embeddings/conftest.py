"""A small encoder, small datasets with their description, and a trained model of every kind."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from tests.helpers.embedding_runs import run
from tests.helpers.models import save_encoder


# What datasets.yaml says.
ANSWER = {"query": "question", "positive": "answer", "instruction": "Find the answer."}
DESCRIPTION = {
    "train": {
        "triplets": ANSWER | {"source": "triplets.parquet", "negatives": "wrong"},
        "pairs": {"source": "pairs.jsonl", "query": "title", "positive": "body", "instruction": "Find the text."},
        "nested": {
            "source": "nested.parquet",
            "query": "set.query",
            "positive": "set.pos.0",
            "negatives": "set.neg.*",
            "instruction": "",
        },
    },
    "evaluation": {
        "retrieval": ANSWER | {"source": "test.parquet"},
        "sts": {"source": "sts.parquet", "query": "a", "positive": "b", "instruction": "Similar?"},
    },
}


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return AutoTokenizer.from_pretrained(corpus / "tokenizer")


@pytest.fixture(scope="session")
def encoder(tokenizer, tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), tokenizer)


@pytest.fixture(scope="session")
def helper(encoder, tmp_path_factory) -> Path:
    """An embedding model that helps to train another one: the encoder with mean pooling."""
    folder = tmp_path_factory.mktemp("helper")
    SentenceTransformer(str(encoder), device="cpu").save(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="session")
def data(corpus, tmp_path_factory) -> Path:
    """A Parquet file of triplets, some without a negative, JSON lines of pairs, nested rows, and their description."""
    folder = tmp_path_factory.mktemp("pairs")
    texts = [json.loads(line)["text"].split() for line in (corpus / "train.jsonl").read_text().splitlines()]
    texts = [words for words in texts if len(words) > 60]
    rows = []
    for number, words in enumerate(texts):
        wrong = texts[number - 1][4:24]
        rows.append({"question": " ".join(words[:4]), "answer": " ".join(words[4:24]), "wrong": " ".join(wrong)})
    triplets = [row | {"wrong": None} if number % 3 == 0 else row for number, row in enumerate(rows[:200])]
    Dataset.from_list(triplets).to_parquet(folder / "triplets.parquet")
    pairs = [{"title": row["question"], "body": row["answer"]} for row in rows[200:280]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    nested = [
        {"set": {"query": row["question"], "pos": [row["answer"], "x"], "neg": [row["wrong"]] * (number % 3)}}
        for number, row in enumerate(rows[280:330])
    ]
    Dataset.from_list(nested).to_parquet(folder / "nested.parquet")
    Dataset.from_list(rows[330:360]).to_parquet(folder / "test.parquet")
    sts = [{"a": row["question"], "b": row["answer"][:40], "score": n / 20} for n, row in enumerate(rows[360:380])]
    Dataset.from_list(sts).to_parquet(folder / "sts.parquet")
    (folder / "datasets.yaml").write_text(yaml.safe_dump(DESCRIPTION, sort_keys=False))
    return folder


@pytest.fixture
def edit(data, tmp_path):
    """Write another description beside datasets.yaml, with a change to its content."""

    def write(change) -> Path:
        description = deepcopy(DESCRIPTION)
        change(description)
        file = data / f"{tmp_path.name}.yaml"
        file.write_text(yaml.safe_dump(description, sort_keys=False))
        return file

    return write


@pytest.fixture
def settings(data, encoder, tmp_path):
    """The settings of a run in tmp_path / "run", with changes."""

    def build(**changes) -> dict:
        return {"output_dir": tmp_path / "run", "model": encoder, "datasets": data / "datasets.yaml"} | changes

    return build


@pytest.fixture(scope="session")
def trained(data, encoder, tmp_path_factory) -> Mapping[str, Path]:
    """The output folder of a run of each kind, which is trained when it is asked for."""

    class Trained(dict):
        def __missing__(self, kind: str) -> Path:
            output = self[kind] = tmp_path_factory.mktemp(kind) / "run"
            run(kind, {"model": encoder, "datasets": data / "datasets.yaml", "output_dir": output})
            return output

    return Trained()
