"""The benchmark runs from its command line; what it measures is never asserted."""

import json
import random
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from tests.helpers.glue_runs import save_encoder
from tests.helpers.models import ROOT
from tests.helpers.word_tokenizer import word_tokenizer


def test_scaling_document_holds_the_tables_of_its_command():
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
def test_small_models_are_compared_at_equal_compute(tmp_path, monkeypatch):
    """Every run of both rounds with one size and vocabulary, of two steps."""
    import scaling_small

    monkeypatch.setattr(scaling_small, "SIZES", {"4 x 192": scaling_small.SIZES["4 x 192"]})
    monkeypatch.setattr(scaling_small, "VOCABULARIES", (8192,))
    documents = [{"text": text} for text in topics.values()]
    for name, part in (("train", documents), ("validation", documents[:10])):
        Dataset.from_list(part).to_parquet(tmp_path / f"{name}.parquet")
    limit = "--max_steps 2 --logging_steps 1 --eval_steps 1 --save_steps 2 --warmup_steps 0 --bf16 false"
    flags = ["--text", str(tmp_path), "--results", str(tmp_path), "--output_dir", str(tmp_path / "runs")]
    scaling_small.main([*flags, "--limit", limit])
    curves = json.loads((tmp_path / "scaling_small.json").read_text())
    assert len(curves) == 2 + 2 + 1 + 1 + 1 and all(len(curve) == 2 for curve in curves.values())
    text = (tmp_path / "scaling_small.md").read_text()
    assert text.count("| 1.0e+14 |") == 1 and (tmp_path / "scaling_small.png").stat().st_size > 10_000
    # Word vectors from the same text: words that stand in the same places are more alike than others.
    from static_vectors import main

    main(f"--train_data {tmp_path}/runs/data/8192/train --output_dir {tmp_path}/vectors --dimensions 32".split())
    encoder = SentenceTransformer(str(tmp_path / "vectors"))
    statement, expression, underscore = encoder.encode(["statement", "expression", "__len__"], convert_to_tensor=True)
    similarity = torch.nn.functional.cosine_similarity
    assert similarity(statement, expression, 0) > similarity(statement, underscore, 0)


