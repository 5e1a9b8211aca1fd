"""benchmarks/domain.py on a few texts: each way is run once, and the report has all of them."""

import json
from concurrent.futures import ThreadPoolExecutor

import domain
from datasets import Dataset

from neobert_hf.pretraining import preparing
from tests.helpers.examples import load_example


def test_every_way_is_in_the_report(corpus, tmp_path, monkeypatch):
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    rows = [{"text": text, "source": "kernel" if number % 5 == 0 else "web"} for number, text in enumerate(texts)]
    Dataset.from_list(rows).to_parquet(tmp_path / "text.parquet")
    done = []

    def run(script, flags, log):
        """In this process: every script of its own imports everything anew."""
        done.append(script)
        load_example(script.removesuffix(".py")).main(flags.split())

    monkeypatch.setattr(domain, "run", run)
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    # The tokenizer of so little text splits nothing often.
    monkeypatch.delitem(domain.WAYS, "25% replay, 500 new words")
    few = "--max_steps 2 --eval_steps 1 --warmup_steps 0 --micro_batch_tokens 64 --global_batch_tokens 64 --bf16 false"
    small = "--max_length 32 --hidden_size 48 --num_hidden_layers 1 --intermediate_size 48 --save_steps 2"
    flags = ["--text", f"{tmp_path}/text.parquet", "--domain", "kernel", "--seeds", "2"]
    flags += ["--output_dir", f"{tmp_path}/runs", "--results", str(tmp_path), "--pretraining", f"{few} {small}"]
    flags += ["--adapting", f"{few} --held_out_documents 2 --general_documents 4"]
    domain.main(flags)
    assert done.count("adapt_domain.py") == 6 and done.count("pretrain.py") == 1
    report = (tmp_path / "domain.md").read_text()
    assert all(f"| {way} |" in report for way in domain.WAYS) and "nan" not in report
    assert (tmp_path / "domain.png").stat().st_size > 10_000
    before = len(done)
    domain.main(flags)
    assert len(done) == before
