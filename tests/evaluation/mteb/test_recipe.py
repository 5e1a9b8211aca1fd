"""MTEB evaluation: the whole path on local data, and all 56 real task objects with injected data."""

import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mteb
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from neobert_hf.common.results import ResultError
from neobert_hf.embeddings.inference import fingerprint, load_model
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.local_tasks import TYPES, local_task, read_local_tasks
from neobert_hf.evaluation.mteb.report import COLUMNS, TASKS, read_published, write_report
from neobert_hf.evaluation.mteb.results import Results, Settings, subtasks
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT, small_model
from tests.helpers.other_encoders import save_with_its_own_code
from tests.helpers.small_tokenizer import WORDS, tiny_tokenizer


run_mteb = load_example("run_mteb")


CONFIGS = ROOT / "configs" / "mteb"
INSTRUCTIONS = yaml.safe_load((CONFIGS / "instructions.yaml").read_text())


def benchmark():
    return list(mteb.get_benchmark(run_mteb.BENCHMARK).tasks)


def save_model(folder: Path, seed: int, **changes) -> str:
    """Random weights; texts of the same words have similar embeddings even so, and scores are not chance."""
    model = small_model(**changes)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    return [save_model(tmp_path_factory.mktemp("model") / "same_name", seed) for seed in (1, 2)]


def texts(number: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS[:10], k=generator.randint(3, 9))) for _ in range(number)]


