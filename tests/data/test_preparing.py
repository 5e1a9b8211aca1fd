"""Raw text to shards: exact, the same however often it is interrupted, and refused before work where it cannot be."""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.data import preparing, sources
from neobert_hf.data.documents import PreparedDocuments
from neobert_hf.data.shards import prepared_tokenizer, read_manifest
from tests.helpers.examples import load_example
from tests.helpers.small_tokenizer import small_tokenizer


prepare_data = load_example("prepare_data")

PARAGRAPHS = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]


@pytest.fixture
def tokenizer(corpus) -> str:
    return str(corpus / "tokenizer")


@pytest.fixture
def source(tmp_path) -> Path:
    """300 documents, of which 2 are too short and 4 longer than 128 tokens by far."""
    documents = [*PARAGRAPHS[:293], "[MASK] and [SEP] are text here.", "", "a", *([" ".join(PARAGRAPHS[:80])] * 4)]
    random.Random(0).shuffle(documents)
    return write_jsonl(tmp_path / "source.jsonl", documents)


def write_jsonl(file: Path, documents: list[str | None]) -> Path:
    file.write_text("".join(json.dumps({"id": [], "text": document}) + "\n" for document in documents))
    return file


def read_jsonl(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def prepare(source, tokenizer, output, *flags: str) -> Path:
    paths = ["--source", str(source), "--tokenizer", tokenizer, "--output_dir", str(output)]
    prepare_data.main([*paths, "--max_length", "128", *flags])
    return output


def ids_in(folder) -> list[list[int]]:
    return [ids.tolist() for ids in PreparedDocuments([folder])]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_shards_hold_what_the_tokenizer_makes_of_each_text(source, tokenizer, tmp_path):
    output = prepare(source, tokenizer, tmp_path / "out", "--documents_per_shard", "70")
    plain = AutoTokenizer.from_pretrained(tokenizer)
    expected = plain(read_jsonl(source), truncation=True, max_length=128)["input_ids"]
    expected = [ids for ids in expected if len(ids) >= 4]
    assert ids_in(output) == expected and max(map(len, expected)) == 128
    # Text that spells a special token is that token.
    assert any({plain.mask_token_id, plain.sep_token_id}.intersection(ids[1:-1]) for ids in expected)
    manifest = read_manifest(output)
    assert [shard["file"] for shard in manifest.shards] == [f"shard-{index:05}.arrow" for index in range(5)]
    counts = {"documents": len(expected), "tokens": sum(map(len, expected)), "read": 300}
    counts |= {"too_short": 300 - len(expected), "other_part": 0, "tokens_1024": 0, "tokens_2048": 0}
    counts["full"] = sum(len(ids) == 128 for ids in expected)
    assert manifest.counts == counts and counts["too_short"] >= 2
    assert manifest.vocab_size == len(plain)
    saved = prepared_tokenizer(output)
    assert saved.model_max_length == 128 and saved.model_input_names == ["input_ids", "attention_mask"]


def test_long_documents_are_counted_or_split(tokenizer, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["a " * length for length in (1021, 1022, 2045, 2046, 9000)])
    counts = read_manifest(prepare(source, tokenizer, tmp_path / "cut", "--max_length", "4096")).counts
    assert (counts["tokens_1024"], counts["tokens_2048"], counts["full"]) == (4, 2, 1)
    assert "Documents that fill all 4,096 tokens: 1. " in capsys.readouterr().out
    flags = ("--max_length", "1024", "--long_documents", "split")
    lengths = [len(ids) for ids in ids_in(prepare(source, tokenizer, tmp_path / "split", *flags))]
    # Windows with both special tokens; a rest of 1 token is too short.
    assert lengths == [1023, 1024, 1024, 1024, 1024, 1024, 4, *[1024] * 8, 9000 - 8 * 1022 + 2]


def test_an_interrupted_folder_ends_with_the_same_bytes(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    for number in range(6):
        table = pa.table({"text": PARAGRAPHS[20 * number : 20 * number + 20]})
        pq.write_table(table, tmp_path / "source" / f"{number}.parquet", row_group_size=7)
    flags = ("--documents_per_shard", "9", "--skip_documents", "5", "--max_documents", "100")
    arguments = (tmp_path / "source", tokenizer, tmp_path / "out [1]", *flags, "--held_out_share", "0.1")
    expected = content(prepare(*arguments[:2], tmp_path / "whole", *arguments[3:]))
    write_shard = preparing.write_shard
    for last in (0, 2, 7):

        def interrupted(path, documents, vocab_size, last=last):
            if path.endswith(f"{last}.arrow"):
                raise KeyboardInterrupt
            return write_shard(path, documents, vocab_size)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(preparing, "write_shard", interrupted)
            prepare(*arguments)
    with pytest.raises(ValueError, match="is not finished"):
        read_manifest(tmp_path / "out [1]")
    assert content(prepare(*arguments)) == expected


def test_a_table_in_memory_becomes_the_shards_of_its_file(source, tokenizer, tmp_path):
    """Interrupted workers and other processes read it, too."""
    expected = prepare(source, tokenizer, tmp_path / "file", "--documents_per_shard", "70")
    frame = pd.DataFrame({"text": read_jsonl(source)})
    settings = {"tokenizer": tokenizer, "max_length": 128, "documents_per_shard": 70}
    for _ in range(2):
        result = prepare_data(source=frame, output_dir=tmp_path / "table", **settings)
    shards = {name: data for name, data in content(expected).items() if name.startswith("shard-")}
    assert {name: data for name, data in content(tmp_path / "table").items() if name.startswith("shard-")} == shards
    assert result.output == str(tmp_path / "table")
    with pytest.raises(SettingsMismatch, match="bytes: "):
        prepare_data(source=frame[:200], output_dir=tmp_path / "table", **settings)


def test_each_row_that_is_chosen_is_held_out_or_trained_on(source, tokenizer, tmp_path):
    flags = ("--documents_per_shard", "40", "--skip_documents", "10", "--max_documents", "200")
    held_out = ("--held_out_share", "0.2", "--part")
    parts = {"whole": (), "train": (*held_out, "train"), "held_out": (*held_out, "held_out")}
    ids = {
        name: ids_in(prepare(source, tokenizer, tmp_path / name, *flags, *options)) for name, options in parts.items()
    }
    assert sorted(ids["whole"]) == sorted(ids["train"] + ids["held_out"]) and 20 < len(ids["held_out"]) < 60
    counts = read_manifest(tmp_path / "train").counts
    assert counts["other_part"] == 200 - counts["documents"] - counts["too_short"] >= len(ids["held_out"])
    with pytest.raises(ValueError, match="leaves none of the .* documents .* for `part` held_out"):
        prepare(source, tokenizer, tmp_path / "none", "--held_out_share", "1e-9", "--part", "held_out")


def test_a_dataset_of_the_hub_is_read_file_by_file(source, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "train.jsonl").write_bytes(source.read_bytes())
    (tmp_path / "dataset" / "test.csv").write_text("text\none\ntwo\n")
    files = {"train": [str(tmp_path / "dataset" / "train.jsonl")], "test": [str(tmp_path / "dataset" / "test.csv")]}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(sources, "load_dataset_builder", lambda source, subset: builder)
    output = prepare("owner/name", tokenizer, tmp_path / "out")
    assert read_manifest(output).counts["read"] == 300
    with pytest.raises(ValueError, match="test.csv"):
        prepare("owner/name", tokenizer, tmp_path / "csv", "--split", "test")
    with pytest.raises(ValueError, match="'dev'.*'train', 'test'"):
        prepare("owner/name", tokenizer, tmp_path / "dev", "--split", "dev")


def test_a_finished_folder_is_left_alone_and_other_settings_or_text_are_refused_by_name(source, tokenizer, tmp_path):
    output = prepare(source, tokenizer, tmp_path / "out", "--documents_per_shard", "100")
    small_tokenizer().save_pretrained(tmp_path / "other")
    times = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    # The same text at another place.
    moved = source.rename(tmp_path / "moved.jsonl")
    prepare(moved, tokenizer, output, "--documents_per_shard", "100")
    more = write_jsonl(tmp_path / "more.jsonl", [*read_jsonl(moved), "One more document."])
    for changed, name in (
        ((moved, tokenizer, output, "--documents_per_shard", "60"), "documents_per_shard: 100 there, 60"),
        ((moved, str(tmp_path / "other"), output, "--documents_per_shard", "100"), "tokenizer: "),
        ((more, tokenizer, output, "--documents_per_shard", "100"), "bytes: "),
    ):
        with pytest.raises(SettingsMismatch, match=name) as error:
            prepare(*changed)
        assert str(error.value).count(" there, ") == 1
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == times


@pytest.mark.parametrize(
    "documents, message",
    [
        (["One document only."], "holds 1 of the documents"),
        (["", None, " "], "no text in 'text'"),
        (["1", "2.5", ""], "numbers in 'text'"),
        (["a", "b", "c"], "None of the 3 documents"),
        (["Их тексты написаны буквами, которых словарь не знает."] * 3, "80% of the tokens"),
    ],
)
def test_what_is_no_corpus_is_refused(tokenizer, tmp_path, documents, message):
    source = write_jsonl(tmp_path / "c.jsonl", documents)
    with pytest.raises(ValueError, match=message):
        prepare(source, tokenizer, tmp_path / "out")


@pytest.mark.parametrize(
    "flags, error, message",
    [
        (["--column", "id"], ValueError, "row 0: 'id' holds list"),
        (["--split", "test"], ValueError, "no split 'test'"),
        (["--source", "memory://nowhere/*.parquet"], FileNotFoundError, "'memory://nowhere/.*' matches no file"),
        # Tests run with `HF_HUB_OFFLINE`: see conftest.py.
        (["--source", "hf://datasets/owner/name/a.parquet"], ConnectionError, "'hf://datasets/owner/name/a.parquet'"),
        (["--part", "held_out"], ValueError, "`held_out_share` is 0.0"),
        (["--max_length", "0"], ValueError, "`max_length` is 0; it must be 4 or more"),
        (["--documents_per_shard", "0"], ValueError, "`documents_per_shard` is 0"),
    ],
)
def test_wrong_settings_leave_nothing_behind(source, tokenizer, tmp_path, flags, error, message):
    with pytest.raises(error, match=message):
        prepare(source, tokenizer, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_does_not_add_special_tokens_is_refused(source, tokenizer, tmp_path):
    state = json.loads((Path(tokenizer) / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state | {"post_processor": None}))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "mask")}
    PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **names).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="turns 'a' into"):
        prepare(source, str(tmp_path / "bare"), tmp_path / "out")


def test_llamas_tokenizer_gets_what_masked_language_modelling_needs(source, tmp_path):
    """Ablation M3."""
    characters = sorted(set("".join(read_jsonl(source))) | {"▁"})
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    llama = LlamaTokenizerFast(vocab=vocabulary, merges=[])
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="mask_token.*`add_special_tokens`"):
        prepare(source, str(tmp_path / "llama"), tmp_path / "out")
    output = prepare(source, str(tmp_path / "llama"), tmp_path / "out", "--add_special_tokens", "true")
    tokenizer, size = prepared_tokenizer(output), len(vocabulary)
    words = llama("Return the value", add_special_tokens=False)["input_ids"]
    assert tokenizer("Return the value")["input_ids"] == [1, *words, 2]
    assert sorted([tokenizer.pad_token_id, tokenizer.mask_token_id]) == [size, size + 1]
    assert read_manifest(output).vocab_size == size + 2
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in ids_in(output))


def test_a_file_is_no_prepared_corpus_but_what_becomes_one(corpus):
    with pytest.raises(NotADirectoryError, match="train.jsonl is a file.*as `source`"):
        read_manifest(corpus / "train.jsonl")