@pytest.mark.slow
def test_the_worth_of_pretraining_is_measured_on_the_same_seeds(tmp_path):
    """Both tasks, from one start and from random weights; the second run repeats nothing."""
    from worth import main

    words = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran"]
    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(words), 60, 32))
    generator = random.Random(0)
    sentences = [generator.choices(words, k=6) for _ in range(80)]
    for name in ("train", "validation"):
        tags = [{"tokens": words, "tags": ["ABC"[len(word) % 3] for word in words]} for words in sentences]
        sections = [{"sentence": " ".join(words), "label": len(words[0]) % 3} for words in sentences]
        for folder, rows in (("pos_brown", tags), ("classification_debian_sections", sections)):
            (tmp_path / folder).mkdir(exist_ok=True)
            Dataset.from_list(rows).to_parquet(tmp_path / folder / f"{name}.parquet")
    flags = f"--data {tmp_path} --starts tiny={start} --output_dir {tmp_path}/runs --results {tmp_path} --rows 10 20"
    flags += " --learning_rates 1e-3 3e-3 --seeds 2 --development 10 --test 20"
    main(flags.split())
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*.json")}
    assert len(files) == 2 * 2 * 2 * (2 * 2 + 2)
    scores = json.loads((tmp_path / "worth.json").read_text())["scores"]
    assert all(len(entry["fine-tuned"]) == 2 for entry in scores["tags"]["20"].values())
    assert scores["tags"]["20"]["tiny"] != scores["tags"]["20"]["random"]
    report = (tmp_path / "worth.md").read_text()
    assert "tiny - random, probe" in report and "NaN" not in report
    main(flags.split())
    assert files == {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*.json")}


@pytest.mark.slow
def test_embeddings_benchmark(tmp_path):
    """Every run of it, of two steps, on made data."""
    data = tmp_path / "data"
    for folder in ("text", "pairs", "classification_debian_sections"):
        (data / folder).mkdir(parents=True)
    texts = [text for topic in topics.values() for text in topic.split("\n\n") if len(text.split()) > 30][:400]
    rows = [{"query": " ".join(t.split()[:4]), "positive": t, "negative": u} for t, u in zip(texts, texts[1:])]
    for name, part in (("train", topics.values()), ("validation", list(topics.values())[:10])):
        Dataset.from_list([{"text": text} for text in part]).to_parquet(data / "text" / f"{name}.parquet")
        sections = [{"sentence": text[:60], "label": number % 3} for number, text in enumerate(texts[:60])]
        Dataset.from_list(sections).to_parquet(data / "classification_debian_sections" / f"{name}.parquet")
    for name in ("wordnet", "wordnet_usage", "foldoc"):
        Dataset.from_list(rows).to_parquet(data / "pairs" / f"{name}.parquet")
    test = [{"query": row["query"], "document": row["positive"]} for row in rows[:50]]
    Dataset.from_list(test).to_parquet(data / "retrieval_foldoc_test.parquet")
    pairs = [{"sentence1": t, "sentence2": u, "score": n % 5 / 5} for n, (t, u) in enumerate(zip(texts, texts[1:]))]
    Dataset.from_list(pairs[:20]).to_parquet(data / "sts_lee.parquet")
    pretraining = "--max_steps 2 --logging_steps 1 --hidden_size 64 --num_attention_heads 2"
    limit = "--max_steps 2 --logging_steps 1 --per_device_train_batch_size 4 --use_cpu true"
    flags = {"data": data, "output_dir": tmp_path / "runs", "pretraining_dir": tmp_path / "first", "results": tmp_path}
    flags |= {"pretraining_limit": pretraining, "bf16": "true", "limit": limit}
    command = [sys.executable, "benchmarks/embeddings.py", *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, cwd=ROOT, check=True)
    scores = json.loads((tmp_path / "embeddings.json").read_text())["scores"]
    assert len(scores) == 7 and scores["BM25"]["ndcg_at_10"] > 0.5
    assert all(-1 < one["spearman"] < 1 for name, one in scores.items() if name != "BM25")
    assert "BERT of the same size" in (tmp_path / "embeddings.md").read_text()
    assert (tmp_path / "embeddings.png").stat().st_size > 10_000

    # Interrupted between the last checkpoint of BERT and its model; and a test set of constant scores.
    bert = tmp_path / "runs" / "bert"
    weights = load_file(bert / "model" / "model.safetensors")
    (bert / "log.json").unlink()
    for file in (bert / "model" / "model.safetensors", *tmp_path.rglob("scores.json")):
        file.unlink()
    Dataset.from_list([pair | {"score": 0.0} for pair in pairs[:20]]).to_parquet(data / "sts_lee.parquet")
    subprocess.run(command, cwd=ROOT, check=True)
    again = load_file(bert / "model" / "model.safetensors")
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    scores = json.loads((tmp_path / "embeddings.json").read_text())["scores"]
    assert all(one["spearman"] is None for name, one in scores.items() if name != "BM25")
    assert "with a constant no correlation is defined" in (tmp_path / "embeddings.md").read_text()


@pytest.mark.slow
def test_forward_benchmark(tmp_path):
    flags = ["--layers", "1", "--repeats", "1", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/forward.py", *flags], cwd=ROOT, check=True)
    results = json.loads(next(tmp_path.glob("forward_*.json")).read_text())
    assert {"Full batches", "Ragged batches", "Training step"} < set(results)
    text = next(tmp_path.glob("forward_*.md")).read_text()
    assert "--layers 1" in text and text.count("## ") == 3
    for row in results["Full batches"]:
        low, middle, high = map(float, row["share_by_process"].split(", "))
        assert low <= middle <= high and middle == round(row["share_of_bound"], 3)
    even = subprocess.run([sys.executable, "benchmarks/forward.py", "--processes", "2"], cwd=ROOT, capture_output=True)
    assert even.returncode and b"it must be odd" in even.stderr
