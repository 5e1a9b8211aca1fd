"""What tells checkpoints and data from others."""

import shutil

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from neobert_hf.common.fingerprints import fingerprint, model_fingerprint, tokenizer_fingerprint
from neobert_hf.common.run import SettingsMismatch, check_same_identity, identity_of
from neobert_hf.data.tokenizer import TokenizerArguments
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


ROWS = [{"text": f"text {n}", "more": [str(n)] * (n % 3), "label": n % 2 if n % 7 else None} for n in range(30)]


def test_rows_are_told_apart_whatever_they_came_from(tmp_path):
    data = Dataset.from_list(ROWS)
    expected = fingerprint(data)
    data.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    assert fingerprint(Dataset.from_parquet(str(tmp_path / "rows.parquet"))) == expected
    # Through a table of row numbers, and out of the middle of a longer one.
    assert fingerprint(data.select(range(29, -1, -1)).select(range(29, -1, -1))) == expected
    longer = Dataset.from_list(ROWS[-5:] + ROWS + ROWS[:3])
    assert fingerprint(longer.select(range(5, 35))) == expected
    others = [ROWS[::-1], ROWS[:-1], [ROWS[0] | {"label": 1}, *ROWS[1:]], [{"x": 1}] * 30]
    others += [[*ROWS[:2], ROWS[2] | {"more": ["2", "3"]}, *ROWS[3:]]]
    prints = {fingerprint(Dataset.from_list(rows)) for rows in others}
    assert len(prints | {expected}) == len(others) + 1


def test_a_model_of_the_hub_is_that_of_its_copy(tmp_path, monkeypatch):
    """As the cache has it: the model counts, and not the commit or the card."""
    model = small_model()
    model.save_pretrained(tmp_path / "copy")
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--me--mine"
    shutil.copytree(tmp_path / "copy", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "copy" / "README.md").write_text("# A model")
    assert model_fingerprint("me/mine") == model_fingerprint(str(tmp_path / "copy"))
    model.config.norm_eps = 1e-3
    model.config.save_pretrained(tmp_path / "copy")
    assert model_fingerprint("me/mine") != model_fingerprint(str(tmp_path / "copy"))


def test_all_modules_of_a_model_count_and_how_it_was_trained_does_not(tmp_path):
    (tmp_path / "1_Transformer").mkdir()
    (tmp_path / "modules.json").write_text('[{"path": "1_Transformer"}]')

    def with_file(name: str, content: str) -> str:
        (tmp_path / "1_Transformer" / name).write_text(content)
        return model_fingerprint(tmp_path)

    vocabulary = [with_file("sentencepiece.bpe.model", content) for content in ("one", "two")]
    assert vocabulary[0] != vocabulary[1] == with_file("log.json", "[]")
    # Weights of a module that has no others, and those that nothing loads.
    old = with_file("pytorch_model.bin", "old")
    new = with_file("model.safetensors", "new")
    assert vocabulary[1] != old != new == with_file("pytorch_model.bin", "other")
    # A hash of nothing would be the same for all.
    (tmp_path / "modules.json").unlink()
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        model_fingerprint(tmp_path)


def test_a_tokenizer_is_the_same_wherever_it_comes_from(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, model_max_length=7, model_input_names=["input_ids"])
    loaded(["a", "a b b b b b b b b b b b"], truncation=True, padding=True)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    others = [small_tokenizer(101), small_tokenizer(do_lower_case=False), small_tokenizer(mask_token="a")]
    assert len({tokenizer_fingerprint(each) for each in [tokenizer, *others]}) == 4


def test_a_place_is_no_setting_and_what_differs_is_named():
    settings = TokenizerArguments("a", "b", vocab_size=9)
    stored = identity_of(settings, {"seed": 0}, leave_out=["max_documents"], data={"train": "x", "test": "y"})
    assert stored.keys() == vars(settings).keys() - {"source", "output_dir", "max_documents"} | {"seed", "data"}
    check_same_identity("run", stored, dict(stored), "Do this.")
    with pytest.raises(SettingsMismatch) as error:
        check_same_identity("run", stored, stored | {"data": {"train": "x", "test": "z"}, "vocab_size": 8}, "Do this.")
    assert str(error.value).count(" there, ") == 2
    assert "data.test: 'y' there, 'z' now" in str(error.value) and "vocab_size: 9 there, 8 now" in str(error.value)
    # Of two checksums a user can read one thing.
    with pytest.raises(SettingsMismatch, match="  rows: one content there, another now\nDo this."):
        check_same_identity("run", {"rows": fingerprint("a")}, {"rows": fingerprint("b")}, "Do this.")
