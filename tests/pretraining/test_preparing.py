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
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from neobert_hf.common import text_sources
from neobert_hf.common.settings import parse_config
from neobert_hf.common.text_sources import stream_text
from neobert_hf.pretraining import encoding, preparing
from neobert_hf.pretraining.shards import Manifest, load_shards, load_tokenizer, read_manifest
from neobert_hf.pretraining.tokenizer import train_bpe, train_wordpiece
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import start


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
    plain = tokenizer(read_jsonl(corpus), truncation=True, max_length=128, split_special_tokens=True)["input_ids"]
    expected = [ids for ids in plain if len(ids) >= 4]
    assert load_shards(output)["input_ids"][:] == expected and max(map(len, expected)) == 128
    assert not any({tokenizer.mask_token_id, tokenizer.sep_token_id}.intersection(ids[1:-1]) for ids in expected)

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
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        windows += [[101, *ids[start : start + 126], 102] for start in range(0, len(ids), 126)]
    expected = [window for window in windows if len(window) >= 4]
    assert load_shards(output)["input_ids"][:] == expected and len(expected) > 310
    assert read_manifest(output).source_documents == 300


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_cut_changes_no_token_before_it(tokenizers, kind):
    backend = AutoTokenizer.from_pretrained(tokenizers[kind]).backend_tokenizer
    assert encoding.can_cut(json.loads(backend.to_str()))
    backend.encode_special_tokens = True
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


@pytest.mark.slow
def test_killed_twice_and_continued_is_byte_identical(corpus, tokenizers, prepare, tmp_path):
    # 20 shards of some 0.1 s each, so that the first kill comes well before the last.
    write_jsonl(corpus, [" ".join(PARAGRAPHS[number : number + 50]) for number in range(400)])
    flags = ("--documents_per_shard", "20", "--long_documents", "split")
    expected = content(prepare(corpus, tokenizers["bpe"], tmp_path / "whole", "--num_proc", "1", *flags))
    output, progress = tmp_path / "killed", tmp_path / "killed" / "progress"
    flags = ("--source", str(corpus), "--tokenizer", tokenizers["bpe"], "--output_dir", str(output), *flags)
    flags += ("--max_length", "128", "--num_proc", "2")
    written: dict[Path, int] = {}
    for enough in (2, 6):
        process = start([*flags], script="prepare_data")
        while len(list(progress.glob("[0-9]*.json"))) < enough:
            process.check_running()
        # Not its workers, which must notice.
        process.kill()
        assert not (output / "manifest.json").exists()
        with pytest.raises(ValueError, match="not finished"):
            read_manifest(output)
        done = [output / f"shard-{record.stem}.arrow" for record in progress.glob("[0-9]*.json")]
        assert all(file.stat().st_mtime_ns == written[file] for file in written), "tokenised again"
        written = {file: file.stat().st_mtime_ns for file in done}
    printed = start([*flags], script="prepare_data").finish()
    assert f"{output}: resuming; {len(written)} shards are there already" in printed and "tokens=" in printed
    assert all(file.stat().st_mtime_ns == written[file] for file in written), "tokenised again"
    assert content(output) == expected
    assert "documents of 1,024 tokens or more" in printed


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


def test_damage_of_a_folder_that_is_being_prepared(tokenizers, prepare, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", PARAGRAPHS[:60])
    arguments = (tmp_path / "a.jsonl", tokenizers["bpe"], tmp_path / "out", "--documents_per_shard", "10")
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(*arguments)
    record, shard = tmp_path / "out" / "progress" / "00001.json", tmp_path / "out" / "shard-00002.arrow"
    before = record.read_text()
    for damaged in ("{", "[]", "{}"):
        record.write_text(damaged)
        with pytest.raises(ValueError, match="00001.json is damaged .*: delete it"):
            prepare(*arguments)
    record.write_text(before)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-30])
    with pytest.raises(ValueError, match="shard-00002.arrow has .* bytes"):
        prepare(*arguments)
    # A leftover that is a link, and one that is a folder.
    shard.write_bytes(whole)
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
    with pytest.raises(ValueError, match="other settings .`max_length` was 128 and is now 64.: repeat"):
        prepare(corpus, tokenizers["bpe"], output, "--max_length", "64")
    with pytest.raises(ValueError, match="`tokenizer_fingerprint` was"):
        prepare(corpus, tokenizers["wordpiece"], output)
    (output / "shard-00000.arrow").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00000.arrow"):
        prepare(corpus, tokenizers["bpe"], output)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--documents_per_shard", "60"], "`documents_per_shard` was 50 and is now 60"),
        (["--long_documents", "split"], "`long_documents` was 'truncate' and is now 'split'"),
        (["--max_documents", "200"], "`max_documents` was None and is now 200"),
        (["--skip_documents", "1"], "`skip_documents` was 0 and is now 1"),
        (["--source", "{corpus}.more"], "`source` was .* and is now"),
        ([], "`bytes` was .* and is now"),
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
    if "source" not in message and len(flags) == 2:
        corpus.write_text(corpus.read_text() + '{"id": 1, "text": "One more document."}\n')
    with pytest.raises(ValueError, match=message):
        prepare(corpus, tokenizers["bpe"], tmp_path / "out", *flags)
    assert before == content(tmp_path / "out") and "shard-00000.arrow" in before


