"""Each benchmark runs once at reduced size, and its page holds the numbers; what they are is never asserted."""

import json
import random
import re
import shlex
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from datasets import Dataset
from encoders import ENCODERS, build_model
from transformers import BertConfig, BertForMaskedLM, pipeline

from neobert_hf import NeoBERTConfig
from tests.helpers.models import ROOT, save_encoder
from tests.helpers.small_tokenizer import word_tokenizer


RESULTS = ROOT / "benchmarks/results"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a benchmark with other constants, and returns what it found and its page."""

    def run_benchmark(name: str, flags: str = "", **constants) -> tuple[dict, str]:
        for constant, value in constants.items():
            monkeypatch.setattr(f"{name}.{constant}", value)
        import_module(name).main(shlex.split(f"{flags} --results {tmp_path}"))
        page = (tmp_path / f"{name}.md").read_text()
        assert f"python benchmarks/{name}.py {flags}" in page
        return json.loads((tmp_path / f"{name}.json").read_text())["found"], page

    return run_benchmark


def write_rows(rows: list[dict], *files: Path) -> None:
    for file in files:
        file.parent.mkdir(exist_ok=True)
        Dataset.from_list(rows).to_parquet(file)


@pytest.mark.slow
def test_scaling_document_holds_the_tables_of_its_command():
    from scaling import tables

    text = (RESULTS / "scaling.md").read_text()
    assert all(table in text for table in tables())


def test_stored_results_make_the_pages_that_are_there(tmp_path):
    """Every page of results and its picture are made of the stored numbers, without measuring."""
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
        import_module(file.stem).main(["--results", str(tmp_path), "--page_only", "true"])
        page = (tmp_path / f"{file.stem}.md").read_text()
        assert page == (RESULTS / f"{file.stem}.md").read_text(), file
        pictures = re.findall(r"\]\((\w+\.png)\)", page)
        assert all((tmp_path / name).stat().st_size > 10_000 and (RESULTS / name).exists() for name in pictures)


def call_recipe(recipe, settings: dict, flags: list[str]) -> None:
    recipe(**settings)


@pytest.mark.slow
def test_pretraining(run, tmp_path, monkeypatch):
    """Every run of it, of two steps; BERT's, too; and pseudo-perplexity of both its stages."""
    from tests.helpers.pretraining_runs import start

    def run_forked(recipe, log, threads=2, **settings) -> None:
        start([], script=partial(call_recipe, recipe, settings)).finish()

    monkeypatch.setattr("pretraining.run_apart", run_forked)
    trial = {"max_steps": 2, "logging_steps": 1, "eval_steps": 2, "use_cpu": True, "hidden_size": 64}
    trial |= {"num_attention_heads": 2}
    documents = [{"text": text} for text in topics.values()]
    write_rows(documents, tmp_path / "train.parquet")
    write_rows(documents[:10], tmp_path / "validation.parquet")
    found, page = run("pretraining", f"--text {tmp_path} --output_dir {tmp_path}/runs", TRIAL=trial, SEEDS=1)
    assert len(found["stages"]) == 2 and len(found["ablations"]) == 7
    assert found["bert"][-1]["eval_loss"] > 0
    assert f"stage 1 ends at {found['stages'][0][-1]['eval_loss']:.3f} nats" in page
    assert "| learned absolute positions |" in page
    bert = BertForMaskedLM.from_pretrained(tmp_path / "runs/bert/model")
    assert bert(torch.arange(5, 20)[None]).logits.isfinite().all()

    flags = f"--source {tmp_path}/train.parquet --models {tmp_path}/runs"
    found, page = run("pseudo_perplexity", flags, DOCUMENTS=3, LENGTHS=(10, 40))
    assert len(found) == 8 and all(len(losses["40"]) == 3 for losses in found.values())
    assert "| long, yarn:2 | " in page


