"""benchmarks/length.py on a few texts: every way and state is in the report, with what extend_length.py measured."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics

import length
import pytest
from datasets import Dataset

from neobert_hf.pretraining import preparing
from tests.helpers.models import ROOT
from tests.helpers.one_by_one import OneByOne, run_here


def test_every_way_is_in_the_report(tmp_path, monkeypatch):
    Dataset.from_list([{"text": topics[name]} for name in sorted(topics)]).to_parquet(tmp_path / "text.parquet")
    done = []
    monkeypatch.setattr(length, "run", run_here(done))
    monkeypatch.setattr(length, "ThreadPoolExecutor", OneByOne)
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    few = "--max_steps 2 --eval_steps 2 --global_batch_tokens 512 --micro_batch_tokens 512 --held_out_share 0.3 "
    few += "--held_out_documents 12 --measured_documents 2 --sample 2 --facts 4 --bf16 false --peak_tflops 0.1"
    flags = ["--text", f"{tmp_path}/text.parquet", "--model", f"{ROOT}/benchmarks/models/small", "--lengths", "512"]
    flags += ["--seeds", "2", "--output_dir", f"{tmp_path}/runs", "--results", str(tmp_path), "--training", few]
    length.main(flags)
    assert done == ["extend_length.py"] * 4
    report = (tmp_path / "length.md").read_text()
    states = (
        "not trained, positions as they are",
        "not trained, YaRN",
        "trained, YaRN",
        "trained, positions as they are",
    )
    assert all(report.count(f"| {state} | ") == 2 for state in states) and "nan" not in report
    # Numbers are those of the recipe's own report.
    measured = json.loads((tmp_path / "runs/512_yarn_0/report.json").read_text())["measured"]
    (row,) = [line for line in report.split("Pseudo-perplexity")[1].splitlines() if "not trained, YaRN" in line]
    perplexities = [point["pseudo_perplexity"] for point in measured["before, yarn:2"].values()]
    assert [float(cell) for cell in row.split("|")[2:-1]] == pytest.approx(perplexities, abs=0.05)
    assert (tmp_path / "length.png").stat().st_size > 10_000
    # The second seed is told the first one's tokens and measurements, and trains by itself.
    first, second = (tmp_path / "runs" / f"512_yarn_{seed}" for seed in range(2))
    made = [(folder / "data/train/manifest.json").stat().st_mtime_ns for folder in (first, second)]
    assert made[0] == made[1]
    first, second = (json.loads((folder / "report.json").read_text())["measured"] for folder in (first, second))
    assert first["before"] == second["before"] and first["after"] != second["after"]
    # On another machine, which has the committed results only.
    shutil.rmtree(tmp_path / "runs")
    length.main(flags)
    assert len(done) == 4 and (tmp_path / "length.md").read_text() == report