def write_rows(file: Path, **columns) -> None:
    dataset = Dataset.from_dict(columns)
    dataset.to_parquet(file) if file.suffix == ".parquet" else dataset.to_json(file)


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """One small task of each type; the YAML file beside its data."""
    folder = tmp_path_factory.mktemp("local")
    a, b = texts(24, seed=1), texts(24, seed=2)
    # Half of a text's words suffice to find it, with most models.
    parts = [" ".join(text.split()[: len(text.split()) // 2 + 1]) for text in a]
    write_rows(folder / "search.jsonl", question=parts, document=a)
    write_rows(folder / "more.parquet", document=b)
    write_rows(
        folder / "rerank.jsonl",
        query=parts[:8],
        positive=[[text] for text in a[:8]],
        negative=[b[i : i + 4] for i in range(8)],
    )
    write_rows(folder / "sts.parquet", sentence1=a, sentence2=b, score=[float(i % 7) for i in range(24)])
    write_rows(folder / "topics.parquet", text=a + b, label=[len(text) % 3 for text in a + b])
    write_rows(folder / "pairs.jsonl", sentence1=a, sentence2=parts[:12] + b[12:], label=[1] * 12 + [0] * 12)
    tasks = {
        "Search": {
            "type": "Retrieval",
            "data": "search.jsonl",
            "corpus": "more.parquet",
            "columns": {"query": "question"},
            "instruction": "the cat sat",
        },
        "Rerank": {"type": "Reranking", "data": "rerank.jsonl", "instruction": "the dog ran"},
        "Similarity": {"type": "STS", "data": "sts.parquet", "instruction": "on a mat"},
        "Topics": {"type": "Classification", "data": "topics.parquet", "train": "topics.parquet"},
        "Clusters": {"type": "Clustering", "data": "topics.parquet"},
        "Pairs": {"type": "PairClassification", "data": "pairs.jsonl"},
    }
    (folder / "tasks.yaml").write_text(yaml.safe_dump(tasks, sort_keys=False))
    return folder


def run_local(local: Path, model: str, output: Path, *flags: str) -> dict:
    flags = ["--local_tasks", str(local / "tasks.yaml"), "--mteb", "false", "--output_dir", str(output), *flags]
    run_mteb.main(["--model", model, *flags])
    return json.loads((output / "report.json").read_text())["models"]


# The whole path on local data


def test_every_local_type_is_evaluated_and_models_differ(local, models, tmp_path):
    run_local(local, models[0], tmp_path / "out")
    report = run_local(local, models[1], tmp_path / "out", "--batch_size", "7")
    first, second = (entry["local"] for entry in report.values())
    assert {entry["type"] for entry in first.values()} == set(TYPES)
    # Chance is below 10 (48 documents), 46 (5 candidates) and about 50.
    assert first["Search"]["score"] > 35 and first["Rerank"]["score"] > 60 and first["Pairs"]["score"] > 80
    for name in ("Search", "Similarity", "Topics", "Clusters"):
        assert first[name]["score"] != second[name]["score"], name
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert all(name in markdown for name in [*first, "ndcg_at_10", *report])
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_relevant_document_is_the_one_of_the_same_row(models, tmp_path):
    documents = sorted(set(texts(40, seed=3)))
    write_rows(tmp_path / "same.jsonl", query=documents, document=documents)
    write_rows(tmp_path / "wrong.jsonl", query=documents, document=documents[1:] + documents[:1])
    scores = {}
    for name in ("same", "wrong"):
        tasks = {name: {"type": "Retrieval", "data": f"{name}.jsonl"}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tasks))
        flags = [
            "--local_tasks",
            str(tmp_path / f"{name}.yaml"),
            "--mteb",
            "false",
            "--output_dir",
            str(tmp_path / "o"),
        ]
        run_mteb.main(["--model", models[0], *flags])
    (report,) = json.loads((tmp_path / "o" / "report.json").read_text())["models"].values()
    scores = {name: entry["score"] for name, entry in report["local"].items()}
    # Word order apart, equal texts have equal embeddings.
    assert scores["same"] > 99 and scores["wrong"] < 50


def test_sts_equals_a_plain_computation(local, models, tmp_path):
    from scipy.stats import spearmanr

    report = run_local(local, models[0], tmp_path, "--tasks", "Similarity")
    (entry,) = report.values()
    rows = Dataset.from_parquet(str(local / "sts.parquet"))
    model = SentenceTransformer(models[0], device="cpu")
    one, two = (model.encode(rows[column], prompt="on a mat ") for column in ("sentence1", "sentence2"))
    expected = spearmanr(model.similarity_pairwise(one, two), rows["score"]).statistic
    assert entry["local"]["Similarity"]["score"] == pytest.approx(100 * expected, abs=1e-3)


def test_scores_are_those_of_mteb_itself(local, models, tmp_path):
    """Its own wrapper, where there are no instructions to differ in."""
    tasks = yaml.safe_load((local / "tasks.yaml").read_text())
    for entry in tasks.values():
        entry.pop("instruction", None)
        entry |= {part: str(local / entry[part]) for part in ("data", "corpus", "train") if part in entry}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    ours = run_local(tmp_path, models[0], tmp_path / "out", "--name", "m")["m"]["local"]
    model = SentenceTransformer(models[0], device="cpu")
    results = mteb.evaluate(model, read_local_tasks(tmp_path / "tasks.yaml")[0], cache=None).task_results
    theirs = {result.task_name: 100 * result.scores["test"][0]["main_score"] for result in results}
    assert {name: entry["score"] for name, entry in ours.items()} == pytest.approx(theirs, abs=1e-3)


# Resuming


def test_finished_tasks_are_not_repeated(local, models, tmp_path, monkeypatch):
    whole = run_local(local, models[0], tmp_path / "whole", "--name", "m")
    # Interrupted after two tasks, a file half written.
    part = tmp_path / "part" / "m"
    part.mkdir(parents=True)
    for name in ("Search", "Clusters"):
        shutil.copy(tmp_path / "whole" / "m" / f"{name}.json", part)
    (part / "Rerank.json.partial").write_text('{"task": "Re')
    kept = {file: file.stat().st_mtime_ns for file in part.glob("*.json")}
    encoded = []
    encode = InstructionEncoder.encode
    monkeypatch.setattr(
        InstructionEncoder,
        "encode",
        lambda self, inputs, *, task_metadata, **kwargs: (
            encoded.append(task_metadata.name) or encode(self, inputs, task_metadata=task_metadata, **kwargs)
        ),
    )
    assert run_local(local, models[0], tmp_path / "part", "--name", "m") == whole
    assert set(encoded) == {"Rerank", "Similarity", "Topics", "Pairs"}
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
    encoded.clear()
    run_local(local, models[0], tmp_path / "part", "--name", "m")
    assert encoded == []


def test_killed_and_resumed(local, models, tmp_path):
    """`kill -9` once the first result is there: the rest follows, the first is kept."""
    command = [sys.executable, str(ROOT / "examples" / "run_mteb.py"), "--model", models[0], "--name", "m"]
    command += ["--local_tasks", str(local / "tasks.yaml"), "--mteb", "false", "--output_dir", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("m/*.json")) and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("m/*.json")}
    assert kept and process.returncode == -9
    report = run_local(local, models[0], tmp_path, "--name", "m")
    assert len(report["m"]["local"]) == 6
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())


def test_second_model_does_not_get_the_scores_of_the_first(local, models, tmp_path):
    """Neither under a name of its own (above) nor under the same."""
    run_local(local, models[0], tmp_path, "--name", "m", "--tasks", "Pairs")
    before = (tmp_path / "m" / "Pairs.json").read_text()
    with pytest.raises(ResultError, match="model: .* there, .* now"):
        run_local(local, models[1], tmp_path, "--name", "m", "--tasks", "Pairs")
    # Nor may its other tasks stand beside those of the first in one row.
    with pytest.raises(ResultError, match="model: .* there, .* now"):
        run_local(local, models[1], tmp_path, "--name", "m", "--tasks", "Search")
    assert (tmp_path / "m" / "Pairs.json").read_text() == before


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--dtype", "bfloat16"], "dtype: 'float32' there, 'bfloat16' now"),
        (["--max_length", "8"], "max_length: 64 there, 8 now"),
        (["--truncate_dim", "32"], "truncate_dim: None there, 32 now"),
        (["--prompt_template", "the {instruction} "], "prompt: 'on a mat ' there, 'the on a mat ' now"),
    ],
)
def test_results_of_other_settings_are_refused(local, models, tmp_path, flags, message):
    run_local(local, models[0], tmp_path, "--tasks", "Similarity")
    with pytest.raises(ResultError, match=message):
        run_local(local, models[0], tmp_path, "--tasks", "Similarity", *flags)


