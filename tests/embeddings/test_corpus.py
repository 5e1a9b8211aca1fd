"""Vectors of a corpus, part by part: those of the model's own `encode_document`, whatever the parts."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

import neobert_hf.embeddings
from neobert_hf.common.run import SettingsMismatch
from tests.helpers.examples import load_example, to_flags


# Also texts of three tokens, which are rounded in another way where they are computed alone.
TEXTS = ["a", "b", *(" ".join(["a text of many words"] * (1 + number % 7)) + f" {number}" for number in range(147))]


@pytest.fixture(scope="module")
def model(encoder, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    SentenceTransformer(str(encoder), prompts={"document": "text: ", "query": "question: "}).save(folder)
    return folder


def embed(tmp_path, model: str, name: str = "vectors", parts: int = 1, **changes) -> np.ndarray:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text, "id": f"t{n}"}) + "\n" for n, text in enumerate(TEXTS)))
    settings = {"model": model, "source": source, "output_dir": tmp_path / name, "id_column": "id"} | changes
    load_example("embed").main(to_flags(settings))
    tables = [pq.read_table(file) for file in sorted((tmp_path / name).glob("part-*.parquet"))]
    assert len(tables) == parts
    assert [id for table in tables for id in table["id"].to_pylist()] == [f"t{number}" for number in range(149)]
    return np.concatenate([np.stack(table["vector"].to_numpy(zero_copy_only=False)) for table in tables])


def test_a_table_in_memory_gives_the_same_vectors(tmp_path, model):
    rows = [{"text": text, "id": f"t{number}"} for number, text in enumerate(TEXTS)]
    result = neobert_hf.embeddings.embed(model=model, source=rows, output_dir=tmp_path / "vectors")
    table = pq.read_table(Path(result.output) / "part-00000.parquet")
    found = np.stack(table["vector"].to_numpy(zero_copy_only=False))
    assert np.array_equal(found, SentenceTransformer(model).encode_document(TEXTS))


def test_the_vector_of_a_text_file_has_its_path(tmp_path, encoder, capsys):
    files = [tmp_path / "documents" / f"{name}.md" for name in "ba"]
    files[0].parent.mkdir()
    for file in files:
        file.write_text(f"The text of {file.name}.")
    settings = {"model": encoder, "source": tmp_path / "documents", "output_dir": tmp_path / "vectors"}
    neobert_hf.embeddings.embed(**settings)
    table = pq.read_table(tmp_path / "vectors" / "part-00000.parquet")
    assert table["file"].to_pylist() == [str(file) for file in sorted(files)]
    assert "has not been trained for embeddings" in capsys.readouterr().err


def test_a_source_may_be_a_url(tmp_path, model):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    neobert_hf.embeddings.embed(model=model, source=f"file://{tmp_path}/corpus.jsonl", output_dir=tmp_path / "vectors")
    assert pq.read_table(tmp_path / "vectors" / "part-00000.parquet").column_names == ["vector"]


def test_vectors_are_those_of_the_model(tmp_path, model):
    assert np.array_equal(embed(tmp_path, model), SentenceTransformer(model).encode_document(TEXTS))
    with pytest.raises(SettingsMismatch, match="max_length"):
        embed(tmp_path, model, max_length=16)


def test_parts_of_any_size_give_the_same_bits(tmp_path, model):
    whole, *others = [
        embed(tmp_path, model, str(rows), parts, batch_size=2, rows_per_part=rows)
        for rows, parts in ((8192, 1), (100, 2), (6, 3))
    ]
    assert all(np.array_equal(whole, other) for other in others)
