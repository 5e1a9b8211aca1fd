"""Raw text to shards: exact, the same however it is run or interrupted, and refused before work where it cannot be."""

import gzip
import json
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import IterableDataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.common.settings import parse_config
from neobert_hf.data import encoding, preparing
from neobert_hf.data.shards import Manifest, load_shards, load_tokenizer, read_manifest
from neobert_hf.data.tables import local_files
from neobert_hf.data.tokenizer import train_bpe, train_wordpiece
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


prepare_data = load_example("prepare_data")

PARAGRAPHS = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
# Where they differ, tokenizers disagree about what separates words, or looks across it.
NASTY = (
    "a b the é e\u0301 \u0301 \u0323 \n \t \x0b \x0c \x85 \x1c \u200b \ufffd \0 漢 😀 👩\u200d👩 İ ß Σ ﬁ \u3000 \u2028 "
    "\xa0 's ' 're 1 23 ... [MASK] [SEP] x" + "x" * 120
).split(" ") + [" "] * 8


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_wordpiece(iter(PARAGRAPHS), 1_500, 512).save_pretrained(folder / "wordpiece")
    train_bpe(iter(PARAGRAPHS), 1_000, 512).save_pretrained(folder / "bpe")
    return {name: str(folder / name) for name in ("wordpiece", "bpe")}


@pytest.fixture
def corpus(tmp_path) -> Path:
    """300 documents, of which 2 are too short and 5 longer than 128 tokens by far."""
    documents = [*PARAGRAPHS[:293], "[MASK] and [SEP] are text here.", "", "a", *([" ".join(PARAGRAPHS[:80])] * 4)]
    random.Random(0).shuffle(documents)
    write_jsonl(tmp_path / "corpus.jsonl", documents)
    return tmp_path / "corpus.jsonl"


def write_jsonl(file: Path, documents: list[str | None]) -> None:
    file.write_text("".join(json.dumps({"id": 1, "text": document}) + "\n" for document in documents))


def read_jsonl(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


@pytest.fixture
def prepare(monkeypatch):
    """Runs the script in this process, with threads for workers."""
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)

    def run(source, tokenizer, output, *flags: str) -> Path:
        paths = ["--source", str(source), "--tokenizer", tokenizer, "--output_dir", str(output)]
        prepare_data.main([*paths, "--max_length", "128", "--num_proc", "2", *flags])
        return output

    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_truncated_documents_and_the_manifest(corpus, tokenizers, prepare, tmp_path, kind):
    output = prepare(corpus, tokenizers[kind], tmp_path / "out", "--documents_per_shard", "70")
    tokenizer = AutoTokenizer.from_pretrained(tokenizers[kind])
    plain = tokenizer(read_jsonl(corpus), truncation=True, max_length=128)["input_ids"]
    expected = [ids for ids in plain if len(ids) >= 4]
    assert load_shards(output)["input_ids"][:] == expected and max(map(len, expected)) == 128
    # Text that spells a special token is that token.
    assert any({tokenizer.mask_token_id, tokenizer.sep_token_id}.intersection(ids[1:-1]) for ids in expected)

    manifest = read_manifest(output)
    assert [shard["file"] for shard in manifest.shards] == [f"shard-{index:05}.arrow" for index in range(5)]
    assert sum(shard["documents"] for shard in manifest.shards) == manifest.documents == len(expected)
    assert sum(shard["tokens"] for shard in manifest.shards) == manifest.tokens == sum(map(len, expected))
    assert manifest.source_documents == 300 and manifest.dropped_short == 300 - len(expected) >= 2
    assert manifest.length_histogram == Counter(2 ** (len(bin(len(ids))) - 3) for ids in expected)
    assert manifest.vocab_size == len(tokenizer) and manifest.dtype == "uint16"
    assert manifest.source["source"] == str(corpus) and manifest.column == "text"
    assert {path.name for path in output.iterdir()} == {
        "manifest.json",
        "tokenizer",
        *(s["file"] for s in manifest.shards),
    }
    saved = load_tokenizer(output)
    assert saved.model_max_length == 128 and saved.model_input_names == ["input_ids", "attention_mask"]