def test_results_of_other_data_are_refused(local, models, tmp_path):
    shutil.copytree(local, tmp_path / "data")
    run_local(tmp_path / "data", models[0], tmp_path / "out", "--tasks", "Pairs")
    # The same number of bytes.
    text = (tmp_path / "data" / "pairs.jsonl").read_text()
    (tmp_path / "data" / "pairs.jsonl").write_text(text.replace("cat", "dog"))
    with pytest.raises(ResultError, match="dataset: "):
        run_local(tmp_path / "data", models[0], tmp_path / "out", "--tasks", "Pairs")


def test_damaged_result_is_named(local, models, tmp_path):
    run_local(local, models[0], tmp_path, "--name", "m", "--tasks", "Pairs")
    (tmp_path / "m" / "Pairs.json").write_text('{"task": "Pa')
    with pytest.raises(ResultError, match="Pairs.json is no result"):
        run_local(local, models[0], tmp_path, "--name", "m", "--tasks", "Pairs")


def test_a_task_that_fails_does_not_stop_the_others(local, models, tmp_path):
    """Equal similarities have no correlation with anything: NaN is an error, not a result."""
    rows = {"sentence1": ["a cat"] * 5, "sentence2": ["the dog"] * 5, "score": [0.0, 1.0, 2.0, 3.0, 4.0]}
    write_rows(tmp_path / "constant.jsonl", **rows)
    tasks = {"Constant": {"type": "STS", "data": "constant.jsonl"}}
    tasks["Pairs"] = {"type": "PairClassification", "data": str(local / "pairs.jsonl")}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks, sort_keys=False))
    with pytest.raises(SystemExit, match="1 tasks failed:\n  Constant: FloatingPointError: .*nan"):
        run_local(tmp_path, models[0], tmp_path / "out", "--name", "m")
    assert [file.name for file in (tmp_path / "out" / "m").glob("*")] == ["Pairs.json"]
    assert "Pairs" in (tmp_path / "out" / "report.md").read_text()


# The model


def test_pooling_is_float32_in_a_16_bit_model(models):
    model = load_model(models[0], torch.bfloat16, "cpu", None, None)
    assert model[0].auto_model.dtype == torch.bfloat16
    sentences = texts(6)
    embeddings = model.encode(sentences, convert_to_tensor=True)
    features = model.preprocess(sentences)
    with torch.no_grad():
        states = (
            model[0].auto_model(**{key: features[key] for key in ("input_ids", "attention_mask")}).last_hidden_state
        )
    mask = features["attention_mask"].unsqueeze(-1)
    expected = (states.float() * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(embeddings, expected, rtol=1e-5, atol=1e-6)
    assert (embeddings != embeddings.bfloat16()).float().mean() > 0.5


def test_16_bits_on_a_gpu_only_unless_given():
    chosen = [run_mteb.choose_dtype("auto", torch.device(device)) for device in ("cuda", "cpu")]
    assert chosen == [torch.bfloat16, torch.float32]
    assert run_mteb.choose_dtype("float16", torch.device("cpu")) == torch.float16


def test_float16_sums_do_not_overflow(tmp_path):
    """States of a few thousand, of which the sum over a text is beyond float16."""
    folder = save_model(tmp_path, 1)
    backbone = SentenceTransformer(folder, device="cpu")[0].auto_model
    backbone.layer_norm.weight.data.fill_(3e3)
    backbone.save_pretrained(folder)
    sentences = [" ".join(WORDS[:10] * 5)]
    exact = load_model(folder, torch.float32, "cpu", None, None).encode(sentences, convert_to_tensor=True)
    half = load_model(folder, torch.float16, "cpu", None, None).encode(sentences, convert_to_tensor=True)
    assert 50 * exact.abs().max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(half, exact, rtol=0.05, atol=30)


def test_embeddings_that_are_not_finite_are_an_error(local, tmp_path):
    folder = save_model(tmp_path / "model", 1)
    backbone = SentenceTransformer(folder, device="cpu")[0].auto_model
    backbone.layer_norm.weight.data.fill_(1e5)
    backbone.save_pretrained(folder)
    with pytest.raises(SystemExit, match="embeddings are not finite.*Set `dtype` to float32"):
        run_local(local, folder, tmp_path / "out", "--tasks", "Pairs", "--dtype", "float16")
    assert not list((tmp_path / "out").rglob("*.json"))


def test_fingerprint_knows_weights_architecture_and_tokenizer(models, tmp_path):
    first = fingerprint(SentenceTransformer(models[0], device="cpu"))
    shutil.copytree(models[0], tmp_path / "elsewhere")
    assert fingerprint(SentenceTransformer(str(tmp_path / "elsewhere"), device="cpu")) == first
    others = [SentenceTransformer(models[1], device="cpu")]
    for change in range(4):
        model = SentenceTransformer(models[0], device="cpu")
        if change == 0:
            model[0].auto_model.config.norm_eps = 1e-3
        elif change == 1:
            model[0].auto_model.layer_norm.weight.data[0] += 1e-3
        elif change == 2:
            model.prompts = {"query": "the "}
        else:
            model[1] = type(model[1])(64, pooling_mode="cls")
        others.append(model)
    prints = [fingerprint(model) for model in others]
    assert len({first, *prints}) == 6


def test_models_that_are_refused_and_one_that_needs_its_own_code(local, tmp_path):
    SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=8)]).save(str(tmp_path / "static"))
    with pytest.raises(ValueError, match="static begins with StaticEmbedding; this needs .* a Transformers encoder"):
        run_local(local, str(tmp_path / "static"), tmp_path / "out", "--tasks", "Similarity")
    save_with_its_own_code(tmp_path / "own", tiny_tokenizer())
    flags = [local, str(tmp_path / "own"), tmp_path / "out", "--tasks", "Similarity"]
    with pytest.raises(ValueError, match="trust_remote_code"):
        run_local(*flags)
    assert not (tmp_path / "out").exists()
    (report,) = run_local(*flags, "--trust_remote_code", "true").values()
    assert set(report["local"]) == {"Similarity"}