@pytest.mark.slow
def test_the_worth_of_pretraining_is_measured_on_the_same_seeds(run, tmp_path, monkeypatch):
    """From one start and from random weights; the second run repeats nothing."""
    generator, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran"]
    sentences = [generator.choices(words, k=6) for _ in range(80)]
    # The lengths of words determine the labels.
    rows = [{"tokens": row, "tags": ["ABC"[len(word) % 3] for word in row]} for row in sentences]
    write_rows(rows, *(tmp_path / "pos_brown" / f"{part}.parquet" for part in ("train", "validation")))
    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(words), 60, 32))
    monkeypatch.chdir(tmp_path)
    constants = {"EPOCHS": {10: 2, 20: 1}, "DEVELOPMENT": 10, "SEEDS": 2, "MODELS": {"NeoBERT": start, "BERT": start}}
    percent = run("worth", f"--data {tmp_path}", **constants)[0]["percent"]
    stored = (tmp_path / "single_runs/worth.json").read_text()
    assert set(percent) == {"10", "20"} and all(len(seeds) == 2 for seeds in percent["20"].values())
    assert percent["20"]["NeoBERT"] == percent["20"]["BERT"] != percent["20"]["random"]
    _, page = run("worth", f"--data {tmp_path}")
    assert (tmp_path / "single_runs/worth.json").read_text() == stored and "nan" not in page.lower()


