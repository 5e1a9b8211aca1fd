"""Which rows examples/deduplicate.py leaves out."""

import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.data.duplicates import deduplicate
from neobert_hf.data.shards import read_manifest
from tests.helpers.examples import load_example, to_flags


pytest.importorskip("rensa", reason="pip install 'neobert_hf[scale]'")


def text(seed: int, words: int = 200) -> str:
    generator = random.Random(seed)
    return " ".join(f"word{generator.randrange(1000)}" for _ in range(words))


def test_a_table_in_memory_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="`source` is a table in memory"):
        deduplicate(source=pd.DataFrame({"text": ["a"]}), output_dir=tmp_path / "run")


def test_the_first_of_each_group_stays_and_evaluation_texts_go(corpus, tmp_path):
    """Of twelve texts an exact copy, a copy with a word changed, and one that quotes an evaluation text, go."""
    texts = [text(seed) for seed in range(9)]
    near = texts[3].split()
    near[100] = "changed"
    quoted = text(99, 60)
    rows = [*texts, texts[2], " ".join(near), text(50) + " " + " ".join(quoted.split()[10:30])]
    for name, some in (("a", rows[:7]), ("b", rows[7:]), ("evaluation", [quoted])):
        pq.write_table(pa.table({"text": some}), tmp_path / f"{name}.parquet")
    # Parts that are smaller than a file.
    flags = {"source": f"{tmp_path}/a.parquet {tmp_path}/b.parquet", "evaluation": tmp_path / "evaluation.parquet"}
    load_example("deduplicate").main(to_flags(flags | {"output_dir": tmp_path / "clean", "rows_per_part": 3}))
    files = sorted((tmp_path / "clean" / "texts").glob("*.parquet"))
    assert [row for file in files for row in pq.read_table(file)["text"].to_pylist()] == texts

    # What was removed stands in the manifest of what is prepared.
    flags = {"source": tmp_path / "clean" / "texts" / "*.parquet", "tokenizer": corpus / "tokenizer"}
    load_example("prepare_data").main(to_flags(flags | {"output_dir": tmp_path / "prepared"}))
    counts = read_manifest(tmp_path / "prepared").counts
    names = ("kept", "exact", "near", "contaminated", "read", "documents")
    assert [counts[name] for name in names] == [9, 1, 1, 1, 9, 9]


def test_texts_without_spaces_and_without_words_are_compared_by_what_they_have(tmp_path):
    """A Chinese text with one character changed goes; a line of dashes and one of stars are two texts."""
    generator = random.Random(0)
    chinese = "".join(chr(generator.randrange(0x4E00, 0x9FFF)) for _ in range(300))
    rows = [chinese, chinese[:100] + "一" + chinese[101:], "---", "***"]
    pq.write_table(pa.table({"text": rows}), tmp_path / "texts.parquet")
    deduplicate(source=tmp_path / "texts.parquet", output_dir=tmp_path / "clean")
    (file,) = (tmp_path / "clean" / "texts").glob("*.parquet")
    assert pq.read_table(file)["text"].to_pylist() == [chinese, "---", "***"]