@pytest.mark.parametrize(
    "documents, message",
    [
        ([], "c.jsonl' is empty: it holds no document"),
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
        (["--column", "content"], ValueError, "no column 'content'; it has 'id', 'text'"),
        (["--column", "id"], ValueError, "corpus.jsonl, line 1: the column 'id' holds int 1, not strings"),
        (["--split", "test"], ValueError, "no split 'test'; it has 'train'"),
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
        ("no_mask", "has no pad_token and no mask_token.*train_tokenizer"),
        ("no_template", "turns 'a' into .* post-processor"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(corpus, str(tmp_path / name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_language_is_refused_before_work(tokenizers, prepare, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["Их тексты написаны буквами, которых словарь не знает."] * 3)
    with pytest.raises(ValueError, match=r"80% of the tokens of the first 3 documents of .*a.jsonl' are \[UNK\]"):
        prepare(tmp_path / "a.jsonl", tokenizers["wordpiece"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be_one_corpus(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", ["x y"])
    (tmp_path / "b.txt").write_text("One.")
    with pytest.raises(ValueError, match="mixes json and text files"):
        stream_text(str(tmp_path), "text")
    monkeypatch.setattr(text_sources, "LARGEST_TEXT_FILE", 3)
    with pytest.raises(ValueError, match="b.txt has 4 bytes, more than 3: a text file is one document"):
        stream_text(str(tmp_path / "*.txt"), "text")
    (tmp_path / ".hidden.parquet").write_bytes(b"")
    (tmp_path / "b.txt").unlink()
    assert [row["text"] for row in stream_text(str(tmp_path), "text")] == ["x y"]


def test_unknown_hub_datasets(monkeypatch):
    def missing(*arguments, **options):
        raise text_sources.DatasetNotFoundError("Dataset 'owner/nothing' doesn't exist on the Hub")

    monkeypatch.setattr(text_sources, "load_dataset", missing)
    with pytest.raises(FileNotFoundError, match="'owner/nothing' is not a local file.*the Hub has no such"):
        stream_text("owner/nothing", "text")


@pytest.mark.parametrize("name", ["nowhere", "owner/nothing"])
def test_without_the_hub_a_name_is_first_said_to_be_no_file(name):
    """Tests run with `HF_HUB_OFFLINE`: see conftest.py."""
    expected = f"{name!r} is not a local file, pattern or folder, and the Hub cannot be reached"
    with pytest.raises(ConnectionError, match=expected):
        stream_text(name, "text")
    with pytest.raises(ConnectionError, match=f"Dataset pairs: {expected}"):
        text_sources.load_table("pairs", name, None, "train")


def test_local_files_have_no_subset(tmp_path):
    """Otherwise all of them would be read, the test rows among those for training."""
    for subset in ("de", "en"):
        (tmp_path / subset).mkdir()
        write_jsonl(tmp_path / subset / "train.jsonl", ["x y"])
    with pytest.raises(ValueError, match="Dataset pairs: .* is local and has no subset 'en'"):
        text_sources.load_table("pairs", str(tmp_path), "en", "train")


def test_hub_datasets_are_streamed(tmp_path, monkeypatch):
    """What stream_text asks `datasets` for, and what it does with the splits; local files stand in for the Hub's."""
    calls, load_dataset = [], text_sources.load_dataset
    write_jsonl(tmp_path / "a.jsonl", ["x y", "z"])

    def from_the_hub(*arguments, **options):
        calls.append((arguments, options))
        files = {"train": str(tmp_path / "a.jsonl"), "test": str(tmp_path / "a.jsonl")}
        return load_dataset("json", data_files=files, streaming=True)

    monkeypatch.setattr(text_sources, "load_dataset", from_the_hub)
    assert list(stream_text("owner/name", "text", split="test", subset="en")) == [{"text": "x y"}, {"text": "z"}]
    assert calls == [(("owner/name", "en"), {"streaming": True})]
    with pytest.raises(ValueError, match="no split 'dev'; it has 'train', 'test'"):
        stream_text("owner/name", "text", split="dev")


def test_the_shipped_config_is_read(monkeypatch):
    config = ROOT / "configs" / "data" / "refinedweb.yaml"
    (settings,) = parse_config(preparing.PrepareArguments, args=["--config", str(config)])
    assert (settings.source, settings.column, settings.max_length) == ("tiiuae/falcon-refinedweb", "content", 4096)
    assert text_sources.local_files(settings.source) == []