def test_split_documents(corpus, tokenizers, prepare, tmp_path):
    output = prepare(corpus, tokenizers["wordpiece"], tmp_path / "out", "--long_documents", "split")
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["wordpiece"])
    windows = []
    for text in read_jsonl(corpus):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        windows += [[101, *ids[start : start + 126], 102] for start in range(0, len(ids), 126)]
    expected = [window for window in windows if len(window) >= 4]
    assert load_shards(output)["input_ids"][:] == expected and len(expected) > 310
    assert read_manifest(output).source_documents == 300


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_cut_changes_no_token_before_it(tokenizers, kind):
    backend = AutoTokenizer.from_pretrained(tokenizers[kind]).backend_tokenizer
    assert encoding.can_cut(json.loads(backend.to_str()))
    chance, cuts = random.Random(0), 0
    for _ in range(3_000):
        text = "".join(chance.choices(NASTY, k=chance.randint(1, 30)))
        beginning = encoding.cut_text(text, chance.randint(0, 12))
        cuts += beginning != text
        tokens, whole = (backend.encode(part, add_special_tokens=False).tokens for part in (beginning, text))
        assert tokens == whole[: len(tokens)], repr((beginning, text))
    assert cuts > 1_000


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_truncation_after_a_cut_is_plain_truncation(tokenizers, kind, monkeypatch):
    serialised = AutoTokenizer.from_pretrained(tokenizers[kind]).backend_tokenizer.to_str()
    chance = random.Random(1)
    texts = ["".join(chance.choices(NASTY, k=400)) for _ in range(200)]
    # Long beginnings of few tokens, so that the rest is needed; and nowhere to cut.
    texts += [
        " " * 500 + "the end",
        "a" + " " * 1_000 + "b c d e f g h",
        "漢" * 500,
        "\x0b\x85" * 100 + " a b",
        "x" * 500,
    ]
    texts += ["a \0" + "\0" * 400 + " b c d e f g h i j"]
    beginnings = [encoding.cut_text(text, 64) for text in texts]
    assert sum(beginning != text for beginning, text in zip(beginnings, texts)) > 150
    cut = list(encoding.encode(texts, serialised, 8, split=False))
    monkeypatch.setattr(encoding, "can_cut", lambda tokenizer: False)
    assert cut == list(encoding.encode(texts, serialised, 8, split=False))


def test_other_tokenizers_are_not_cut_for(tokenizers):
    wordpiece, bpe = (
        json.loads(AutoTokenizer.from_pretrained(tokenizers[kind]).backend_tokenizer.to_str())
        for kind in ("wordpiece", "bpe")
    )
    added = wordpiece["added_tokens"] + [wordpiece["added_tokens"][0] | {"special": False}]
    assert not encoding.can_cut(wordpiece | {"added_tokens": added})
    assert not encoding.can_cut(wordpiece | {"normalizer": {"type": "NFKC"}})
    assert not encoding.can_cut(wordpiece | {"pre_tokenizer": None})
    assert not encoding.can_cut(bpe | {"normalizer": {"type": "NFC"}})
    assert not encoding.can_cut(bpe | {"pre_tokenizer": bpe["pre_tokenizer"] | {"use_regex": False}})


def test_skipped_and_taken_documents_make_two_folders(corpus, tokenizers, prepare, tmp_path):
    whole = load_shards(prepare(corpus, tokenizers["bpe"], tmp_path / "whole"))["input_ids"][:]
    flags = ("--documents_per_shard", "30")
    first = prepare(corpus, tokenizers["bpe"], tmp_path / "a", "--max_documents", "100", *flags)
    rest = prepare(corpus, tokenizers["bpe"], tmp_path / "b", "--skip_documents", "100", *flags)
    assert (read_manifest(first).source_documents, read_manifest(rest).source_documents) == (100, 200)
    assert load_shards(first)["input_ids"][:] + load_shards(rest)["input_ids"][:] == whole


