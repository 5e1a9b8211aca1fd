"""Which rows examples/deduplicate.py leaves out: the same for any number of workers."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.data.shards import read_manifest
from neobert_hf.data.tokenizer import train_bpe
from tests.helpers.examples import load_example
from tests.helpers.pretraining_runs import to_flags


pytest.importorskip("rensa", reason="pip install 'neobert_hf[scale]'")


def text(seed: int, words: int = 200) -> str:
    generator = random.Random(seed)
    return " ".join(f"word{generator.randrange(1000)}" for _ in range(words))


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Twelve texts: an exact copy, a copy with a word changed, and one that quotes an evaluation text."""
    texts = [text(seed) for seed in range(9)]
    near = texts[3].split()
    near[100] = "changed"
    quoted = text(99, 60)
    rows = [*texts, texts[2], " ".join(near), text(50) + " " + " ".join(quoted.split()[10:30])]
    pq.write_table(pa.table({"text": rows[:7]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": rows[7:]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [quoted]}), tmp_path / "evaluation.parquet")
    return tmp_path


def deduplicate(corpus: Path, output: Path, *flags: str) -> list[str]:
    sources = [str(corpus / "a.parquet"), str(corpus / "b.parquet")]
    evaluation = ["--evaluation", str(corpus / "evaluation.parquet")]
    load_example("deduplicate").main(["--source", *sources, "--output_dir", str(output), *evaluation, *flags])
    files = sorted((output / "texts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file)["text"].to_pylist()]


def test_the_first_of_each_group_stays_and_evaluation_texts_go(corpus, tmp_path, capsys):
    kept = deduplicate(corpus, tmp_path / "out")
    assert kept == [text(seed) for seed in range(9)]
    assert "9 kept, 1 exact, 1 near, 1 contaminated of 12 rows" in capsys.readouterr().out


def test_what_was_removed_stands_in_the_manifest_of_what_is_prepared(corpus, tmp_path):
    kept = deduplicate(corpus, tmp_path / "clean")
    train_bpe(iter(kept), 300, 128).save_pretrained(tmp_path / "tokenizer")
    flags = {"source": tmp_path / "clean" / "texts" / "*.parquet", "tokenizer": tmp_path / "tokenizer"}
    load_example("prepare_data").main(to_flags(flags | {"output_dir": tmp_path / "out"}))
    counts = read_manifest(tmp_path / "out").counts
    names = ("kept", "exact", "near", "contaminated", "read", "documents")
    assert [counts[name] for name in names] == [9, 1, 1, 1, 9, 9]


@pytest.mark.slow
def test_any_workers_and_parts_keep_the_same_rows(corpus, tmp_path):
    expected = deduplicate(corpus, tmp_path / "one")
    assert deduplicate(corpus, tmp_path / "two", "--workers", "2", "--rows_per_part", "3") == expected
