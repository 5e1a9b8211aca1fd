"""benchmarks/domain.py on a few texts: each way is run once, and the report has all of them; the domain's tasks."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import domain
import domain_tasks
from datasets import Dataset

from neobert_hf.pretraining import preparing
from tests.helpers.examples import load_example
from tests.helpers.one_by_one import OneByOne, run_here


def in_markup(number: int, text: str) -> str:
    """A document with a heading, and a sentence in which some words are marked as code."""
    words = text.replace("`", "").replace("*", "").split()
    return f"Part {number}\n======\n\n{text}\n\nThe function ``{words[0]}()`` takes {' '.join(words[1:9])} of it.\n"


def test_every_way_is_in_the_report(corpus, tmp_path, monkeypatch):
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    rows = [
        {"text": in_markup(number, text), "source": "kernel" if number % 5 == 0 else "web"}
        for number, text in enumerate(texts)
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "text.parquet")
    done = []
    for module in (domain, domain_tasks):
        monkeypatch.setattr(module, "run", run_here(done))
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    monkeypatch.setattr(domain, "ThreadPoolExecutor", OneByOne)
    few = "--max_steps 2 --eval_steps 1 --warmup_steps 0 --micro_batch_tokens 64 --global_batch_tokens 64 --bf16 false"
    small = "--max_length 32 --hidden_size 48 --num_hidden_layers 1 --intermediate_size 48 --save_steps 2"
    flags = ["--text", f"{tmp_path}/text.parquet", "--domain", "kernel", "--seeds", "2"]
    flags += ["--output_dir", f"{tmp_path}/runs", "--results", str(tmp_path), "--pretraining", f"{few} {small}"]
    flags += ["--adapting", f"{few} --held_out_documents 2 --general_documents 4", "--processes", "1"]
    flags += ["--retrieval", "--max_steps 1 --per_device_train_batch_size 2 --use_cpu true"]
    # The tokenizer of so little text splits nothing often: no words are added.
    flags += ["--ways", "25% replay", "no replay"]
    flags += ["--tags", "--max_steps 1 --learning_rate 1e-3"]
    domain.main(flags)
    assert done.count("adapt_domain.py") == 4 and done.count("pretrain.py") == 1
    assert done.count("finetune_embeddings.py") == done.count("run_token_classification.py") == 4
    report = (tmp_path / "domain.md").read_text()
    tasks = (domain.RETRIEVAL, domain.TAGS)
    assert all(f"| {name} |" in report for name in ("25% replay", "no replay", *tasks)) and "nan" not in report
    assert (tmp_path / "domain.png").stat().st_size > 10_000
    # On another machine: what is stored is not run again, though nothing else of it is there.
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    before = len(done)
    domain.main(flags)
    assert set(done[before:]) == {"make_pairs.py"} and (tmp_path / "domain.md").read_text() == report
    # A missing score of an adapted model asks for its adaptation.
    stored = json.loads((stored_file := tmp_path / "single_runs" / "domain.json").read_text())
    del stored[next(name for name in stored if name.startswith("score_tasks") and "25% replay; seed 1" in name)]
    stored_file.write_text(json.dumps(stored))
    shutil.rmtree(tmp_path / "runs")
    domain.main(flags)
    assert done.count("adapt_domain.py") == 5 and done.count("pretrain.py") == 2


def test_tags_are_what_the_author_marked_and_the_marks_are_gone():
    text = """Locks
=====

.. note:: A comment has ``code`` that nobody sees, whatever else stands in it.

Call ``spin_lock(x)`` before you read the list, then :c:func:`list_add` the entry. Nothing here is marked by anybody.

    An example that is indented calls ``kfree`` on what was left over.

See the *whole* text of ``struct page`` for the rest of what there is to know.
"""
    (row,) = domain_tasks.tagged_sentences(text)
    words = "Call spin_lock ( x ) before you read the list , then list_add the entry ."
    assert " ".join(row["tokens"]) == words
    marked = {1: "B-CODE", 2: "I-CODE", 3: "I-CODE", 4: "I-CODE", 12: "B-CODE"}
    assert row["tags"] == [marked.get(number, "O") for number in range(len(words.split()))]


def test_test_documents_are_in_no_training_part(tmp_path, monkeypatch):
    """Neither in the text that models are adapted to, nor in pairs and tags to train on."""
    rows = [{"text": in_markup(number, f"word{number} " * 30), "source": "kernel"} for number in range(60)]
    tests = {row["text"] for row in rows if domain_tasks.is_test_document(row["text"])}
    assert 0 < len(tests) < 30
    Dataset.from_list([*rows, {"text": "Of the web.", "source": "web"}]).to_parquet(tmp_path / "text.parquet")
    monkeypatch.setattr(domain_tasks, "run", lambda script, flags, log: load_example("make_pairs").main(flags.split()))
    domain.divide(domain.DomainBenchmark(f"{tmp_path}/text.parquet", domain="kernel"), tmp_path)
    domain_tasks.prepare_tasks(tmp_path / "whole_domain.parquet", tmp_path / "tasks")

    def read(name: str) -> Dataset:
        return Dataset.from_parquet(str(tmp_path / name))

    assert not tests & set(read("domain.parquet")["text"]) and len(read("domain.parquet")) == 60 - len(tests)
    numbers = {number for number, row in enumerate(rows) if row["text"] in tests}
    for name, is_test in (("pairs", False), ("pairs_held_out", True), ("tags_train", False), ("tags_test", True)):
        found = {int(number) for number in re.findall(r"word(\d+)", str(read(f"tasks/{name}.parquet").to_list()))}
        assert found and all((number in numbers) is is_test for number in found)
