"""Tokenizers from the user's text."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


train_tokenizer = load_example("train_tokenizer")


@pytest.fixture
def train(tmp_path):
    """Runs the script on the Python reference, a text file a topic."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in topics.items():
        (corpus / f"{name}.txt").write_text(text, encoding="utf-8")

    def run(*flags: str):
        train_tokenizer.main(["--source", str(corpus), "--output_dir", str(tmp_path / "out"), *flags])
        return AutoTokenizer.from_pretrained(tmp_path / "out")

    return run


def test_wordpiece_is_like_bert_base_uncased(train):
    tokenizer = train("--vocab_size", "1500", "--max_length", "77")
    assert isinstance(tokenizer, BertTokenizer) and len(tokenizer) == 1500
    assert tokenizer.model_max_length == 77 and tokenizer.model_input_names == ["input_ids", "attention_mask"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 100, 101, 102, 103]
    assert tokenizer.convert_tokens_to_ids(["[unused0]", "[unused98]"]) == [1, 99]
    assert set(tokenizer.all_special_tokens) == set(special) == set(tokenizer.get_added_vocab())
    encoded = tokenizer("Returns the   VALUÉ.", "[unused0]")
    assert set(encoded) == {"input_ids", "attention_mask"}
    ids = encoded["input_ids"]
    assert ids[0] == 101 and ids[-1] == 102 and ids.count(102) == 2 and 1 not in ids
    assert tokenizer.tokenize("RETURN Válue") == tokenizer.tokenize("return value") == ["return", "value"]
    assert any(token.startswith("##") for token in tokenizer.get_vocab())


def test_bpe_knows_every_byte(train):
    tokenizer = train("--vocab_size", "1200", "--kind", "bpe")
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and len(tokenizer) == 1200
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    text = "Return  \x00\x85 the VALUE of \U0001f600 漢字 e\u0301\ufffd\n\n\tend"
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids[-1]) == (2, 3) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids[1:-1]) == text
    assert set(tokenizer("a", "b")) == {"input_ids", "attention_mask"}
    assert tokenizer("a", "b")["input_ids"].count(3) == 2
    every_byte = bytes(range(256)).decode("latin-1") + "".join(map(chr, (0x7FF, 0xFFFF, 0x10FFFF)))
    assert tokenizer.unk_token_id not in tokenizer(every_byte)["input_ids"]


def test_a_list_of_rows_in_memory_is_a_source(tmp_path):
    rows = [{"body": text} for text in topics.values()]
    result = train_tokenizer(source=rows, column="body", kind="bpe", vocab_size=500, output_dir=tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(result.output)) == 500
    with pytest.raises(ValueError, match="'the table' have no text in 'text'"):
        train_tokenizer(source=[{"text": " "}], output_dir=tmp_path / "none")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--output_dir", str(ROOT)], "exists already"),
        (["--source", ".empty.jsonl"], "'.empty.jsonl' have no text in 'text'"),
        (["--source", ".empty.jsonl", "--kind", "bpe"], "'.empty.jsonl' have no text in 'text'"),
    ],
)
def test_errors_leave_nothing_behind(train, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path / "corpus")
    Path(".empty.jsonl").write_text('{"text": " "}\n{"text": null}\n')
    with pytest.raises(ValueError, match=message):
        train(*flags)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
