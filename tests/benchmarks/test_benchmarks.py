"""The benchmark runs from its command line; what it measures is never asserted."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import save_encoder
from tests.helpers.models import ROOT, SHARED
from tests.helpers.word_tokenizer import word_tokenizer


pytestmark = pytest.mark.usefixtures("forked_scripts")


SHARED_TEXT = SHARED / "data" / "text" / "train.parquet"
LABELLED_WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran"]


def test_scaling_document_holds_the_tables_of_its_command():
    from scaling import tables

    text = (ROOT / "docs" / "scaling.md").read_text()
    for table in tables():
        assert "\n".join(table) in text


@pytest.mark.slow
def test_pretraining_benchmark(tmp_path):
    """Every run of it, of two steps."""
    import pretraining

    documents = [{"text": text} for text in topics.values()]
    for name, part in (("train", documents), ("validation", documents[:10])):
        Dataset.from_list(part).to_parquet(tmp_path / f"{name}.parquet")
    limit = "--max_steps 2 --logging_steps 1 --eval_steps 2 --use_cpu true --hidden_size 64 --num_attention_heads 2"
    flags = f"--text {tmp_path} --results {tmp_path} --output_dir {tmp_path}/runs --seeds 1 --limit"
    pretraining.main([*flags.split(), limit])
    results = json.loads((tmp_path / "pretraining.json").read_text())
    assert len(results["stages"]) == 2 and len(results["ablations"]) == 7
    text = (tmp_path / "pretraining.md").read_text()
    assert "learned absolute positions" in text and "stage 2 at 1,024" in text
    assert text.startswith("# A small NeoBERT on a CPU\n\n![losses](pretraining.png)\n")
    assert (tmp_path / "pretraining.png").stat().st_size > 10_000


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


def test_words_get_vectors(prepared, tmp_path):
    from static_vectors import main

    main(f"--train_data {prepared}/train --output_dir {tmp_path}/vectors --dimensions 32".split())
    encoder = SentenceTransformer(str(tmp_path / "vectors"))
    vectors = encoder.encode(["statement", "expression"])
    assert vectors.shape == (2, 32) and np.isfinite(vectors).all() and (vectors[0] != vectors[1]).any()


def test_the_commonest_label_by_hand():
    """Of a word that has several tags the commonest one; of a new word what most words are; of texts one for all."""
    from worth import Task, commonest_label

    train = Dataset.from_list([{"text": ["a", "b"], "labels": [0, 1]}] * 2 + [{"text": ["a", "c"], "labels": [1, 1]}])
    test = Dataset.from_list([{"text": ["a", "b", "new", "c"], "labels": [0, 0, 1, 1]}])
    assert commonest_label(Task("t", "t", train, train, test, ["x", "y"], True), 3, seed=0) == 0.75
    texts = [Dataset.from_list([{"text": "a", "labels": label} for label in labels]) for labels in ("001", "0111")]
    assert commonest_label(Task("t", "t", texts[0], texts[0], texts[1], ["x", "y"], False), 3, seed=0) == 0.25


@pytest.mark.slow
def test_the_worth_of_pretraining_is_measured_on_the_same_seeds(tmp_path):
    """Both tasks, from one start and from random weights; the second run repeats nothing."""
    from worth import main

    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(LABELLED_WORDS), 60, 32))
    save_labelled_rows(tmp_path)
    flags = f"--data {tmp_path} --starts tiny={start} --output_dir {tmp_path}/runs --results {tmp_path} --rows 10 20"
    flags += " --learning_rates 1e-3 3e-3 --seeds 2 --search_seeds 1 --development 10 --test 20 --rows_of_sections 999"
    main(flags.split())
    stored = (tmp_path / "single_runs/worth.json").read_text()
    # Of each start 2 rates for words, and 2 with each head for texts, and the best of them; the second seed needs the
    # best only; 2 probes. Words alone have 2 seeds, and one where all rows are taken.
    of_words, of_texts = 2 + 1 + 1 + 2, 4 + 1 + 1 + 2
    assert len(json.loads(stored)) == 2 * (2 * (of_words + of_texts) + 2 * 2) + 2 * of_texts + 1
    scores = json.loads((tmp_path / "worth.json").read_text())["scores"]
    # Of 80 texts 10 are for development.
    assert set(scores["tags"]) == {"10", "20"} and set(scores["sections"]) == {"10", "20", "70"}
    assert all(len(entry["fine-tuned"]) == 2 for entry in scores["tags"]["20"].values())
    assert scores["tags"]["20"]["tiny"] != scores["tags"]["20"]["random"]
    # A word has one tag here.
    assert scores["tags"]["20"]["commonest label"] == {"fine-tuned": [1.0, 1.0]}
    report = (tmp_path / "worth.md").read_text()
    gains = [
        100 * (scores[task]["20"]["tiny"]["probe"][seed] - scores[task]["20"]["random"]["probe"][seed])
        for task in scores
        for seed in range(2)
    ]
    assert f"| mean of the tasks | 20 | tiny - random, probe | {sum(gains) / 4:+.1f} " in report
    assert "tiny - random, probe" in report and "tiny - words alone, fine-tuned" in report and "NaN" not in report
    growth = report.split("Does the gain grow as labels become fewer?")[1]
    assert "mean of the tasks | 70" not in report and "| mean of the tasks | tiny - random" in growth
    main(flags.split())
    assert (tmp_path / "single_runs/worth.json").read_text() == stored
    # Tested on other rows, they would be other runs.
    assert all("10 + 20 rows" in name for name in json.loads(stored))


def test_what_fewer_labels_add_to_a_gain_is_taken_seed_by_seed():
    from worth import COUNTS, RANDOM, growth_table

    def entries(start: list[float], random: list[float]) -> dict:
        scores = {"NeoBERT": start, RANDOM: random, COUNTS: random}
        return {name: {"fine-tuned": found, "probe": found} for name, found in scores.items()}

    # Gains of 30, 40 and 50 points with 100 rows, of 10, 22 and 28 with 300.
    by_rows = {
        "300": entries([0.60, 0.72, 0.68], [0.50, 0.50, 0.40]),
        "100": entries([0.50, 0.70, 0.60], [0.20, 0.30, 0.10]),
    }
    table = growth_table({"words": by_rows}, ["NeoBERT"])
    # Mean of 20, 18 and 22; Student's t of two degrees of freedom is 4.303.
    assert "| words | NeoBERT - random, fine-tuned | +20.0 (+15.0 to +25.0) | yes |" in table
    by_rows["100"], by_rows["300"] = by_rows["300"], by_rows["100"]
    assert "| words | NeoBERT - random, probe | -20.0 (-25.0 to -15.0) | no |" in growth_table(
        {"words": by_rows}, ["NeoBERT"]
    )


def test_rates_are_not_chosen_among_runs_that_do_not_tell_which_is_better(monkeypatch):
    """Runs that were stored with their test accuracy alone: said before anything is trained."""
    import worth
    from stored_runs import StoredRuns

    monkeypatch.setattr(worth, "fine_tune", None)
    folder = ROOT / "benchmarks"
    settings = worth.WorthArguments("unused", [], learning_rates=[2e-3, 1e-3])
    benchmark = worth.Benchmark(settings, StoredRuns(folder / "results/single_runs/worth.json"))
    task = worth.Task("tags", "words right", None, None, None, labels=[], of_words=True)
    with pytest.raises(ValueError, match="The run 'weights of .*; 0.001; seed 0; .* without its accuracy on develop"):
        benchmark.run_start("NeoBERT", folder / "models/small", task, 100)


@pytest.mark.slow
def test_bert_is_pretrained_as_neobert_was(tmp_path, monkeypatch):
    """Interrupted between its last checkpoint and its model, it goes on from there."""
    from bert_baseline import BertOfLabels, ModelArguments, bert_config, main

    start = save_encoder(tmp_path / "start", word_tokenizer(" ".join(topics.values()), 300, 32))
    data = tmp_path / "data"
    Dataset.from_list([{"text": text} for text in topics.values()]).to_parquet(tmp_path / "text.parquet")
    source = f"--source {tmp_path}/text.parquet --tokenizer {start} --max_length 32 --held_out_share 0.2"
    for part in ("train", "held_out"):
        load_example("prepare_data").main([*source.split(), "--part", part, "--output_dir", f"{data}/{part}"])
    flags = f"--neobert {start} --config configs/pretrain/small.yaml --train_data {data}/train"
    flags += f" --validation_data {data}/held_out"
    flags += " --max_steps 4 --eval_steps 2 --save_steps 2 --logging_steps 1 --report_to none --use_cpu true"
    flags += f" --max_length 32 --micro_batch_tokens 64 --global_batch_tokens 64 --output_dir {tmp_path}/bert"
    monkeypatch.chdir(ROOT)
    main(flags.split())
    weights = load_file(tmp_path / "bert/model/model.safetensors")
    log = json.loads((tmp_path / "bert/log.json").read_text())
    assert sum("eval_loss" in entry for entry in log) >= 2
    (tmp_path / "bert/log.json").unlink()
    (tmp_path / "bert/model/model.safetensors").unlink()
    main(flags.split())
    again = load_file(tmp_path / "bert/model/model.safetensors")
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    # Packed documents do not see each other: each alone has the same loss.
    model = BertOfLabels(bert_config(start, ModelArguments(), 0)).eval()
    ids, labels = torch.randint(5, 60, (1, 9)), torch.full((1, 9), 7)
    whole = model(ids, labels, torch.tensor([0, 4, 9]), num_items_in_batch=9).loss
    first = model(ids[:, :4], labels[:, :4], torch.tensor([0, 4]), num_items_in_batch=9).loss
    second = model(ids[:, 4:], labels[:, 4:], torch.tensor([0, 5]), num_items_in_batch=9).loss
    assert torch.allclose(whole, first + second, atol=1e-5)


def made_pairs(folder: Path) -> tuple[Path, Path, list[dict]]:
    """Pairs, test sets and text pairs; an encoder for them; and the rows of each set of pairs."""
    data = folder / "data"
    (data / "pairs").mkdir(parents=True)
    texts = [text for topic in topics.values() for text in topic.split("\n\n") if len(text.split()) > 30][:200]
    rows = [{"query": " ".join(t.split()[:4]), "positive": t, "negative": u} for t, u in zip(texts, texts[1:])]
    for name in ("wordnet", "wordnet_usage", "foldoc"):
        Dataset.from_list(rows).to_parquet(data / "pairs" / f"{name}.parquet")
    (data / "text").mkdir()
    Dataset.from_dict({"text": texts[8:]}).to_parquet(data / "text/train.parquet")
    Dataset.from_list(rows).to_parquet(folder / "text_pairs.parquet")
    test = [{"query": row["query"], "document": row["positive"]} for row in rows[:50]]
    Dataset.from_list(test).to_parquet(data / "retrieval_foldoc_test.parquet")
    pairs = [{"sentence1": t, "sentence2": u, "score": n % 5 / 5} for n, (t, u) in enumerate(zip(texts, texts[1:]))]
    Dataset.from_list(pairs[:20]).to_parquet(data / "sts_lee.parquet")
    start = save_encoder(folder / "start", word_tokenizer(" ".join(texts), 300, 64))
    return data, start, rows


def test_a_text_is_read_where_its_words_stand_in_a_row():
    from embedding_scores import unread_texts

    places = ["Put it on, (slowly) and", "then sit.", "A cat, a mat; a cat sat."]
    read = ["on slowly", "A CAT SAT!", "then", "a mat"]
    unread = ["and then", "sit on", "a cat a cat", "a dog"]
    assert unread_texts([*read, *unread], places) == unread


def test_what_was_read_is_asked_for_by_nothing(tmp_path):
    from embedding_scores import split_pairs

    data, _, rows = made_pairs(tmp_path)
    tests = split_pairs(data, tmp_path / "split", 10)
    unread = {row["positive"] for row in rows[:8]}
    asked = []
    for retrieval in (tests.development["WordNet"], tests.test["WordNet"]):
        assert len(retrieval.documents) == 10
        found = list(zip(retrieval.queries, retrieval.documents))
        assert set(found) <= {(row["query"], row["positive"]) for row in rows}
        asked += [definition for _, definition in found]
    assert set(asked) == unread and len(asked) == 8
    # What is scored on is not trained on, under another term neither.
    for name, retrievals in (("wordnet_usage", "WordNet"), ("wordnet", "WordNet"), ("foldoc", "FOLDOC")):
        left = set(Dataset.from_parquet(str(tmp_path / f"split/{name}.parquet"))["positive"])
        held = {text for part in (tests.development, tests.test) for text in part[retrievals].documents}
        assert held and left and not held & left, name


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_TEXT.exists(), reason="needs ../shared/data")
def test_what_retrieval_asks_for_stands_nowhere_in_the_text_for_pretraining(tmp_path):
    from embedding_scores import split_pairs

    tests = split_pairs(SHARED_TEXT.parent.parent, tmp_path)
    texts = Dataset.from_parquet(str(SHARED_TEXT))["text"]
    text = " ".join(word for text in texts for word in re.findall(r"\w+", text.lower()))
    for retrieval in (tests.development["WordNet"], tests.test["WordNet"]):
        for definition in retrieval.documents[: len(retrieval.queries) : 10]:
            words = " ".join(re.findall(r"\w+", definition.lower()))
            assert f" {words} " not in text, definition


@pytest.mark.slow
def test_embeddings_benchmark(tmp_path):
    """Every training of it, of two steps, on made data; the second run repeats nothing."""
    from embeddings import main

    data, start, rows = made_pairs(tmp_path)
    limit = "--max_steps 2 --logging_steps 1 --per_device_train_batch_size 4 --use_cpu true"
    flags = f"--data {data} --starts tiny={start} --text_pairs {tmp_path}/text_pairs.parquet --results {tmp_path}"
    flags += f" --output_dir {tmp_path}/runs --learning_rates 1e-3 --seeds 2 --test_rows 10 --limit"
    main([*flags.split(), limit])
    results = json.loads((tmp_path / "embeddings.json").read_text())["results"]
    assert results["BM25"]["as it is"]["scores"][0]["test FOLDOC"] > 0.5
    tuned = results["tiny"]["fine-tuned on pairs"]["scores"]
    assert len(tuned) == 2 and tuned[0] != tuned[1] != results["random"]["fine-tuned on pairs"]["scores"][1]
    # What is tested on is not trained on.
    held = set(Dataset.from_parquet(str(tmp_path / "runs/data/wordnet.parquet"))["positive"])
    assert len(held) == len({row["positive"] for row in rows}) - 2 * 10
    report = (tmp_path / "embeddings.md").read_text()
    for way in ("contrastive stage alone", "fine-tuned on pairs", "contrastive stage, then pairs"):
        assert f"tiny, {way}, against random" in report
    assert "nan" not in report
    assert (tmp_path / "embeddings.png").stat().st_size > 10_000
    # What the results hold is not trained again, on a machine that has nothing else neither.
    shutil.rmtree(tmp_path / "runs")
    main([*flags.split(), limit])
    assert not list((tmp_path / "runs").rglob("log.json"))
    assert json.loads((tmp_path / "embeddings.json").read_text())["results"] == results


def test_documents_are_scored_with_the_prompt_that_they_were_trained_with(tmp_path):
    from embedding_scores import Retrieval, dense_scores, load_model

    texts = ["the cat sat", "dogs ran on a mat", "a cat ran"]
    encoder = load_model(save_encoder(tmp_path / "start", word_tokenizer(" ".join(texts), 60, 32)))
    encoder.prompts |= {"animals": "the mat ", "animals-document": "dogs sat on "}
    queries, documents = ([prompt + text for text in texts] for prompt in ("the mat ", "dogs sat on "))
    expected = encoder.similarity(encoder.encode(queries), encoder.encode(documents)).numpy()
    assert np.allclose(dense_scores(encoder, Retrieval(texts, texts, "animals")), expected, atol=1e-6)
    assert not np.allclose(dense_scores(encoder, Retrieval(texts, texts, "others")), expected, atol=1e-3)


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


def test_a_training_step_is_compared_with_its_products(tmp_path):
    import training_step

    flags = f"--layers 1 --lengths 8 --repeats 1 --processes 2 --output {tmp_path} --models".split()
    training_step.main([*flags, *training_step.NAMES, "NeoBERT, compiled"])
    rows = json.loads((tmp_path / "training_step.json").read_text())["rows"]
    assert [row["model"] for row in rows] == [*training_step.NAMES, "NeoBERT, compiled"]
    assert all(row["share_of_products"] > 0 for row in rows)
    assert "| 8 x 8 | NeoBERT |" in (tmp_path / "training_step.md").read_text()
    # Every linear layer is counted: three products of each block's four and of the decoder.
    model = training_step.build_model(training_step.build_config("NeoBERT", num_hidden_layers=1), "sdpa", "cpu", None)
    used = training_step.linear_products(model, training_step.training_step(model, 8, 8))
    labelled = used[-1][1]
    assert [rows for _, rows in used] == [64] * 4 + [labelled] and 0 < labelled < 32


@pytest.mark.slow
def test_quality_stands_beside_speed_and_size(tmp_path, shared):
    """Models that have been trained for three steps, of one layer of the pretrained one."""
    from serving_quality import main

    start = NeoBERTForMaskedLM.from_pretrained(ROOT / "benchmarks/models/small", dtype=torch.float32)
    del start.model.transformer_encoder[1:]
    start.config.num_hidden_layers = 1
    start.save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(ROOT / "benchmarks/models/small").save_pretrained(tmp_path / "start")
    # What models were pretrained on is searched for every definition: a minute for all of it.
    (tmp_path / "data/text").mkdir(parents=True)
    for path in (shared / "data").iterdir():
        if path.name != "text":
            (tmp_path / "data" / path.name).symlink_to(path)
    places = Dataset.from_parquet(str(shared / "data/text/train.parquet")).select(range(100))
    places.to_parquet(tmp_path / "data/text/train.parquet")
    flags = f"--data {tmp_path}/data --start {tmp_path}/start --seeds 1 --test_rows 40"
    flags += f" --output_dir {tmp_path}/runs --results {tmp_path}"
    few = "--max_steps 3 --per_device_train_batch_size 8"
    main([*flags.split(), "--pairs", f"--only foldoc {few}", "--sections", few])
    quality = json.loads((tmp_path / "serving_quality.json").read_text())
    exact, onnx, int8 = (quality["scores"][name][0] for name in ("PyTorch", "ONNX Runtime", "PyTorch, int8"))
    # Every engine was asked, and int8 is another one.
    assert onnx == pytest.approx(exact, abs=1e-3) and exact != int8 == pytest.approx(exact, abs=0.1)
    # With one scale for all texts it loses more, if not all.
    (calibrated,) = quality["scores"]["ONNX Runtime, int8, calibrated"]
    assert calibrated not in (exact, quality["scores"]["ONNX Runtime, int8"][0])
    assert calibrated["accuracy"] == pytest.approx(exact["accuracy"], abs=0.3)
    if find_spec("openvino"):
        exact_too, int8_too = (quality["scores"][name][0] for name in ("OpenVINO", "OpenVINO, int8, calibrated"))
        assert exact_too == pytest.approx(exact, abs=1e-3) and exact != int8_too == pytest.approx(exact, abs=0.3)
    from serving_cpu import quality_table

    table = quality_table({"1 x 8": {"PyTorch": 1.25}}, {"PyTorch": 12.3}, quality)
    assert table[2].startswith(f"| PyTorch | 12 | 1.2 | {exact['test FOLDOC']:.3f} |")


def test_times_of_another_machine_stay_on_the_page(tmp_path):
    """They are data, which the next run of the benchmark puts behind its own times again."""
    from serving_cpu import ServingArguments, other_machines, report

    stored = ROOT / "benchmarks" / "results"
    title, note, table = sections = other_machines(stored)
    assert title == "## On a CPU with AMX" and "| 8 x 128 | 1,545.8 | 1,522.8 |" in table
    assert (stored / "serving_cpu.md").read_text().endswith("\n\n".join(["", *sections]) + "\n")
    shutil.copy(stored / "serving_cpu_amx.json", tmp_path)
    settings = ServingArguments(results=str(tmp_path))
    page = report(settings, {"1 x 8": {"PyTorch": 1.25}}, {"1 x 8": "today"}, None, tmp_path)
    assert "| 1 x 8 | 1.2 |" in page and page.endswith("\n\n".join(["", *sections]) + "\n")


@pytest.mark.slow
def test_engines_are_compared_where_they_agree(tmp_path):
    """A small model, in one thread; OpenVINO takes part where it is installed."""
    command = [sys.executable, "benchmarks/serving_cpu.py", "--output_dir", str(tmp_path), "--results", str(tmp_path)]
    command += ["--layers", "1", "--width", "64", "--shapes"]
    # What a call does not ask for stays.
    for shape in ("32 x 128, ragged", "1 x 8"):
        subprocess.run([*command, shape], cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = json.loads((tmp_path / "serving_cpu.json").read_text())["milliseconds"]
    assert list(found) == ["1 x 8", "32 x 128, ragged"] and all(len(times) >= 5 for times in found.values())
    assert all(("OpenVINO, int8, calibrated" in times) == bool(find_spec("openvino")) for times in found.values())
    text = (tmp_path / "serving_cpu.md").read_text()
    assert f"| {found['1 x 8']['PyTorch, prepared']:,.1f} |" in text and "size and quality" not in text
    assert (tmp_path / "serving_cpu.png").stat().st_size > 10_000
    from serving_cpu import check, weight_megabytes

    sizes = weight_megabytes(tmp_path / "1_64")
    assert sizes["PyTorch, int8"] < sizes["PyTorch, prepared"] and sizes["ONNX Runtime, int8"] < sizes["PyTorch"]
    # One that computes something else is not timed.
    states = np.random.default_rng(0).normal(size=(1, 2, 8)).astype(np.float32)
    mask = torch.tensor([[1, 0]])
    check("ONNX Runtime", states + [[[0.0], [5.0]]], states, mask)
    for name in ("ONNX Runtime", "ONNX Runtime, int8", "PyTorch, prepared"):
        with pytest.raises(ValueError, match=f"{name} computes something else"):
            check(name, states[..., ::-1], states, mask)
