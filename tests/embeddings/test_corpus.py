"""Vectors of a corpus, part by part: those of the model's own `encode_document`, whatever the parts and workers."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from neobert_hf.common.fingerprints import SettingsMismatch
from tests.helpers.examples import load_example
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


TEXTS = [" ".join(["a text of many words"] * (1 + number % 7)) + f" {number}" for number in range(149)]
TEXTS[:2] = "ab"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer(model_max_length=64)
    small_model(pad_token_id=tokenizer.pad_token_id).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    embedding = SentenceTransformer(str(folder / "encoder"), prompts={"document": "text: ", "query": "question: "})
    embedding.save(str(folder / "embedding"))
    return str(folder / "embedding")


def embed(tmp_path, model: str, *flags: str, name: str = "vectors") -> np.ndarray:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text, "id": f"t{n}"}) + "\n" for n, text in enumerate(TEXTS)))
    output = tmp_path / name
    arguments = ["--model", model, "--source", str(source), "--output_dir", str(output), "--id_column", "id"]
    load_example("embed").main([*arguments, *flags])
    tables = [pq.read_table(file) for file in sorted(output.glob("*.parquet"))]
    assert [id for table in tables for id in table["id"].to_pylist()] == [f"t{number}" for number in range(149)]
    vectors = np.concatenate([np.stack(table["vector"].to_numpy(zero_copy_only=False)) for table in tables])
    if "scale" in tables[0].column_names:
        return vectors * np.concatenate([table["scale"].to_numpy() for table in tables])[:, None]
    return vectors


def test_vectors_are_those_of_the_model(tmp_path, model):
    loaded = SentenceTransformer(model)
    assert np.array_equal(embed(tmp_path, model), loaded.encode_document(TEXTS))
    assert np.array_equal(embed(tmp_path, model, "--side", "query", name="queries"), loaded.encode_query(TEXTS))
    with pytest.raises(SettingsMismatch, match="side"):
        embed(tmp_path, model, "--side", "query")


def test_int8_is_near(tmp_path, model):
    exact, stored = embed(tmp_path, model), embed(tmp_path, model, "--store", "int8", name="int8")
    cosines = (exact * stored).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(stored, axis=1)
    assert cosines.min() > 0.999


def test_any_size_of_parts_gives_the_same_bits(tmp_path, model):
    """Also of a text of three tokens, which are rounded in another way where they are computed alone."""
    encoder = str(Path(model).with_name("encoder"))
    sizes = {"vectors": "8192", "128": "100", "64": "6"}
    whole, *others = [
        embed(tmp_path, encoder, "--batch_size", "2", "--rows_per_part", rows, name=name)
        for name, rows in sizes.items()
    ]
    assert all(np.array_equal(whole, other) for other in others)
    assert [len(list((tmp_path / name).glob("*.parquet"))) for name in sizes] == [1, 2, 3]


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bits(tmp_path, model):
    flags = ("--rows_per_part", "64", "--batch_size", "2")
    one = embed(tmp_path, model, *flags)
    assert np.array_equal(one, embed(tmp_path, model, *flags, "--workers", "2", name="two"))