@pytest.mark.slow
def test_ways_to_pretrain_are_compared_on_the_same_text(run, tmp_path, monkeypatch):
    """A run, a decay that goes on from a checkpoint, and a mean; what was measured is not measured again."""
    from recipe import RUNS, Variant, decay

    generator, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran"]
    texts = [{"text": text, "source": "python-docs"} for text in topics.values()]
    sentences = [generator.choices(words, k=6) for _ in range(40)]
    tags = [{"tokens": row, "tags": ["ABC"[len(word) % 3] for word in row]} for row in sentences]
    sections = [{"sentence": " ".join(row), "label": len(row[0]) % 3} for row in sentences]
    for folder, rows in (("text", texts), ("pos_brown", tags), ("classification_debian_sections", sections)):
        write_rows(rows, *(tmp_path / folder / f"{part}.parquet" for part in ("train", "validation")))
    pairs = [{"query": text[:20], "positive": text[20:200]} for text in topics.values()]
    write_rows(pairs, tmp_path / "pairs/foldoc.parquet")
    write_rows(
        [{"query": row["query"], "document": row["positive"]} for row in pairs[:9]],
        tmp_path / "retrieval_foldoc_test.parquet",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("worth.DEVELOPMENT", 10)
    monkeypatch.setattr("worth.EPOCHS", {10: 1})
    monkeypatch.setattr("recipe.PARTS", 4)
    constants = {"TAGGED": (10,), "RATES": (1e-3,), "PAIR_STEPS": 1}
    monkeypatch.setitem(RUNS, "mean of 5", Variant(start="stable", averaged=(3, 4)))
    monkeypatch.setitem(RUNS, "linear decay", decay("stable", 2, decay_shape="linear"))
    flags = f"--data {tmp_path} --output_dir {tmp_path}/runs --steps 4"
    run("recipe", f"{flags} --runs cosine stable --tuned stable", **constants)
    found, page = run("recipe", f"{flags} --runs cosine 'linear decay' 'mean of 5' --seeds 2", **constants)
    assert {name: len(seeds) for name, seeds in found["runs"]["4"].items()} == {
        "cosine": 2,
        "stable": 1,
        "linear decay": 2,
        "mean of 5": 2,
    }
    assert len({seeds["0"]["loss"] for seeds in found["runs"]["4"].values()}) == 4
    assert "| its last 20% decay linearly | " in page and "nan" not in page.lower()
    assert 0 < found["tuned"]["4"]["stable"]["FOLDOC"] < 1
    stored = (tmp_path / "single_runs/recipe.json").read_text()
    run("recipe", f"{flags} --runs cosine --tuned stable", **constants)
    assert (tmp_path / "single_runs/recipe.json").read_text() == stored


def test_what_retrieval_asks_for_stands_nowhere_in_the_text_for_training():
    from distil import unread_texts

    places = ["He saw a Red,\ncat!", "Behind it went a blue", "dog, and another red one."]
    texts = ["a red cat", "a blue dog", "red cat behind", "dog and"]
    assert unread_texts(texts, places) == ["a blue dog", "red cat behind"]


@pytest.mark.slow
def test_a_model_that_is_its_own_teacher_keeps_all_of_every_kind(run, tmp_path):
    from kinds_data import Paragraphs, chosen, is_question, sections
    from sentence_transformers import CrossEncoder, SentenceTransformer

    answer = " ".join(["It reads the file again and says so."] * 6)
    html = f"<h2>1. What does it do?</h2><p>{answer}</p><h2>How is it stopped?</h2><p>Press q. {answer}</p><h2>End</h2>"
    asked = sections(Paragraphs(html).found, is_question)
    pairs = chosen(asked)
    assert sorted(query for query, _ in pairs) == ["How is it stopped?", "What does it do?"]
    for name in ("test_questions", "choose_titles"):
        write_rows([{"query": q, "document": d} for q, d in pairs], tmp_path / "kinds" / f"{name}.parquet")
    start = save_encoder(tmp_path / "start", word_tokenizer(answer, 400, 64))
    SentenceTransformer(str(start), device="cpu").save(str(tmp_path / "teacher"))
    teacher = tmp_path / "teacher"
    CrossEncoder(str(start), num_labels=1, device="cpu").save(str(tmp_path / "reranker"))
    flags = f"--data {tmp_path / 'kinds'} --teacher {teacher} --models small={teacher} "
    flags += f"--int8 small --rerankers pairs={tmp_path}/reranker --reranked_queries 1"
    _, page = run("kinds", flags)
    (row,) = re.findall(r"^\| small .*", page.split("\n| its queries")[1], re.MULTILINE)[:1]
    assert row == "| small | 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) |"
    assert "\n| small, int8 | " in page
    reordered = page.split("\n| pairs |")[1]
    assert {"teacher", "small"} < set(re.findall(r"^\| ([^|]*) \| 1\.000, \+0\.000 ", reordered, re.MULTILINE))


def test_a_reranker_orders_the_first_documents_and_leaves_the_others_behind_them():
    from distil import Retrieval
    from kinds import FIRST, reranked

    class SameText:
        def predict(self, pairs):
            return torch.tensor([float(query == document) for query, document in pairs]).numpy()

    texts = [f"text {number}" for number in range(FIRST + 10)]
    test, first_to_last = Retrieval(texts, texts), -torch.arange(FIRST + 10.0).expand(FIRST + 10, -1).numpy()
    found = test.ndcg(reranked(SameText(), test, first_to_last, {}))
    assert found.tolist() == [1.0] * FIRST + [0.0] * 10


def test_a_student_stands_beside_its_teacher_and_baselines(run, tmp_path):
    """On made data, with a teacher of random weights that is its own student."""
    import distil
    from sentence_transformers import SentenceTransformer

    texts = [text for topic in topics.values() for text in topic.split("\n\n") if len(text.split()) > 30][:200]
    pairs = [{"query": " ".join(text.split()[:4]), "positive": text} for text in texts]
    write_rows(pairs, tmp_path / "pairs/wordnet_usage.parquet")
    write_rows([{"text": text} for text in texts[8:]], tmp_path / "text/train.parquet")
    write_rows([{"text": " ".join(texts)}], tmp_path / "text/validation.parquet")
    foldoc = [{"query": pair["query"], "document": pair["positive"]} for pair in pairs[:50]]
    write_rows(foldoc, tmp_path / "retrieval_foldoc_test.parquet")
    news = [{"sentence1": t, "sentence2": u, "score": n % 5 / 5} for n, (t, u) in enumerate(zip(texts, texts[1:20]))]
    write_rows(news, tmp_path / "sts_lee.parquet")
    sections = [{"sentence": text, "label": number % 3} for number, text in enumerate(texts[:30])]
    folder = tmp_path / "classification_debian_sections"
    write_rows(sections, folder / "train.parquet", folder / "validation.parquet")
    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(texts), 400, 64))
    SentenceTransformer(str(start), device="cpu").save(str(tmp_path / "teacher"))
    flags = f"--data {tmp_path} --teacher {tmp_path}/teacher --models student={tmp_path}/teacher"
    found, page = run("distil", flags)
    scores = found["scores"]
    assert list(scores) == ["BM25", "teacher", "static vectors", "student"] and scores["teacher"] == scores["student"]
    assert set(scores["student"]) >= set(distil.COLUMNS)
    assert f"| BM25 | {scores['BM25']['FOLDOC']:.3f} |" in page