def test_model_with_its_own_prompts(local, models, tmp_path, monkeypatch):
    """Used when there are no instructions, kept away when there are."""
    prompts = {"query": "a cat ", "document": "the dog "}
    model = SentenceTransformer(models[0], device="cpu", prompts=prompts, default_prompt_name="query")
    model.save(str(tmp_path / "model"))
    seen = spy(monkeypatch)
    tasks = {"Search": yaml.safe_load((local / "tasks.yaml").read_text())["Search"]}
    tasks["Search"] |= {"data": str(local / "search.jsonl"), "corpus": str(local / "more.parquet")}
    for instruction, expected in (("", {"a cat ", "the dog "}), ("on a mat", {"on a mat ", ""})):
        tasks["Search"]["instruction"] = instruction
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
        seen.clear()
        run_local(tmp_path, str(tmp_path / "model"), tmp_path / f"out{len(instruction)}")
        assert {prompt for prompt, _ in seen} == expected


def spy(monkeypatch) -> list[tuple[str | None, str]]:
    """Every text that models read from now on, with what stood before it."""
    seen, preprocess = [], SentenceTransformer.preprocess

    def record(self, inputs, prompt=None, **kwargs):
        seen.extend((prompt, text) for text in inputs)
        return preprocess(self, inputs, prompt=prompt, **kwargs)

    monkeypatch.setattr(SentenceTransformer, "preprocess", record)
    return seen


def test_only_queries_get_the_instruction(local, models, tmp_path, monkeypatch):
    seen = spy(monkeypatch)
    for task, prompt in (("Search", "the cat sat "), ("Rerank", "the dog ran ")):
        seen.clear()
        run_local(local, models[0], tmp_path, "--tasks", task)
        file, column = {"Search": ("search.jsonl", "question"), "Rerank": ("rerank.jsonl", "query")}[task]
        queries = {json.loads(line)[column] for line in (local / file).read_text().splitlines()}
        assert {text for before, text in seen if before == prompt} == queries
        assert {before for before, _ in seen} == {prompt, ""}
    seen.clear()
    run_local(local, models[0], tmp_path, "--tasks", "Similarity")
    assert {before for before, _ in seen} == {"on a mat "} and len(seen) == 48


# The paper's data


def test_instructions_are_those_of_all_56_tasks():
    tasks = benchmark()
    assert len(tasks) == 56 == TASKS
    assert run_mteb.read_instructions(str(CONFIGS / "instructions.yaml"), tasks) == INSTRUCTIONS
    assert all(text.endswith(".") and text == text.strip() for text in INSTRUCTIONS.values())
    counts = {kind: sum(task.metadata.type == kind for task in tasks) for kind in COLUMNS}
    assert counts == {kind: number for kind, (_, number) in COLUMNS.items()}


