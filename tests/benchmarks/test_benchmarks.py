"""Each benchmark runs once at reduced size, and its page holds the numbers; what they are is never asserted."""

import json
import random
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from datasets import Dataset
from transformers import BertForMaskedLM, pipeline

from tests.helpers.glue_runs import save_encoder
from tests.helpers.models import ROOT
from tests.helpers.word_tokenizer import word_tokenizer


pytestmark = pytest.mark.usefixtures("forked_scripts")

LABELLED_WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran"]
TRIAL = "--logging_steps 1 --eval_steps 2 --use_cpu true --hidden_size 64 --num_attention_heads 2"


@pytest.mark.slow
def test_scaling_document_holds_the_tables_of_its_command():
    from scaling import tables

    text = (ROOT / "benchmarks/results/scaling.md").read_text()
    assert all(table in text for table in tables())


def test_stored_results_make_the_pages_that_are_there(tmp_path):
    """Every page of results is what its script makes of the stored numbers."""
    from runner import how_made

    results = ROOT / "benchmarks/results"
    for file in results.glob("*.json"):
        stored = json.loads(file.read_text())
        page = [*import_module(file.stem).page(stored, tmp_path), how_made(stored["made"])]
        assert "\n\n".join(page) + "\n" == (results / f"{file.stem}.md").read_text(), file
        pictures = re.findall(r"\]\((\w+\.png)\)", "".join(page))
        assert all((tmp_path / name).stat().st_size > 10_000 and (results / name).exists() for name in pictures)


@pytest.mark.slow
def test_pretraining(tmp_path):
    """Every run of it, of two steps; BERT's, too; and pseudo-perplexity of both its stages."""
    import pretraining
    import pseudo_perplexity

    documents = [{"text": text} for text in topics.values()]
    for name, part in (("train", documents), ("validation", documents[:10])):
        Dataset.from_list(part).to_parquet(tmp_path / f"{name}.parquet")
    flags = f"--text {tmp_path} --results {tmp_path} --output_dir {tmp_path}/runs --seeds 1 --limit"
    pretraining.main([*flags.split(), f"--max_steps 2 {TRIAL}"])
    found = json.loads((tmp_path / "pretraining.json").read_text())["found"]
    assert len(found["stages"]) == 2 and len(found["ablations"]) == 7
    assert all(curve[-1]["eval_loss"] > 0 for curve in found["others"].values())
    text = (tmp_path / "pretraining.md").read_text()
    assert f"| all | {found['stages'][0][-1]['eval_loss']:.3f} |" in text and "| learned absolute positions |" in text
    bert = BertForMaskedLM.from_pretrained(tmp_path / "runs/bert/model")
    assert bert(torch.arange(5, 20)[None]).logits.isfinite().all()

    flags = f"--source {tmp_path}/train.parquet --models {tmp_path}/runs --documents 3 --lengths 10 40"
    pseudo_perplexity.main(f"{flags} --results {tmp_path} --output_dir {tmp_path}/perplexity".split())
    found = json.loads((tmp_path / "pseudo_perplexity.json").read_text())["found"]
    assert len(found) == 8 and all(len(losses["40"]) == 3 for losses in found.values())
    assert "| long, yarn:2 | " in (tmp_path / "pseudo_perplexity.md").read_text()


def save_labelled_rows(folder: Path) -> None:
    """Tags and sections in the form that worth.py reads: 80 rows, whose labels the lengths of words determine."""
    generator = random.Random(0)
    sentences = [generator.choices(LABELLED_WORDS, k=6) for _ in range(80)]
    tags = [{"tokens": words, "tags": ["ABC"[len(word) % 3] for word in words]} for words in sentences]
    sections = [{"sentence": " ".join(words), "label": len(words[0]) % 3} for words in sentences]
    for name, rows in (("pos_brown", tags), ("classification_debian_sections", sections)):
        (folder / name).mkdir()
        for split in ("train", "validation"):
            Dataset.from_list(rows).to_parquet(folder / name / f"{split}.parquet")