def test_every_format_gives_the_same_documents(tokenizers, prepare, tmp_path):
    documents = [text + "\n" for text in PARAGRAPHS[:20]]
    for folder in ("txt", "txt_gz"):
        (tmp_path / folder).mkdir()
    for number, document in enumerate(documents):
        (tmp_path / "txt" / f"{number:03}.txt").write_text(document, encoding="utf-8")
        with gzip.open(tmp_path / "txt_gz" / f"{number:03}.txt.gz", "wt", encoding="utf-8") as file:
            file.write(document)
    write_jsonl(tmp_path / "a.jsonl", documents[:10])
    write_jsonl(tmp_path / "b.jsonl", documents[10:])
    for name in "ab":
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress((tmp_path / f"{name}.jsonl").read_bytes()))
    table = pa.table({"text": pa.array(documents, pa.large_string()), "id": range(20)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    expected = None
    for source in ("txt", "txt_gz", "[ab].jsonl", "*.jsonl.gz", "a.parquet"):
        output = prepare(tmp_path / source, tokenizers["bpe"], tmp_path / "out" / source.strip("*"))
        found = load_shards(output)["input_ids"][:]
        assert len(found) == 20 and found == (expected or found), source
        expected = found


@pytest.mark.parametrize("suffix", ["txt", "jsonl.gz", "parquet"])
def test_every_format_continues_where_it_stopped(tokenizers, prepare, tmp_path, monkeypatch, suffix):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(6):
        documents = PARAGRAPHS[20 * number : 20 * number + 20]
        if suffix == "parquet":
            pq.write_table(pa.table({"text": documents}), source / f"{number}.parquet", row_group_size=7)
        elif suffix == "jsonl.gz":
            write_jsonl(tmp_path / "one.jsonl", documents)
            (source / f"{number}.jsonl.gz").write_bytes(gzip.compress((tmp_path / "one.jsonl").read_bytes()))
        else:
            for place, document in enumerate(documents):
                (source / f"{number}-{place:02}.txt").write_text(document, encoding="utf-8")
    flags = ("--documents_per_shard", "9", "--skip_documents", "5", "--max_documents", "100")
    expected = content(prepare(source, tokenizers["bpe"], tmp_path / "whole", *flags))
    prepare_shard = preparing.prepare_shard
    for stop in ("shard-00002.arrow", "shard-00007.arrow", "shard-00011.arrow"):

        def failing(texts, serialised, manifest, path, stop=stop):
            if path.name == stop:
                raise MemoryError
            return prepare_shard(texts, serialised, manifest, path)

        monkeypatch.setattr(preparing, "prepare_shard", failing)
        with pytest.raises(MemoryError):
            prepare(source, tokenizers["bpe"], tmp_path / "out", *flags)
    monkeypatch.setattr(preparing, "prepare_shard", prepare_shard)
    assert content(prepare(source, tokenizers["bpe"], tmp_path / "out", *flags)) == expected


CHANGES = {
    "edited at the same size": lambda lines: [lines[0].replace("a", "o", 1), *lines[1:]],
    "in another order": lambda lines: [lines[1], lines[0], *lines[2:]],
    "the same in another file": lambda lines: lines,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("finished", [True, False])
def test_changed_text_is_noticed_at_the_next_start(tokenizers, prepare, tmp_path, monkeypatch, change, finished):
    # One process, so that the first shard is done when the fourth one fails.
    flags = ("--documents_per_shard", "10", "--num_proc", "1")
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    write_jsonl(source, PARAGRAPHS[:60])
    expected = content(prepare(source, tokenizers["bpe"], tmp_path / "whole", *flags))
    with monkeypatch.context() as patch:
        prepare_shard = preparing.prepare_shard

        def failing(texts, serialised, manifest, path):
            if path.name == "shard-00003.arrow" and not finished:
                raise MemoryError
            return prepare_shard(texts, serialised, manifest, path)

        patch.setattr(preparing, "prepare_shard", failing)
        with nullcontext() if finished else pytest.raises(MemoryError):
            prepare(source, tokenizers["bpe"], output, *flags)
    times, before = source.stat(), source.read_text()
    source.unlink()
    source.write_text("".join(CHANGES[change](before.splitlines(keepends=True))))
    assert source.stat().st_size == times.st_size
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    if change in ("edited at the same size", "in another order"):
        with pytest.raises(ValueError, match="has changed since .* from row 0 to 9 some are different"):
            prepare(source, tokenizers["bpe"], output, *flags)
        return
    prepare(source, tokenizers["bpe"], output, *flags)
    found = content(output)
    # All is equal but the times of the file.
    manifests = [json.loads(files.pop("manifest.json")) for files in (found, expected)]
    assert found == expected
    assert len({manifest.pop("files_state") for manifest in manifests}) == 1 + (not finished)
    assert manifests[0] == manifests[1] and len(manifests[0]["texts"]) == 6


def test_leftovers_are_no_way_out_of_a_folder(tokenizers, prepare, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", PARAGRAPHS[:60])
    arguments = (tmp_path / "a.jsonl", tokenizers["bpe"], tmp_path / "out", "--documents_per_shard", "10")
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(*arguments)
    # A leftover that is a link, and one that is a folder.
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out" / "shard-00009.arrow.1.partial").symlink_to(tmp_path / "mine")
    (tmp_path / "out" / "progress" / "tokenizer").symlink_to(tmp_path / "mine")
    prepare(*arguments)
    assert (tmp_path / "mine").read_text() == "mine" and not list((tmp_path / "out").glob("*.partial"))


def tracked_stream(read: list[str]) -> IterableDataset:
    def generate(parts):
        for part in parts:
            for number in range(10):
                read.append(f"{part} {number}")
                yield {"text": f"the document {part} {number}"}

    return IterableDataset.from_generator(generate, gen_kwargs={"parts": list("abcdefghij")})


def plan_for(**changes) -> Manifest:
    source = {"max_documents": None}
    return Manifest(**({"source": source, "column": "text"} | changes), **{
        "tokenizer_fingerprint": "", "vocab_size": 1_000, "max_length": 16,
        "long_documents": "truncate", "dtype": "uint16", "documents_per_shard": 10,
    })  # fmt: skip


def test_resuming_reads_from_the_first_missing_shard_only(tokenizers, prepare, tmp_path):
    serialised = AutoTokenizer.from_pretrained(tokenizers["bpe"]).backend_tokenizer.to_str()
    (tmp_path / "progress").mkdir()
    preparing.prepare_shards(tracked_stream([]), plan_for(), serialised, tmp_path, 2)
    expected = content(tmp_path)
    # Shards finish out of order: 6 is missing, 7 to 9 are there.
    (tmp_path / "shard-00006.arrow").unlink()
    (tmp_path / "progress" / "00006.json").unlink()
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.arrow")}
    read = []
    preparing.prepare_shards(tracked_stream(read), plan_for(), serialised, tmp_path, 2)
    assert not {"a", "b", "c", "d", "e"}.intersection(name.split()[0] for name in read) and "g 0" in read
    assert all(file.stat().st_mtime_ns == times[file] for file in times)
    assert content(tmp_path) == expected


def test_the_stream_is_read_little_ahead_of_the_work(tokenizers, tmp_path, monkeypatch):
    read, ahead = [], []
    prepare_shard = preparing.prepare_shard

    def slow_shard(*arguments):
        time.sleep(0.02)
        ahead.append(len(read) - 10 * len(ahead))
        return prepare_shard(*arguments)

    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    monkeypatch.setattr(preparing, "prepare_shard", slow_shard)
    serialised = AutoTokenizer.from_pretrained(tokenizers["bpe"]).backend_tokenizer.to_str()
    (tmp_path / "progress").mkdir()
    preparing.prepare_shards(tracked_stream(read), plan_for(), serialised, tmp_path, 2)
    # At work, 3 chunks; and one being read.
    assert len(read) == 100 and max(ahead) <= 45


def test_a_finished_folder_is_left_alone(corpus, tokenizers, prepare, tmp_path, capsys):
    output = prepare(corpus, tokenizers["bpe"], tmp_path / "out")
    times = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    prepare(corpus, tokenizers["bpe"], output, "--num_proc", "1")
    assert "is finished already" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == times
    with pytest.raises(SettingsMismatch, match="max_length: 128 there, 64 now"):
        prepare(corpus, tokenizers["bpe"], output, "--max_length", "64")
    with pytest.raises(SettingsMismatch, match="tokenizer_fingerprint: "):
        prepare(corpus, tokenizers["wordpiece"], output)
    (output / "shard-00000.arrow").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00000.arrow"):
        prepare(corpus, tokenizers["bpe"], output)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--documents_per_shard", "60"], "documents_per_shard: 50 there, 60"),
        (["--long_documents", "split"], "long_documents: 'truncate' there, 'split'"),
        (["--max_documents", "200"], "max_documents: None there, 200"),
        (["--skip_documents", "1"], "skip_documents: 0 there, 1"),
        (["--source", "{corpus}.more"], "bytes: .* there, "),
        ([], "bytes: .* there, "),
    ],
)
def test_other_settings_do_not_continue_a_folder(corpus, tokenizers, prepare, tmp_path, monkeypatch, flags, message):
    prepare_shard = preparing.prepare_shard

    def failing(texts, serialised, manifest, path):
        if path.name == "shard-00003.arrow":
            raise MemoryError
        return prepare_shard(texts, serialised, manifest, path)

    monkeypatch.setattr(preparing, "prepare_shard", failing)
    flags = ["--documents_per_shard", "50", *(flag.format(corpus=corpus) for flag in flags)]
    with pytest.raises(MemoryError):
        prepare(corpus, tokenizers["bpe"], tmp_path / "out", "--documents_per_shard", "50")
    before = content(tmp_path / "out")
    Path(f"{corpus}.more").mkdir()
    write_jsonl(Path(f"{corpus}.more") / "x.jsonl", ["Another document."] * 5)
    if len(flags) == 2:
        corpus.write_text(corpus.read_text() + '{"id": 1, "text": "One more document."}\n')
    with pytest.raises(SettingsMismatch, match=message):
        prepare(corpus, tokenizers["bpe"], tmp_path / "out", *flags)
    assert before == content(tmp_path / "out") and "shard-00000.arrow" in before


@pytest.mark.parametrize(
    "documents, message",
    [
        ([], "c.jsonl is empty: it holds no document"),
        (["One document only."], "holds 1 document; a corpus needs 2 or more.*JSON lines"),
        (["", "a", None, " "], "None of the 4 documents has 2 tokens or more"),
        (["", None, " "], "The first 3 documents of .* have no text in 'text': is it the column"),
    ],
)
def test_no_corpus(tokenizers, prepare, tmp_path, documents, message):
    write_jsonl(tmp_path / "c.jsonl", documents)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "c.jsonl", tokenizers["wordpiece"], tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    "flags, error, message",
    [
        (["--column", "content"], ValueError, "corpus.jsonl, row 0 has no column 'content'; it has 'id', 'text'"),
        (["--split", "test"], ValueError, "no split 'test'; local files are all 'train'"),
        (["--subset", "en"], ValueError, "is local and has no subset 'en'"),
        (["--skip_documents", "300"], ValueError, "holds 0 documents after the first 300"),
        (["--source", "/nowhere/a.parquet"], FileNotFoundError, "'/nowhere/a.parquet' matches no file"),
        (["--source", "nowhere/*.txt"], FileNotFoundError, "matches no file; give a file"),
        (
            ["--source", str(ROOT / "Makefile")],
            ValueError,
            "Makefile has an unknown format; the known ones are .parquet",
        ),
        (["--output_dir", str(ROOT)], ValueError, "holds something else; choose an `output_dir`"),
    ],
)
def test_bad_settings_are_refused_before_work(corpus, tokenizers, prepare, tmp_path, flags, error, message):
    with pytest.raises(error, match=message):
        prepare(corpus, tokenizers["wordpiece"], tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_unusable_tokenizers(corpus, tokenizers, prepare, tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["bpe"])
    backend = tokenizer.backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]").save_pretrained(
        tmp_path / "no_mask"
    )
    state = json.loads(backend.to_str())
    state["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "mask")}
    PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **names).save_pretrained(
        tmp_path / "no_template"
    )
    for name, message in (
        ("slow", "has no fast backend"),
        ("no_mask", "has no pad_token and no mask_token.*`add_special_tokens`"),
        ("no_template", "turns 'a' into .* post-processor"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(corpus, str(tmp_path / name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_like_llamas_gets_the_tokens_that_it_lacks(corpus, prepare, tmp_path):
    """For ablation M3. Texts begin and end with the tokens that it has for that."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(PARAGRAPHS, trainers.BpeTrainer(vocab_size=900, special_tokens=special))
    llama = LlamaTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="no cls_token .* no sep_token .* no pad_token .* no mask_token"):
        prepare(corpus, str(tmp_path / "llama"), tmp_path / "out")
    output = prepare(corpus, str(tmp_path / "llama"), tmp_path / "out", "--add_special_tokens", "true")
    tokenizer = load_tokenizer(output)
    words = llama("Return the value", add_special_tokens=False)["input_ids"]
    assert tokenizer("Return the value")["input_ids"] == [1, *words, 2]
    assert (tokenizer.cls_token_id, tokenizer.sep_token_id) == (1, 2)
    assert sorted([tokenizer.pad_token_id, tokenizer.mask_token_id]) == [900, 901]
    assert read_manifest(output).vocab_size == 902
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in load_shards(output)["input_ids"][:])


def test_a_tokenizer_of_another_language_is_refused_before_work(tokenizers, prepare, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["Их тексты написаны буквами, которых словарь не знает."] * 3)
    with pytest.raises(ValueError, match=r"80% of the tokens of the first 3 documents of .*a.jsonl' are \[UNK\]"):
        prepare(tmp_path / "a.jsonl", tokenizers["wordpiece"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_shipped_config_is_read(monkeypatch):
    config = ROOT / "configs" / "data" / "refinedweb.yaml"
    (settings,) = parse_config(preparing.PrepareArguments, args=["--config", str(config)])
    assert (settings.source, settings.column, settings.max_length) == ("tiiuae/falcon-refinedweb", "content", 4096)
    assert local_files(settings.source) == []
