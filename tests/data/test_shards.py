"""Tokenised corpora on disk: what is written is what is read, and damage is noticed."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer

from neobert_hf.common.fingerprints import file_checksum, tokenizer_fingerprint
from neobert_hf.data.preparing import summary
from neobert_hf.data.shards import Manifest, load_shards, load_tokenizer, read_manifest, write_shard


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]


def small_tokenizer(words=WORDS, **options) -> BertTokenizer:
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)}, **options)


@pytest.fixture
def folder(tmp_path):
    """Three documents in two shards."""
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    shards = [
        write_shard(tmp_path / "shard-00000.arrow", [[2, 5, 6, 3], [2, 6, 6, 6, 3]], "uint16"),
        write_shard(tmp_path / "shard-00002.arrow", [[2, 5, 5, 3]], "uint16"),
    ]
    manifest = Manifest({"source": "x"}, "text", tokenizer_fingerprint(tokenizer), 8, 8, "truncate", "uint16", 2)
    manifest.shards, manifest.documents, manifest.length_histogram = shards, 3, {4: 3}
    manifest.save(tmp_path / "manifest.json")
    return tmp_path


def test_round_trip(folder):
    documents = load_shards(folder)
    assert documents["input_ids"][:] == [[2, 5, 6, 3], [2, 6, 6, 6, 3], [2, 5, 5, 3]]
    assert documents.features.arrow_schema.field("input_ids").type == pa.list_(pa.uint16())
    assert len(documents.cache_files) == 2, "mapped from the files, not copied"
    assert read_manifest(folder).shards[1] == {
        "file": "shard-00002.arrow",
        "documents": 1,
        "tokens": 4,
        "bytes": (folder / "shard-00002.arrow").stat().st_size,
        "checksum": file_checksum(folder / "shard-00002.arrow"),
    }
    assert load_tokenizer(folder)("a bb")["input_ids"] == [2, 5, 6, 7, 3]


def test_batches_and_dtypes(tmp_path):
    rows = [[number, 65_535] for number in range(10_500)]
    entry = write_shard(tmp_path / "a.arrow", iter(rows), "uint16")
    assert (entry["documents"], entry["tokens"]) == (10_500, 21_000)
    with pa.memory_map(str(tmp_path / "a.arrow")) as file:
        batches = list(pa.ipc.open_stream(file))
    assert [len(batch) for batch in batches] == [10_000, 500]
    assert [row for batch in batches for row in batch["input_ids"].to_pylist()] == rows
    write_shard(tmp_path / "b.arrow", [[1, 100_000]], "int32")
    with pa.memory_map(str(tmp_path / "b.arrow")) as file:
        assert pa.ipc.open_stream(file).schema.field("input_ids").type == pa.list_(pa.int32())


def test_a_shard_is_written_whole_or_not_at_all(tmp_path):
    def broken():
        # Beyond the first record batch, which has been written by then.
        yield from [[1, 2]] * 10_500
        raise KeyError("source")

    with pytest.raises(KeyError):
        write_shard(tmp_path / "a.arrow", broken(), "uint16")
    with pytest.raises(OverflowError):
        write_shard(tmp_path / "a.arrow", [[65_536]], "uint16")
    assert write_shard(tmp_path / "a.arrow", [], "uint16") is None
    assert list(tmp_path.iterdir()) == []


def test_a_missing_shard_is_an_error(folder):
    (folder / "shard-00002.arrow").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00002.arrow.*missing.*prepare_data.py"):
        load_shards(folder)


def test_folders_that_are_not_prepared(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a tokenised corpus: run examples/prepare_data.py"):
        read_manifest(tmp_path)
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="is not finished: run the same"):
        load_shards(tmp_path)


def test_a_manifest_of_another_vocabulary_is_an_error(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": 7}))
    with pytest.raises(ValueError, match="manifest.json, has ids up to 7, but `vocab_size` of the model is 7"):
        load_tokenizer(folder)


def test_texts_are_cut_as_in_the_shards_whatever_the_tokenizers_file_says(folder):
    settings = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 3}))
    assert load_tokenizer(folder).model_max_length == 8


def test_another_tokenizer_is_an_error(folder):
    small_tokenizer([*WORDS, "c"]).save_pretrained(folder / "tokenizer")
    with pytest.raises(ValueError, match="has the fingerprint .* were made by"):
        load_tokenizer(folder)


def test_long_documents_are_counted():
    manifest = Manifest({}, "text", "", 8, 4096, "truncate", "uint16", 2, length_histogram={512: 4, 1024: 3, 2048: 2})
    assert "5 documents of 1,024 tokens or more, 2 of 2,048 or more" in summary(manifest, Path("corpus"))


def test_fingerprint_is_the_same_wherever_the_tokenizer_comes_from(tmp_path):
    tokenizer = small_tokenizer()
    expected = tokenizer_fingerprint(tokenizer)
    before = tokenizer.backend_tokenizer.to_str()
    tokenizer.save_pretrained(tmp_path / "a")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a", model_max_length=7, model_input_names=["input_ids"])
    assert tokenizer_fingerprint(loaded) == expected
    loaded(["a", "a b b b b b b b b b b b"], truncation=True, padding=True)
    state = loaded.backend_tokenizer.to_str()
    assert Tokenizer.from_str(state).truncation and Tokenizer.from_str(state).padding
    assert tokenizer_fingerprint(loaded) == expected
    assert loaded.backend_tokenizer.to_str() == state and tokenizer.backend_tokenizer.to_str() == before
    loaded.save_pretrained(tmp_path / "b")
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path / "b")) == expected


def test_fingerprint_notices_changes():
    swapped = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "b", "a", "##b"]
    other_mask = small_tokenizer()
    other_mask.mask_token = "a"
    changed = [
        small_tokenizer(),
        small_tokenizer([*WORDS, "c"]),
        small_tokenizer(swapped),
        small_tokenizer(do_lower_case=False),
        small_tokenizer(strip_accents=False),
        other_mask,
    ]
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in changed}) == len(changed)
    assert np.unique([len(tokenizer_fingerprint(tokenizer)) for tokenizer in changed]).tolist() == [64]