@pytest.mark.slow
def test_what_large_corpora_cost(run):
    found, page = run("corpora", DOCUMENTS=300, TEXTS=8, LAYERS=1, ROUNDS=1)
    assert found["embedding"]["tokens"] > 8 and found["embedding"]["embed.py"] > 0
    assert "| RefinedWeb, 600 billion tokens, prepared | " in page


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_their_published_sizes(name):
    """In millions, to 1.2%: published counts are rounded, and those of BERT have the pooler in them."""
    sizes = {"NeoBERT": 222, "BERT-base": 110, "BERT-large": 335, "NomicBERT": 137, "ModernBERT-base": 149}
    backbone = build_model(name, "meta").base_model
    size = sum(weight.numel() for weight in backbone.parameters()) / 1e6
    assert size == pytest.approx((sizes | {"EuroBERT-210m": 210})[name], rel=0.012)


def test_speed_is_compared_with_other_encoders_and_bare_products(run, monkeypatch):
    small = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 48, "pad_token_id": 1}
    for name, (kind, values) in ENCODERS.items():
        monkeypatch.setitem(ENCODERS, name, (kind, values | small))
    sizes = {"TOKENS": 64, "LENGTHS": (16, 32), "SHAPES": ((2, 8),), "LAYERS": 1, "TRAINING_LAYERS": 1, "ROUNDS": 1}
    found, page = run("throughput", **sizes)
    rows = found["rows"]
    assert len(rows) == 4 * len(ENCODERS) and all(row["tokens"] > 0 for row in rows)
    assert f"M | {rows[0]['tokens']:,.0f} |" in page
    assert [(row["what"], row["model"]) for row in found["steps"]] == [
        ("forward pass", "NeoBERT"), ("training step", "NeoBERT"), ("training step", "BERT-base"),
        ("training step", "ModernBERT-base"),
    ]  # fmt: skip
    assert all(row["products"] > 0 and row["step"] > 0 for row in found["steps"])


@pytest.mark.slow
def test_a_search_in_fewer_bytes_and_what_rerankers_compute(run, tmp_path):
    texts = [" ".join(page.split()[:30]) for page in topics.values()][:40]
    write_rows([{"query": text[:30], "document": text} for text in texts], tmp_path / "texts.parquet")
    encoder = save_encoder(tmp_path / "encoder", word_tokenizer(" ".join(texts), 400, 64))
    sizes = {"SHAPES": ((64, 2, 2),), "PAIRS": 4, "LONGEST": 32, "ROUNDS": 1}
    found, page = run("search", f"--model {encoder} --files {tmp_path / 'texts.parquet'}", **sizes)
    assert [row["precision"] for row in found["vectors"]] == ["float32", "int8", "binary", "bits alone"]
    bytes_of = [row["bytes"] for row in found["vectors"][:3]]
    assert bytes_of == [bytes_of[0], bytes_of[0] * 9 / 32, bytes_of[0] / 32]
    *rerankers, counts = found["rerankers"]
    # NeoBERT computes no padding, the others do.
    assert [row["computed"] for row in rerankers] == [pytest.approx(counts["real"]), 1, 1]
    assert f"| NeoBERT | {rerankers[0]['parameters'] / 1e6:.1f}M |" in page


