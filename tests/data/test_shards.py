"""Tokenised corpora on disk: what is written is what is read, whole or not at all."""

import numpy as np
import pytest

from neobert_hf.data.documents import Documents
from neobert_hf.data.shards import load_tokenizer, read_manifest, write_shard
from tests.helpers.shards import write_folder
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.fixture
def folder(tmp_path):
    """Three documents in two shards, and a third shard for whose texts nothing was kept."""
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return write_folder(tmp_path, [[2, 5, 6, 3], [2, 6, 6, 6, 3], [2, 5, 5, 3]], [2, 1, 0])


def test_what_is_read_is_what_was_written(folder):
    documents = Documents([folder, folder])
    assert [ids.tolist() for ids in documents] == 2 * [[2, 5, 6, 3], [2, 6, 6, 6, 3], [2, 5, 5, 3]]
    assert [documents.lengths(shard).tolist() for shard in range(6)] == 2 * [[4, 5], [4], []]
    assert documents[0].dtype == np.int64 and documents.shards_in_folder == [3, 3]
    tokenizer = load_tokenizer(folder)
    assert tokenizer("ab")["input_ids"][0] == 2 and tokenizer.model_max_length == 8


def test_a_shard_is_written_whole_or_not_at_all(tmp_path):
    def broken():
        # Beyond the first record batch, which has been written by then.
        yield from [np.array([1, 2])] * 10_500
        raise KeyError("source")

    with pytest.raises(KeyError):
        write_shard(f"{tmp_path}/a.arrow", broken(), 100)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_whole_is_refused(folder, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match="holds no manifest.json"):
        read_manifest(tmp_path_factory.mktemp("empty"))
    manifest = read_manifest(folder)
    (folder / "shard-00001.arrow").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00001.arrow"):
        Documents([folder])
    manifest.finished = False
    manifest.save(folder)
    with pytest.raises(ValueError, match="is not finished"):
        read_manifest(folder)


def test_a_tokenizer_of_another_vocabulary_is_refused(folder):
    small_tokenizer(200).save_pretrained(folder / "tokenizer")
    with pytest.raises(ValueError, match="ids up to 199"):
        load_tokenizer(folder)
