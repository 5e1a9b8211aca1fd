"""What tells checkpoints and data from others."""

import pytest
from datasets import Dataset

from neobert_hf.common.fingerprints import checkpoint_fingerprint, data_fingerprint, model_files_fingerprint
from tests.helpers.models import small_model


ROWS = [{"text": f"text {n}", "more": [str(n)] * (n % 3), "label": n % 2 if n % 7 else None} for n in range(30)]


def test_rows_are_told_apart_whatever_they_came_from(tmp_path):
    data = Dataset.from_list(ROWS)
    expected = data_fingerprint(data)
    data.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    assert data_fingerprint(Dataset.from_parquet(str(tmp_path / "rows.parquet"))) == expected
    # Through a table of row numbers, and out of the middle of a longer one.
    assert data_fingerprint(data.select(range(29, -1, -1)).select(range(29, -1, -1))) == expected
    longer = Dataset.from_list(ROWS[-5:] + ROWS + ROWS[:3])
    assert data_fingerprint(longer.select(range(5, 35))) == expected
    others = [ROWS[::-1], ROWS[:-1], [ROWS[0] | {"label": 1}, *ROWS[1:]], [{"x": 1}] * 30]
    others += [[*ROWS[:2], ROWS[2] | {"more": ["2", "3"]}, *ROWS[3:]]]
    prints = {data_fingerprint(Dataset.from_list(rows)) for rows in others}
    assert len(prints | {expected}) == len(others) + 1


def test_checkpoints_are_told_apart(tmp_path, monkeypatch):
    model = small_model()
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
    expected = checkpoint_fingerprint(str(tmp_path / "one"))
    (tmp_path / "two" / "README.md").write_text("# A model")
    assert checkpoint_fingerprint(str(tmp_path / "two")) == expected
    model.config.norm_eps = 1e-3
    model.config.save_pretrained(tmp_path / "two")
    assert checkpoint_fingerprint(str(tmp_path / "two")) != expected
    # A Hub id, as the cache has it.
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--me--mine"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert checkpoint_fingerprint("me/mine") == commit
    with pytest.raises(OSError, match="couldn.t find them in the cached files"):
        checkpoint_fingerprint("me/other")


def test_the_vocabulary_of_sentencepiece_is_a_part_of_a_model(tmp_path):
    (tmp_path / "1_Transformer").mkdir()
    (tmp_path / "config.json").write_text("{}")
    prints = set()
    for content in (b"one", b"two"):
        (tmp_path / "1_Transformer" / "sentencepiece.bpe.model").write_bytes(content)
        prints.add(model_files_fingerprint(str(tmp_path)))
    assert len(prints) == 2


def test_a_folder_without_a_model_has_no_fingerprint(tmp_path):
    """A hash of nothing would be the same for all."""
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="holds no model: it has none of .*.safetensors"):
        checkpoint_fingerprint(str(tmp_path))