def test_instructions_are_the_words_of_the_paper(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text().replace(" .", ".")
    for task, text in INSTRUCTIONS.items():
        name = task.split("Clustering")[0]
        if "Clustering" in task and name != "TwentyNewsgroups":
            text = text.replace(f" {name} ", " <dataset> ")
        assert text in paper, task


def test_every_part_of_cqadupstack_gets_its_prompt():
    prompts = run_mteb.build_prompts(INSTRUCTIONS, benchmark(), "{instruction} ")
    parts = [name for name in prompts if name.startswith("CQADupstack") and name != "CQADupstackRetrieval"]
    assert len(parts) == 12 and len(prompts) == 68
    assert {prompts[part] for part in parts} == {INSTRUCTIONS["CQADupstackRetrieval"] + " "}


def test_published_rows_are_consistent():
    """The average of each row of Table 4 is that of its types, weighted by their tasks, up to rounding."""
    rows = read_published(CONFIGS / "table4.yaml")
    assert len(rows) == 10
    for name, (*types, average) in rows.items():
        weighted = sum(score * number for score, (_, number) in zip(types, COLUMNS.values())) / TASKS
        assert weighted == pytest.approx(average, abs=0.11), name


def test_report_marks_means_of_some_tasks(tmp_path):
    """With results made up: complete columns as numbers, others with the number of their tasks."""
    for task in benchmark():
        kind = task.metadata.type
        if kind == "Retrieval" and task.metadata.name != "NQ" or kind == "Summarization":
            continue
        score = 0.5 if kind == "STS" else 0.25
        for model in ("a", "b") if kind == "STS" else ("a",):
            content = {"task": task.metadata.name, "type": kind, "metric": "x", "score": score}
            (tmp_path / model).mkdir(exist_ok=True)
            content |= {"settings": {}, "result": {}}
            (tmp_path / model / f"{task.metadata.name}.json").write_text(json.dumps(content))
    published = read_published(CONFIGS / "table4.yaml")
    lines = write_report(tmp_path, {task.metadata.name for task in benchmark()}, published).splitlines()
    (a,) = (line for line in lines if line.startswith("| **a**"))
    (b,) = (line for line in lines if line.startswith("| **b**"))
    # 10 tasks of 50 and 31 of 25 percent.
    assert a == "| **a** | 25.0 | 25.0 | 25.0 | 25.0 | 25.0 [1] | 50.0 | - | 31.1 [41] |"
    assert b == "| **b** | - | - | - | - | - | 50.0 | - | 50.0 [10] |"
    (neobert,) = (line for line in lines if line.startswith("| NeoBERT"))
    assert neobert == "| NeoBERT 4096 (paper) | 61.6 | 40.8 | 76.2 | 51.2 | 31.6 | 74.8 | 30.7 | 51.3 |"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["models"]["a"]["types"]["Avg."]["tasks"] == 41 and len(report["published"]) == 10
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


# Bad input: an error before a model is loaded


def test_an_empty_name_is_refused():
    refused("give the model a `name`", "--name", "./")


def refused(match: str, *flags: str) -> None:
    with pytest.raises(ValueError, match=match):
        run_mteb.main(["--model", "no/such/model", "--output_dir", "no/such/folder", *flags])
    assert not Path("no/such/folder").exists()


def test_unknown_tasks_and_types():
    instructions = ["--instructions", str(CONFIGS / "instructions.yaml")]
    refused("Unknown task 'STS-12'; did you mean 'STS12'", *instructions, "--tasks", "STS-12")
    refused("Unknown type 'Retreival'; did you mean 'Retrieval'", *instructions, "--types", "Retreival")
    refused("No task is left", *instructions, "--tasks", "STS12", "--types", "Retrieval")
    refused("No task is left of 0", "--mteb", "false")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"STS12": None}, "must hold one"),
        ({"STS-12": "x"}, "'STS-12' is no task of MTEB.eng, v1.; did you mean 'STS12'"),
        ({"CQADupstackAndroidRetrieval": "x"}, "'CQADupstackAndroidRetrieval' is no task"),
    ],
)
def test_instructions_that_fit_no_task(tmp_path, change, message):
    (tmp_path / "instructions.yaml").write_text(yaml.safe_dump(INSTRUCTIONS | change))
    refused(message, "--instructions", str(tmp_path / "instructions.yaml"))


def test_missing_instructions_and_bad_templates(local, tmp_path):
    (tmp_path / "i.yaml").write_text(yaml.safe_dump({key: INSTRUCTIONS[key] for key in INSTRUCTIONS if key != "NQ"}))
    refused("no instruction for NQ", "--instructions", str(tmp_path / "i.yaml"))
    flags = ["--instructions", str(CONFIGS / "instructions.yaml")]
    refused("must contain {instruction}", *flags, "--prompt_template", "query: ")
    refused("MTEB's do not", "--local_tasks", str(local / "tasks.yaml"))
    refused("`mteb` is false", *flags, "--mteb", "false", "--local_tasks", str(local / "tasks.yaml"))


