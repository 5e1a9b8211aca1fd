"""benchmarks/shrink.py on a few texts: a size is made in both ways, and the report has them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import shrink
from datasets import Dataset
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.pretraining import preparing
from neobert_hf.pretraining.flops import training_flops
from tests.helpers.models import ROOT, small_model
from tests.helpers.one_by_one import OneByOne, run_here


def test_both_ways_are_in_the_report(corpus, tmp_path, monkeypatch):
    small_model(NeoBERTForMaskedLM, vocab_size=600).save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(corpus / "tokenizer").save_pretrained(tmp_path / "large")
    for name, count in (("train", 60), ("validation", 6)):
        texts = [json.loads(line)["text"] for line in (corpus / f"{name}.jsonl").read_text().splitlines()]
        Dataset.from_list([{"text": text} for text in texts[:count]]).to_parquet(tmp_path / f"{name}.parquet")
    done = []
    monkeypatch.setattr(shrink, "run", run_here(done))
    monkeypatch.setattr(shrink, "ThreadPoolExecutor", OneByOne)
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    monkeypatch.setattr(shrink, "SIZES", {"1/2 layers": (2, 1)})
    monkeypatch.setattr(shrink, "MEASURED_TOKENS", 512)
    flags = ["--text", f"{tmp_path}", "--model", f"{tmp_path}/large", "--seeds", "2", "--steps", "1"]
    flags += ["--output_dir", f"{tmp_path}/runs", "--results", str(tmp_path), "--global_batch_tokens", "256"]
    flags += ["--learning_rates", "1e-3", "1e-1", "--processes", "1"]
    flags += ["--training", "--micro_batch_tokens 256 --bf16 false --warmup_steps 0 --peak_tflops 0.1"]
    shrink.main(flags)
    # Of each way two rates with the first seed, and the better one with the second.
    assert [done.count(f"{name}.py") for name in ("prepare_data", "shrink", "pretrain")] == [2, 3, 3]
    stored = json.loads((tmp_path / "single_runs" / "shrink.json").read_text())
    losses = {name.split("; ", 4)[-1]: run["found"]["loss"] for name, run in stored.items() if "; distilled; " in name}
    first = {name: loss for name, loss in losses.items() if name.endswith("seed 0")}
    assert min(first, key=first.get).replace("seed 0", "seed 1") in losses
    report = (tmp_path / "shrink.md").read_text()
    assert "nan" not in report and all(f"| {name} | " in report for name in ("large", *shrink.SIZES))
    assert (tmp_path / "shrink.png").stat().st_size > 10_000
    before, latencies = len(done), [file.stat().st_mtime_ns for file in tmp_path.glob("runs/latency_*.json")]
    shrink.main(flags)
    assert set(done[before:]) == {"prepare_data.py"} and len(latencies) == 2
    assert latencies == [file.stat().st_mtime_ns for file in tmp_path.glob("runs/latency_*.json")]


def test_both_ways_cost_the_same():
    configs = shrink.sizes_of(NeoBERTConfig.from_pretrained(ROOT / "benchmarks/models/small"))
    assert (configs["1/4 layers"].num_hidden_layers, configs["1/2 MLP"].intermediate_size) == (1, 384)
    settings = shrink.ShrinkBenchmark(text="", steps=1000)
    for small in configs.values():
        steps = shrink.scratch_steps(settings, configs["large"], small)
        large, own = (training_flops(config, 1, 180, 0.2) for config in (configs["large"], small))
        assert steps * own == pytest.approx(1000 * (own + large / 3), rel=0.1) and steps > 1000
