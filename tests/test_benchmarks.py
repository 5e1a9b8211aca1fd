"""The benchmark runs from its command line; what it measures is never asserted."""

import json
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
from conftest import ROOT
from datasets import Dataset


def test_scaling_document_holds_the_tables_of_its_command():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from scaling import tables

    text = (ROOT / "docs" / "scaling.md").read_text()
    for table in tables():
        assert "\n".join(table) in text


@pytest.mark.slow
def test_pretraining_benchmark(tmp_path):
    """Every run of it, of two steps."""
    documents = [{"text": text} for text in topics.values()]
    for name, part in (("train", documents), ("validation", documents[:10])):
        Dataset.from_list(part).to_parquet(tmp_path / f"{name}.parquet")
    limit = "--max_steps 2 --logging_steps 1 --eval_steps 2 --use_cpu true --hidden_size 64 --num_attention_heads 2"
    command = [sys.executable, "benchmarks/pretraining.py", "--text", str(tmp_path), "--results", str(tmp_path)]
    subprocess.run(
        [*command, "--output_dir", str(tmp_path / "runs"), "--seeds", "1", "--limit", limit], cwd=ROOT, check=True
    )
    results = json.loads((tmp_path / "pretraining.json").read_text())
    assert len(results["stages"]) == 2 and len(results["ablations"]) == 7
    text = (tmp_path / "pretraining.md").read_text()
    assert "learned absolute positions" in text and "stage 2 at 1,024" in text
    assert (tmp_path / "pretraining.png").stat().st_size > 10_000


@pytest.mark.slow
def test_forward_benchmark(tmp_path):
    flags = ["--layers", "1", "--repeats", "1", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/forward.py", *flags], cwd=ROOT, check=True)
    results = json.loads(next(tmp_path.glob("forward_*.json")).read_text())
    assert {"Full batches", "Ragged batches", "Training step"} < set(results)
    text = next(tmp_path.glob("forward_*.md")).read_text()
    assert "--layers 1" in text and text.count("## ") == 3
