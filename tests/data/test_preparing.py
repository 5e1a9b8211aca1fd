"""Raw text to shards: exact, the same however often it is interrupted, and refused before work where it cannot be."""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.data import preparing, tables
from neobert_hf.data.documents import Documents
from neobert_hf.data.shards import load_tokenizer, read_manifest
from neobert_hf.data.tokenizer import train_bpe, train_wordpiece
from tests.helpers.examples import load_example


prepare_data = load_example("prepare_data")

PARAGRAPHS = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_wordpiece(iter(PARAGRAPHS), 1_500, 512).save_pretrained(folder / "wordpiece")
    train_bpe(iter(PARAGRAPHS), 1_000, 512).save_pretrained(folder / "bpe")
    return {name: str(folder / name) for name in ("wordpiece", "bpe")}


@pytest.fixture
def corpus(tmp_path) -> Path:
    """300 documents, of which 2 are too short and 4 longer than 128 tokens by far."""
    documents = [*PARAGRAPHS[:293], "[MASK] and [SEP] are text here.", "", "a", *([" ".join(PARAGRAPHS[:80])] * 4)]
    random.Random(0).shuffle(documents)
    write_jsonl(tmp_path / "corpus.jsonl", documents)
    return tmp_path / "corpus.jsonl"


def write_jsonl(file: Path, documents: list[str | None]) -> None:
    file.write_text("".join(json.dumps({"id": [], "text": document}) + "\n" for document in documents))