@pytest.mark.slow
def test_the_worth_of_pretraining_is_measured_on_the_same_seeds(tmp_path, monkeypatch):
    """Both tasks, from one start and from random weights; the second run repeats nothing."""
    import worth

    monkeypatch.setattr(worth, "ROWS", {"tags": (10, 20), "sections": (10, None)})
    monkeypatch.setattr(worth, "DEVELOPMENT", 10)
    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(LABELLED_WORDS), 60, 32))
    save_labelled_rows(tmp_path)
    flags = f"--data {tmp_path} --starts NeoBERT={start} --output_dir {tmp_path}/runs --results {tmp_path} --seeds 2"
    worth.main(flags.split())
    stored = (tmp_path / "single_runs/worth.json").read_text()
    scores = json.loads((tmp_path / "worth.json").read_text())["found"]["scores"]
    # Of 80 texts 10 are for development.
    assert set(scores["tags"]) == {"10", "20"} and set(scores["sections"]) == {"10", "70"}
    assert all(len(entry["accuracy"]) == 2 for entry in scores["tags"]["20"].values())
    assert scores["tags"]["20"]["NeoBERT"] != scores["tags"]["20"]["random"]
    assert "nan" not in (tmp_path / "worth.md").read_text().lower()
    worth.main(flags.split())
    assert (tmp_path / "single_runs/worth.json").read_text() == stored


def test_what_retrieval_asks_for_stands_nowhere_in_the_text_for_training():
    from embedding_scores import unread_texts

    places = ["He saw a Red,\ncat!", "Behind it went a blue", "dog, and another red one."]
    texts = ["a red cat", "a blue dog", "red cat behind", "dog and"]
    assert unread_texts(texts, places) == ["a blue dog", "red cat behind"]


@pytest.mark.slow
def test_a_student_stands_beside_its_teacher_and_baselines(tmp_path):
    """On made data, with a teacher of random weights that is its own student; the second run scores nothing again."""
    import distil
    from sentence_transformers import SentenceTransformer

    texts = [text for topic in topics.values() for text in topic.split("\n\n") if len(text.split()) > 30][:200]
    pairs = [{"query": " ".join(text.split()[:4]), "positive": text} for text in texts]
    for name in ("pairs", "text", "classification_debian_sections"):
        (tmp_path / name).mkdir()
    Dataset.from_list(pairs).to_parquet(tmp_path / "pairs/wordnet_usage.parquet")
    Dataset.from_dict({"text": texts[8:]}).to_parquet(tmp_path / "text/train.parquet")
    Dataset.from_dict({"text": [" ".join(texts)]}).to_parquet(tmp_path / "text/validation.parquet")
    foldoc = Dataset.from_list(pairs[:50]).rename_column("positive", "document")
    foldoc.to_parquet(tmp_path / "retrieval_foldoc_test.parquet")
    news = [{"sentence1": t, "sentence2": u, "score": n % 5 / 5} for n, (t, u) in enumerate(zip(texts, texts[1:20]))]
    Dataset.from_list(news).to_parquet(tmp_path / "sts_lee.parquet")
    for part in ("train", "validation"):
        rows = [{"sentence": text, "label": number % 3} for number, text in enumerate(texts[:30])]
        Dataset.from_list(rows).to_parquet(tmp_path / f"classification_debian_sections/{part}.parquet")
    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(texts), 400, 64))
    SentenceTransformer(str(start), device="cpu").save(str(tmp_path / "teacher"))
    flags = f"--data {tmp_path} --teacher {tmp_path}/teacher --models student={tmp_path}/teacher --results {tmp_path}"
    distil.main(flags.split())
    scores = json.loads((tmp_path / "distil.json").read_text())["found"]["scores"]
    assert list(scores) == ["BM25", "teacher", "static vectors", "student"] and scores["teacher"] == scores["student"]
    assert set(scores["student"]) >= set(distil.COLUMNS)
    assert f"| BM25 | {scores['BM25']['FOLDOC']:.3f} |" in (tmp_path / "distil.md").read_text()