def test_local_tasks_that_cannot_be_read(local, tmp_path):
    def entry(**fields):
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"Mine": fields}))
        return ["--mteb", "false", "--local_tasks", str(tmp_path / "tasks.yaml")]

    search, topics = str(local / "search.jsonl"), str(local / "topics.parquet")
    refused("unknown type 'Search'; known are Retrieval", *entry(type="Search", data=search))
    refused("has no column 'query'; it has question, document", *entry(type="Retrieval", data=search))
    refused("`columns` names 'question'", *entry(type="Retrieval", data=search, columns={"question": "query"}))
    refused("unknown key 'prompt'", *entry(type="Retrieval", data=search, prompt="x"))
    refused("lacks `data`", *entry(type="Retrieval"))
    refused("there is no file", *entry(type="Retrieval", data="none.jsonl"))
    refused("needs `train`", *entry(type="Classification", data=topics))
    refused("takes no `train`", *entry(type="STS", data=topics, train=topics))
    write_rows(tmp_path / "none.jsonl", query=["a", None], document=["a", "b"])
    refused("column 'query' .* missing values", *entry(type="Retrieval", data="none.jsonl"))
    write_rows(tmp_path / "n.parquet", query=["a"], positive=[["a"]], negative=[["b", None]])
    refused("column 'negative' .* missing values", *entry(type="Reranking", data="n.parquet"))
    write_rows(tmp_path / "p.parquet", query=["a", "b"], positive=[["a"], []], negative=[["b"], ["a"]])
    refused("no `positive`", *entry(type="Reranking", data="p.parquet"))
    write_rows(tmp_path / "flat.jsonl", query=["a"], positive=["a"], negative=["b"])
    refused("holds Value.*, not lists of texts", *entry(type="Reranking", data="flat.jsonl"))
    write_rows(tmp_path / "numbers.jsonl", text=[1, 2], label=[1, 2])
    refused("holds Value.*, not texts", *entry(type="Clustering", data="numbers.jsonl"))
    write_rows(tmp_path / "labels.jsonl", sentence1=["a"], sentence2=["b"], label=[2])
    refused("must be 1 and 0; found .2", *entry(type="PairClassification", data="labels.jsonl"))
    write_rows(tmp_path / "scores.jsonl", sentence1=["a", "b"], sentence2=["c", "d"], score=[0.0, 0.0])
    refused("every score is 0.0", *entry(type="STS", data="scores.jsonl"))
    for score, found in ((["3", "4"], "'3'"), ([1.0, math.nan], "nan")):
        write_rows(tmp_path / "s.parquet", sentence1=["a", "b"], sentence2=["c", "d"], score=score)
        refused(f"scores must be numbers; found {found}", *entry(type="STS", data="s.parquet"))
    write_rows(tmp_path / "p.parquet", query=["a", "b"], positive=[["a"], ["b"]], negative=[["b"], []])
    refused("no `negative`", *entry(type="Reranking", data="p.parquet"))
    write_rows(tmp_path / "one.jsonl", text=["a", "b"], label=[1, 1], sentence1=["a", "b"], sentence2=["c", "d"])
    for task_type in ("Clustering", "PairClassification"):
        refused("every label is 1; any", *entry(type=task_type, data="one.jsonl"))
    refused("every label is 1; any", *entry(type="Classification", data="one.jsonl", train="one.jsonl"))
    for label in (["a", "b"], [0, 2]):
        write_rows(tmp_path / "train.jsonl", text=["a", "b"], label=label)
        message = f"label 1 of `data` is none of `train`: {label[0]!r}, {label[1]!r}"
        refused(message, *entry(type="Classification", data="one.jsonl", train="train.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    refused("empty.jsonl is empty", *entry(type="STS", data="empty.jsonl"))
    Dataset.from_dict({"query": [], "document": []}).to_parquet(tmp_path / "no_rows.parquet")
    refused("has no rows that can be read", *entry(type="Retrieval", data="no_rows.parquet"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "lab')
    refused("broken.jsonl has no rows that can be read: .*JSON", *entry(type="Clustering", data="broken.jsonl"))
    refused("is not one of", *entry(type="STS", data="tasks.yaml"))


def test_configurations_are_read():
    (settings,) = run_mteb.parse_config(
        run_mteb.MTEBArguments, args=["--config", str(CONFIGS / "eng_v1.yaml"), "--model", "m"]
    )
    assert settings.mteb and settings.max_length == 1024
    assert (ROOT / settings.instructions).is_file() and (ROOT / settings.published).is_file()
    (settings,) = run_mteb.parse_config(
        run_mteb.MTEBArguments, args=["--config", str(CONFIGS / "local.yaml"), "--model", "m"]
    )
    assert not settings.mteb
    example = yaml.safe_load((ROOT / settings.local_tasks).read_text())
    assert [entry["type"] for entry in example.values()] == list(TYPES)


# All 56 real task objects


def inject(task) -> None:
    """A few rows in the form that the task has after loading, under its own columns, splits and subsets."""
    one, two = texts(24, seed=4), texts(24, seed=5)
    if isinstance(task, AbsTaskRetrieval):
        split = {
            "queries": Dataset.from_dict({"id": [f"q{i}_0" for i in range(6)], "text": one[:6]}),
            "corpus": Dataset.from_dict({"id": [f"d{i}" for i in range(24)], "title": two, "text": one}),
            "relevant_docs": {f"q{i}_0": {f"d{i}": 1, f"d{i + 6}": 1} for i in range(6)},
            "top_ranked": None,
        }
        if task.metadata.type == "Reranking":
            split["top_ranked"] = {f"q{i}_0": [f"d{j}" for j in range(i, i + 12)] for i in range(6)}
    elif isinstance(task, AbsTaskSTS):
        split = Dataset.from_dict(
            {task.column_names[0]: one, task.column_names[1]: two, "score": [i % 5 for i in range(24)]}
        )
    elif isinstance(task, AbsTaskClassification):
        rows = {task.input_column_name: one, task.label_column_name: [i % 2 for i in range(24)]}
        split = Dataset.from_dict(rows)
    elif isinstance(task, AbsTaskClusteringLegacy):
        rows = {task.input_column_name: [one, two], task.label_column_name: [[i % 3 for i in range(24)]] * 2}
        split = Dataset.from_dict(rows)
    elif isinstance(task, AbsTaskPairClassification):
        rows = {task.input1_column_name: one, task.input2_column_name: two}
        split = Dataset.from_dict(rows | {task.label_column_name: [i % 2 for i in range(24)]})
    else:
        assert task.metadata.type == "Summarization"
        rows = {"text": one[:3], "human_summaries": [one[:2]] * 3, "machine_summaries": [two[:4]] * 3}
        split = Dataset.from_dict(rows | {"relevance": [[1, 2, 3, 4], [2, 1, 4, 3], [4, 3, 1, 2]]})
    splits = dict.fromkeys(task.eval_splits, split)
    if isinstance(task, AbsTaskClassification):
        splits[task.train_split] = split
    nested = isinstance(task, AbsTaskRetrieval) or task.metadata.is_multilingual
    splits = splits if isinstance(task, AbsTaskRetrieval) else DatasetDict(splits)
    task.dataset = dict.fromkeys(task.hf_subsets, splits) if nested else splits
    task.data_loaded = True


def evaluate_real_tasks(names: list[str] | None, model: str, output: Path, monkeypatch) -> tuple[dict, dict]:
    """Run the script on real task objects with injected data; the report, and the prompts by task."""
    tasks = [task for task in benchmark() if names is None or task.metadata.name in names]
    for task in tasks:
        for part in subtasks(task):
            monkeypatch.setattr(part, "dataset", None)
            monkeypatch.setattr(part, "data_loaded", False)
            inject(part)
    seen, prompts, encode = spy(monkeypatch), {}, InstructionEncoder.encode

    def record(self, inputs, *, task_metadata, **kwargs):
        seen.clear()
        embeddings = encode(self, inputs, task_metadata=task_metadata, **kwargs)
        role = kwargs.get("prompt_type")
        prompts.setdefault(task_metadata.name, set()).update((role and role.value, prompt) for prompt, _ in seen)
        return embeddings

    monkeypatch.setattr(InstructionEncoder, "encode", record)
    flags = ["--config", str(CONFIGS / "eng_v1.yaml"), "--output_dir", str(output), "--name", "m"]
    for file in ("instructions", "published"):
        name = yaml.safe_load((CONFIGS / "eng_v1.yaml").read_text())[file]
        flags += [f"--{file}", str(ROOT / name)]
    run_mteb.main(["--model", model, *flags, *(["--tasks", *names] if names else [])])
    return json.loads((output / "report.json").read_text())["models"]["m"], prompts


def expected_prompts(tasks) -> dict:
    expected = {}
    for task in tasks:
        prompt = INSTRUCTIONS[task.metadata.name] + " "
        asymmetric = task.metadata.type in ("Retrieval", "Reranking")
        for part in subtasks(task):
            expected[part.metadata.name] = {("query", prompt), ("document", "")} if asymmetric else {(None, prompt)}
    return expected


def test_real_tasks_of_every_type(models, tmp_path, monkeypatch):
    names = [
        "Banking77Classification",
        "RedditClustering",
        "TwitterURLCorpus",
        "SciDocsRR",
        "NFCorpus",
        "STS22",
        "SummEval",
    ]
    report, prompts = evaluate_real_tasks(names, models[0], tmp_path, monkeypatch)
    assert set(report["types"]) == {*COLUMNS, "Avg."} and len(report["tasks"]) == 7
    assert prompts == expected_prompts(task for task in benchmark() if task.metadata.name in names)


def test_parts_of_cqadupstack_resume(models, tmp_path, monkeypatch):
    report, prompts = evaluate_real_tasks(["CQADupstackRetrieval"], models[0], tmp_path, monkeypatch)
    parts = sorted((tmp_path / "m" / "parts").glob("*.json"))
    assert len(parts) == 12 and list(report["tasks"]) == ["CQADupstackRetrieval"]
    assert prompts == expected_prompts(task for task in benchmark() if task.metadata.name == "CQADupstackRetrieval")
    scores = [json.loads(part.read_text())["score"] for part in parts]
    assert report["tasks"]["CQADupstackRetrieval"]["score"] == pytest.approx(100 * sum(scores) / 12, abs=1e-3)
    (tmp_path / "m" / "CQADupstackRetrieval.json").unlink()
    parts[0].unlink()
    again, prompts = evaluate_real_tasks(["CQADupstackRetrieval"], models[0], tmp_path, monkeypatch)
    assert again == report and list(prompts) == [parts[0].stem]
    # Once all is done, the parts are needed no more.
    shutil.rmtree(tmp_path / "m" / "parts")
    again, prompts = evaluate_real_tasks(["CQADupstackRetrieval"], models[0], tmp_path, monkeypatch)
    assert again == report and prompts == {}


@pytest.mark.slow
def test_all_56_real_tasks(models, tmp_path, monkeypatch):
    report, prompts = evaluate_real_tasks(None, models[0], tmp_path, monkeypatch)
    assert len(report["tasks"]) == 56 and report["types"]["Avg."]["tasks"] == 56
    assert {kind: report["types"][kind]["tasks"] for kind in COLUMNS} == {kind: n for kind, (_, n) in COLUMNS.items()}
    assert len(prompts) == 67 and prompts == expected_prompts(benchmark())
    assert "[" not in (tmp_path / "report.md").read_text().split("## ")[0].split("Scores of")[0]


def test_function_and_yaml_make_the_same_task(local):
    (by_yaml, *_), instructions = read_local_tasks(local / "tasks.yaml")
    by_call = local_task(
        "Search", "Retrieval", local / "search.jsonl", corpus=local / "more.parquet", columns={"query": "question"}
    )
    assert by_call.metadata == by_yaml.metadata and instructions["Search"] == "the cat sat"
    by_call.load_data()
    split = by_call.dataset["default"]["test"]
    assert split["top_ranked"] is None and set(split["relevant_docs"]) == set(split["queries"]["id"])
    assert set(split["corpus"]["text"]) == set(texts(24, seed=1) + texts(24, seed=2))


def test_reranking_candidates_are_positives_and_negatives(tmp_path):
    """Rows of the same query are one query; a text is one document."""
    rows = {"query": ["a", "b", "a"], "positive": [["x"], ["y"], ["z"]], "negative": [["y", "z"], ["x"], ["w"]]}
    write_rows(tmp_path / "rows.jsonl", **rows)
    task = local_task("Mine", "Reranking", tmp_path / "rows.jsonl")
    task.load_data()
    split = task.dataset["default"]["test"]
    text = dict(zip(split["corpus"]["id"], split["corpus"]["text"]))
    query = dict(zip(split["queries"]["text"], split["queries"]["id"]))
    assert sorted(text.values()) == ["w", "x", "y", "z"] and len(query) == 2
    candidates = {name: [text[number] for number in split["top_ranked"][query[name]]] for name in query}
    assert {name: sorted(found) for name, found in candidates.items()} == {"a": ["w", "x", "y", "z"], "b": ["x", "y"]}
    relevant = {name: sorted(text[number] for number in split["relevant_docs"][query[name]]) for name in query}
    assert relevant == {"a": ["x", "z"], "b": ["y"]}


def test_results_need_no_script(local, models, tmp_path):
    """From Python: a task of one's own, any model."""
    model = load_model(models[0], torch.float32, "cpu", None, None)
    task = local_task("Mine", "PairClassification", local / "pairs.jsonl")
    encoder = InstructionEncoder(model, "mine", {"Mine": ""})
    settings = Settings(fingerprint(model), "float32", model.max_seq_length, None)
    results = Results(tmp_path / "mine", settings, encoder)
    assert results.evaluate([task], batch_size=8) == {}
    assert json.loads((tmp_path / "mine" / "Mine.json").read_text())["metric"] == "max_ap"