def read_jsonl(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def prepare(source, tokenizer, output, *flags: str) -> Path:
    paths = ["--source", str(source), "--tokenizer", tokenizer, "--output_dir", str(output)]
    prepare_data.main([*paths, "--max_length", "128", *flags])
    return output


def ids_in(folder) -> list[list[int]]:
    return [ids.tolist() for ids in Documents([folder])]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def killed(monkeypatch):
    """Prepares a folder until a shard that is never written."""

    def run(shard: str, *arguments) -> None:
        def failing(path, documents, vocab_size):
            if path.endswith(shard):
                raise MemoryError
            return write_shard(path, documents, vocab_size)

        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(preparing, "write_shard", failing)
            prepare(*arguments)

    write_shard = preparing.write_shard
    return run


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_shards_hold_what_the_tokenizer_makes_of_each_text(corpus, tokenizers, tmp_path, kind):
    output = prepare(corpus, tokenizers[kind], tmp_path / "out", "--documents_per_shard", "70")
    tokenizer = AutoTokenizer.from_pretrained(tokenizers[kind])
    plain = tokenizer(read_jsonl(corpus), truncation=True, max_length=128)["input_ids"]
    expected = [ids for ids in plain if len(ids) >= 4]
    assert ids_in(output) == expected and max(map(len, expected)) == 128
    # Text that spells a special token is that token.
    assert any({tokenizer.mask_token_id, tokenizer.sep_token_id}.intersection(ids[1:-1]) for ids in expected)
    manifest = read_manifest(output)
    assert [shard["file"] for shard in manifest.shards] == [f"shard-{index:05}.arrow" for index in range(5)]
    counts = {"documents": len(expected), "tokens": sum(map(len, expected)), "read": 300}
    counts |= {"too_short": 300 - len(expected), "other_part": 0, "tokens_1024": 0, "tokens_2048": 0}
    assert manifest.counts == counts and counts["too_short"] >= 2
    assert manifest.vocab_size == len(tokenizer)
    saved = load_tokenizer(output)
    assert saved.model_max_length == 128 and saved.model_input_names == ["input_ids", "attention_mask"]


def test_long_documents_are_counted(tokenizers, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a " * length for length in (1021, 1022, 2045, 2046, 9000)])
    output = prepare(tmp_path / "a.jsonl", tokenizers["wordpiece"], tmp_path / "out", "--max_length", "4096")
    counts = read_manifest(output).counts
    assert (counts["tokens_1024"], counts["tokens_2048"]) == (4, 2)


@pytest.mark.parametrize("suffix", ["txt", "parquet"])
def test_an_interrupted_folder_ends_with_the_same_bytes(tokenizers, tmp_path, killed, suffix):
    """Files that are cut into parts, and a folder that as a whole is."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(6):
        documents = PARAGRAPHS[20 * number : 20 * number + 20]
        if suffix == "parquet":
            pq.write_table(pa.table({"text": documents}), source / f"{number}.parquet", row_group_size=7)
        else:
            for place, document in enumerate(documents):
                (source / f"{number}-{place:02}.txt").write_text(document, encoding="utf-8")
    flags = ("--documents_per_shard", "9", "--skip_documents", "5", "--max_documents", "100")
    flags += ("--held_out_share", "0.1")
    expected = content(prepare(source, tokenizers["bpe"], tmp_path / "whole", *flags))
    for stop in ("shard-00000.arrow", "shard-00002.arrow", "shard-00007.arrow"):
        killed(stop, source, tokenizers["bpe"], tmp_path / "out [1]", *flags)
    with pytest.raises(ValueError, match="is not finished"):
        read_manifest(tmp_path / "out [1]")
    assert content(prepare(source, tokenizers["bpe"], tmp_path / "out [1]", *flags)) == expected


def test_each_row_that_is_chosen_is_held_out_or_trained_on(corpus, tokenizers, tmp_path):
    flags = ("--documents_per_shard", "40", "--skip_documents", "10", "--max_documents", "200")
    held_out = ("--held_out_share", "0.2", "--part")
    parts = {"whole": (), "train": (*held_out, "train"), "held_out": (*held_out, "held_out")}
    ids = {
        name: ids_in(prepare(corpus, tokenizers["bpe"], tmp_path / name, *flags, *options))
        for name, options in parts.items()
    }
    assert sorted(ids["whole"]) == sorted(ids["train"] + ids["held_out"]) and 20 < len(ids["held_out"]) < 60
    counts = read_manifest(tmp_path / "train").counts
    assert counts["other_part"] == 200 - counts["documents"] - counts["too_short"] >= len(ids["held_out"])


def test_a_dataset_of_the_hub_is_read_file_by_file(corpus, tokenizers, tmp_path, monkeypatch):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "train.jsonl").write_bytes(corpus.read_bytes())
    (tmp_path / "dataset" / "test.csv").write_text("text\none\ntwo\n")
    files = {"train": [str(tmp_path / "dataset" / "train.jsonl")], "test": [str(tmp_path / "dataset" / "test.csv")]}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(tables, "load_dataset_builder", lambda source, subset: builder)
    output = prepare("owner/name", tokenizers["bpe"], tmp_path / "out")
    assert read_manifest(output).counts["read"] == 300
    with pytest.raises(ValueError, match="test.csv"):
        prepare("owner/name", tokenizers["bpe"], tmp_path / "csv", "--split", "test")
    with pytest.raises(ValueError, match="'dev'.*'train', 'test'"):
        prepare("owner/name", tokenizers["bpe"], tmp_path / "dev", "--split", "dev")


@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_write_the_same_bytes(corpus, tokenizers, tmp_path):
    flags = ("--documents_per_shard", "3", "--held_out_share", "0.1", "--long_documents", "split")
    expected = content(prepare(corpus, tokenizers["bpe"], tmp_path / "whole", *flags))

    def kill_one():
        while not list((tmp_path / "out").glob("shard-00010.arrow")):
            time.sleep(0.01)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    found = content(prepare(corpus, tokenizers["bpe"], tmp_path / "out", *flags, "--workers", "2"))
    killer.join()
    assert found == expected


def test_a_finished_folder_is_left_alone(corpus, tokenizers, tmp_path):
    output = prepare(corpus, tokenizers["bpe"], tmp_path / "out")
    times = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    # The same text at another place.
    (tmp_path / "moved.jsonl").write_bytes(corpus.read_bytes())
    prepare(tmp_path / "moved.jsonl", tokenizers["bpe"], output)
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == times


@pytest.mark.parametrize(
    "flags, name",
    [
        (["--documents_per_shard", "60"], "documents_per_shard: 100 there, 60"),
        (["--max_documents", "200"], "max_documents: None there, 200"),
        (["--tokenizer", "wordpiece"], "tokenizer: "),
        ([], "bytes: "),
    ],
)
def test_other_settings_or_text_do_not_continue_a_folder(corpus, tokenizers, tmp_path, killed, flags, name):
    arguments = (corpus, tokenizers["bpe"], tmp_path / "out", "--documents_per_shard", "100")
    killed("shard-00002.arrow", *arguments)
    if not flags:
        prepare(*arguments)  # Nor one that is finished.
        corpus.write_text(corpus.read_text() + '{"id": 1, "text": "One more document."}\n')
    before = content(tmp_path / "out")
    with pytest.raises(SettingsMismatch, match=name) as error:
        prepare(*arguments, *(tokenizers.get(flag, flag) for flag in flags))
    assert str(error.value).count(" there, ") == 1
    assert before == content(tmp_path / "out") and "shard-00000.arrow" in before


@pytest.mark.parametrize(
    "documents, message",
    [
        (["One document only."], "holds 1 of the documents"),
        (["", None, " "], "no text in 'text'"),
        (["a", "b", "c"], "None of the 3 documents"),
        (["Их тексты написаны буквами, которых словарь не знает."] * 3, "80% of the tokens"),
    ],
)
def test_what_is_no_corpus_is_refused(tokenizers, tmp_path, documents, message):
    write_jsonl(tmp_path / "c.jsonl", documents)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "c.jsonl", tokenizers["wordpiece"], tmp_path / "out")


@pytest.mark.parametrize(
    "flags, error, message",
    [
        (["--column", "content"], ValueError, "corpus.jsonl, row 0 has no column 'content'; it has 'id', 'text'"),
        (["--column", "id"], ValueError, "row 0: 'id' holds list"),
        (["--split", "test"], ValueError, "no split 'test'"),
        (["--source", "/nowhere/a.parquet"], FileNotFoundError, "'/nowhere/a.parquet' matches no file"),
        # Tests run with `HF_HUB_OFFLINE`: see conftest.py.
        (["--source", "hf://datasets/owner/name/a.parquet"], ConnectionError, "'hf://datasets/owner/name/a.parquet'"),
        (["--part", "held_out"], ValueError, "`held_out_share` is 0.0"),
    ],
)
def test_wrong_settings_leave_nothing_behind(corpus, tokenizers, tmp_path, flags, error, message):
    with pytest.raises(error, match=message):
        prepare(corpus, tokenizers["wordpiece"], tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_masks_or_special_tokens_is_refused(corpus, tokenizers, tmp_path):
    backend = AutoTokenizer.from_pretrained(tokenizers["bpe"]).backend_tokenizer
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "mask")}
    few = {name: named[name] for name in ("cls_token", "sep_token")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **few).save_pretrained(tmp_path / "no_mask")
    state = json.loads(backend.to_str())
    state["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    bare = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **named)
    bare.save_pretrained(tmp_path / "bare")
    for name, message in (("no_mask", "has no pad_token and no mask_token"), ("bare", "turns 'a' into")):
        with pytest.raises(ValueError, match=message):
            prepare(corpus, str(tmp_path / name), tmp_path / "out")


def test_llamas_tokenizer_gets_what_masked_language_modelling_needs(corpus, tmp_path):
    """Ablation M3."""
    characters = sorted(set("".join(read_jsonl(corpus))) | {"▁"})
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    llama = LlamaTokenizerFast(vocab=vocabulary, merges=[])
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="mask_token.*`add_special_tokens`"):
        prepare(corpus, str(tmp_path / "llama"), tmp_path / "out")
    output = prepare(corpus, str(tmp_path / "llama"), tmp_path / "out", "--add_special_tokens", "true")
    tokenizer, size = load_tokenizer(output), len(vocabulary)
    words = llama("Return the value", add_special_tokens=False)["input_ids"]
    assert tokenizer("Return the value")["input_ids"] == [1, *words, 2]
    assert sorted([tokenizer.pad_token_id, tokenizer.mask_token_id]) == [size, size + 1]
    assert read_manifest(output).vocab_size == size + 2
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in ids_in(output))