@pytest.mark.slow
def test_speed_is_compared_with_that_of_bare_products(tmp_path, monkeypatch):
    import forward

    monkeypatch.setattr(forward, "SHAPES", ((2, 8),))
    forward.main(f"--layers 1 --training_layers 1 --rounds 1 --results {tmp_path}".split())
    rows = json.loads((tmp_path / "forward.json").read_text())["found"]
    assert [(row["what"], row["model"]) for row in rows] == [
        ("forward pass", "NeoBERT"), ("training step", "NeoBERT"), ("training step", "BERT-base"),
        ("training step", "ModernBERT-base"),
    ]  # fmt: skip
    assert all(row["share"] == row["products"] / row["step"] > 0 for row in rows)


@pytest.mark.slow
def test_what_large_corpora_cost(tmp_path):
    import corpora

    flags = "--documents 300 --short_documents 2000 --texts 8 --layers 1 --repeats 1"
    corpora.main(f"{flags} --results {tmp_path}".split())
    found = json.loads((tmp_path / "corpora.json").read_text())["found"]
    assert found["memory"].keys() == {"preparing", "indexing"}
    assert found["embedding"]["tokens"] > 8 and found["embedding"]["embed.py"] > 0
    assert "| RefinedWeb, 600 billion tokens, prepared | " in (tmp_path / "corpora.md").read_text()


def test_encoders_read_full_and_ragged_batches(tmp_path, monkeypatch):
    import throughput

    small = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 48, "pad_token_id": 1}
    for name, (kind, values) in throughput.ENCODERS.items():
        monkeypatch.setitem(throughput.ENCODERS, name, (kind, values | small))
    monkeypatch.setattr(throughput, "TOKENS", 64)
    monkeypatch.setattr(throughput, "LENGTHS", (16, 32))
    throughput.main(f"--rounds 1 --results {tmp_path}".split())
    rows = json.loads((tmp_path / "throughput.json").read_text())["found"]["rows"]
    assert len(rows) == 4 * len(throughput.ENCODERS) and all(row["tokens"] > 0 for row in rows)
    assert f"{rows[0]['tokens']:,.0f} (" in (tmp_path / "throughput.md").read_text()


@pytest.mark.slow
def test_engines_are_compared_where_they_agree(tmp_path, monkeypatch):
    """A small model; OpenVINO takes part where it is installed."""
    import serving_cpu

    monkeypatch.setattr(serving_cpu, "SHAPES", {"1 x 8": (1, 8, 1), serving_cpu.RAGGED: (32, 128, 1)})
    flags = f"--layers 1 --width 64 --output_dir {tmp_path} --results {tmp_path}"
    serving_cpu.main(flags.split())
    found = json.loads((tmp_path / "serving_cpu.json").read_text())["found"]["milliseconds"]
    assert list(found) == ["1 x 8", "32 x 128, ragged"] and all(len(times) >= 5 for times in found.values())
    assert all(("OpenVINO" in times) == bool(find_spec("openvino")) for times in found.values())
    line = f"| PyTorch, prepared | {found['1 x 8']['PyTorch, prepared']:,.1f} |"
    assert line in (tmp_path / "serving_cpu.md").read_text()


def test_every_way_of_a_gpu_gets_a_row(tmp_path):
    """On a CPU, with a tiny model."""
    from gpu import main

    sizes = "--layers 1 --width 64 --tokens 64 --lengths 16 --seconds 0 --types float32".split()
    main([*sizes, "--results", str(tmp_path)])
    rows = [row for row in json.loads((tmp_path / "gpu.json").read_text())["found"] if row[0] != "bare product"]
    steps, layouts = ("forward pass", "training step"), ("dense", "padded", "packed")
    assert [row[:5] for row in rows] == [[step, "float32", "sdpa", "16", name] for step in steps for name in layouts]
    assert all(float(row[5].replace(",", "")) > 0 for row in rows)


def test_the_small_model_fills_masks():
    """The model of the results pages, the one in the repository that has learned something."""
    fill = pipeline("fill-mask", str(ROOT / "benchmarks/models/small"), device="cpu")
    texts = {
        "The president of the united [MASK] spoke to congress.": "states",
        "The table has two [MASK] and a primary key.": "columns",
    }
    assert [fill(text)[0]["token_str"] for text in texts] == list(texts.values())