@pytest.mark.slow
def test_engines_are_compared_where_they_agree(run):
    """A small model; OpenVINO takes part where it is installed."""
    from serving_cpu import BY_LENGTH, RAGGED, SHORTEST, by_length, has_openvino, make_batch

    shapes = {SHORTEST: (1, 8, 1), RAGGED: (32, 128, 1), BY_LENGTH: (32, 128, 1)}
    found, page = run("serving_cpu", SHAPES=shapes, LAYERS=1, WIDTH=64)
    found = found["milliseconds"]
    assert list(found) == list(shapes) and all(len(times) >= 5 for times in found.values())
    assert all(("OpenVINO, static int8" in times) == has_openvino() for times in found.values())
    assert f"| PyTorch, prepared | {found[SHORTEST]['PyTorch, prepared']:,.1f} |" in page

    batches, (_, mask) = by_length(make_batch(32, 128, ragged=True)), make_batch(32, 128, ragged=True)
    assert [ids.shape for ids, _ in batches] == [mask.shape for _, mask in batches]
    assert sum(mask.sum() for _, mask in batches) == mask.sum() > 0.7 * sum(mask.numel() for _, mask in batches)


def test_every_way_of_a_gpu_gets_a_row(run, monkeypatch):
    """On a CPU, with a tiny model."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 256}
    monkeypatch.setattr("gpu.ENCODERS", {"NeoBERT": ENCODERS["NeoBERT"]})
    monkeypatch.setitem(ENCODERS, "NeoBERT", (NeoBERTConfig, sizes))
    found, _ = run("gpu", TYPES=("float32",), LENGTHS=(16,), TOKENS=64, SECONDS=0, BACKEND="aot_eager")
    rows = [row for row in found if row[0] != "bare product"]
    steps, layouts = ("forward pass", "training step"), ("dense", "padded", "packed")
    assert [row[:6] for row in rows] == [
        [step, "NeoBERT", "float32", attention, "16", name]
        for step in steps
        for attention in ("sdpa", "sdpa compiled")
        for name in layouts
    ]
    assert all(float(row[6].replace(",", "")) > 0 for row in rows)


def test_the_study_of_the_paper_on_a_gpu(run, monkeypatch):
    """On a CPU, with tiny models: the best batch of each length, beside the paper's Table 10."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 256}
    monkeypatch.setitem(ENCODERS, "NeoBERT", (NeoBERTConfig, sizes))
    monkeypatch.setitem(ENCODERS, "BERT-base", (BertConfig, sizes))
    constants = {"STUDIED": ("NeoBERT", "BERT-base"), "STUDY_LENGTHS": (512, 1024), "ROWS": [1, 2], "LENGTHS": ()}
    found, page = run("gpu", "--steps 2", TYPES=("bfloat16",), **constants)
    rows = [row for row in found if row[0] == "largest throughput"]
    assert [(row[1], row[4]) for row in rows] == [("NeoBERT", "512"), ("NeoBERT", "1,024"), ("BERT-base", "512")]
    for _, _, _, _, _, batch, tokens, *_ in rows:
        assert batch in ("1 rows, 2 steps", "2 rows, 2 steps")
        assert f"{int(tokens.replace(',', '')) / 1000:,.1f} ({batch.split(',')[0]})" in page
    assert "| NeoBERT, paper, A100 | 24.5 | 22.2 |" in page


def test_the_checks_of_a_gpu_end_in_time(tmp_path):
    """What passes, fails, takes too long, and is not reached; and all commands name files that are there."""
    from gpu_checks import Settings, checks, run

    commands = {"good": "pass", "bad": "raise OSError", "long": "import time; time.sleep(600)", "late": "pass"}
    found = run({name: ["-c", code] for name, code in commands.items()}, tmp_path, seconds=3)
    assert found == {"good": "passed", "bad": "failed", "long": "out of time", "late": "not reached"}
    assert "OSError" in (tmp_path / "bad.log").read_text()
    for command in checks(Settings(train_data="data")).values():
        files = [word for word in command if re.match("(benchmarks|tests|examples|configs)/", word)]
        assert files and all((ROOT / file).exists() for file in files)


def test_the_small_model_fills_masks():
    """The model of the results pages, the one in the repository that has learned something."""
    fill = pipeline("fill-mask", str(ROOT / "benchmarks/models/small"), device="cpu")
    texts = {
        "The president of the united [MASK] spoke to congress.": "states",
        "It is a list [MASK] strings.": "of",
    }
    assert [fill(text)[0]["token_str"] for text in texts] == list(texts.values())
