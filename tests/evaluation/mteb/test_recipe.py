"""MTEB evaluation: the whole path on local data, resuming, the report, and settings that are refused."""

import json
import shutil
from collections import Counter
from pathlib import Path

import mteb
import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.local_tasks import TYPES, LocalTask, make_task, read_local_tasks
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, benchmark_types, choose_dtype, collect_tasks
from neobert_hf.evaluation.mteb.report import TASK_TYPES, read_published, write_report
from neobert_hf.evaluation.mteb.results import Results, evaluate
from neobert_hf.evaluation.results import name_of_model
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import (
    CONFIGS,
    INSTRUCTIONS,
    random_texts,
    refused,
    run_local,
    save_model,
    write_rows,
)
from tests.helpers.other_encoders import save_with_its_own_code
from tests.helpers.small_tokenizer import tiny_tokenizer


TABLES = [CONFIGS / "table4.yaml", CONFIGS / "table5.yaml"]


@pytest.fixture
def copied(evaluated, tmp_path) -> Path:
    return shutil.copytree(evaluated.folder, tmp_path / "copied")


def test_every_local_type_is_evaluated_and_models_differ(local, models, evaluated, copied):
    report = run_local(local, models[1], copied, "--batch_size", "7")
    assert report["m"] == evaluated.report["m"] and len(report) == 2
    first, second = (report.pop("m"), *report.values())
    assert {entry["type"] for entry in first.values()} == {entry["type"] for entry in second.values()} == set(TYPES)
    # Chance is below 10 (48 documents), 46 (5 candidates) and about 50.
    assert first["Search"]["score"] > 35 and first["Rerank"]["score"] > 60 and first["Pairs"]["score"] > 80
    for name in ("Search", "Similarity", "Topics", "Clusters"):
        assert first[name]["score"] != second[name]["score"], name
    markdown = (copied / "report.md").read_text()
    assert all(name in markdown for name in [*first, "ndcg_at_10", "m", *report])
    assert not list(copied.rglob("*.partial"))


def test_relevant_document_is_the_one_of_the_same_row(models, tmp_path):
    documents = sorted(set(random_texts(40, seed=3)))
    write_rows(tmp_path / "same.jsonl", query=documents, document=documents)
    write_rows(tmp_path / "wrong.jsonl", query=documents, document=documents[1:] + documents[:1])
    tasks = {name: {"type": "Retrieval", "data": f"{name}.jsonl"} for name in ("same", "wrong")}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    (report,) = run_local(tmp_path, models[0], tmp_path / "out").values()
    scores = {name: entry["score"] for name, entry in report.items()}
    # Word order apart, equal texts have equal embeddings.
    assert scores["same"] > 99 and scores["wrong"] < 50


def test_scores_are_those_of_mteb_itself(local, models, evaluated, tmp_path):
    """Its own wrapper, where there are no instructions to differ in."""
    tasks = yaml.safe_load((local / "tasks.yaml").read_text())
    instructed = [name for name, entry in tasks.items() if entry.pop("instruction", None)]
    for entry in tasks.values():
        entry |= {part: str(local / entry[part]) for part in ("data", "corpus", "train") if part in entry}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    again = run_local(tmp_path, models[0], tmp_path / "out", "--name", "m", "--tasks", *instructed)
    ours = evaluated.report["m"] | again["m"]
    model = SentenceTransformer(models[0], device="cpu")
    results = mteb.evaluate(model, read_local_tasks(tmp_path / "tasks.yaml")[0], cache=None).task_results
    theirs = {result.task_name: 100 * result.scores["test"][0]["main_score"] for result in results}
    assert len(theirs) == 6 and len(instructed) == 3
    assert {name: entry["score"] for name, entry in ours.items()} == pytest.approx(theirs, abs=1e-3)


def test_finished_tasks_are_not_repeated(local, models, evaluated, tmp_path, monkeypatch):
    # Interrupted after three tasks, a file half written.
    part = tmp_path / "m"
    part.mkdir()
    for name in ("Search", "Topics", "Clusters"):
        shutil.copy(evaluated.folder / "m" / f"{name}.json", part)
    (part / "Rerank.json.partial").write_text('{"task": "Re')
    kept = {file: file.stat().st_mtime_ns for file in part.glob("*.json")}
    encoded, encode = [], InstructionEncoder.encode

    def record(self, inputs, *, task_metadata, **kwargs):
        encoded.append(task_metadata.name)
        return encode(self, inputs, task_metadata=task_metadata, **kwargs)

    monkeypatch.setattr(InstructionEncoder, "encode", record)
    assert run_local(local, models[0], tmp_path, "--name", "m") == evaluated.report
    assert set(encoded) == {"Rerank", "Similarity", "Pairs"}
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
    encoded.clear()
    run_local(local, models[0], tmp_path, "--name", "m")
    assert encoded == []


def test_results_of_the_same_weights_and_data_elsewhere_are_taken(local, models, evaluated, copied, monkeypatch):
    """A path identifies nothing, and a model without a `name` is called by the last part of its path."""
    (copied / "m").rename(copied / "same_name")
    model = shutil.copytree(models[0], copied.parent / "moved" / "same_name")
    data = shutil.copytree(local, copied.parent / "data")
    monkeypatch.setattr(InstructionEncoder, "encode", lambda *args, **kwargs: pytest.fail("evaluated again"))
    assert run_local(data, str(model), copied) == {"same_name": evaluated.report["m"]}
    for given, path, expected in (
        (None, "runs/a/model", "a"),
        (None, "./runs/a/", "a"),
        (None, "chandar-lab/NeoBERT", "NeoBERT"),
        ("x", "m", "x"),
    ):
        assert name_of_model(given, path) == expected
    with pytest.raises(ValueError, match="name"):
        name_of_model("a/b", "m")


@pytest.mark.parametrize(
    "name, flags",
    [
        ("dtype", ["--dtype", "bfloat16"]),
        ("max_length", ["--max_length", "8"]),
        ("truncate_dim", ["--truncate_dim", "32"]),
        ("prompts.text", ["--prompt_template", "the {instruction} "]),
    ],
)
def test_results_of_other_settings_are_refused_by_name(local, models, copied, name, flags):
    with pytest.raises(SettingsMismatch, match=f"\\n  {name}: "):
        run_local(local, models[0], copied, "--name", "m", "--tasks", "Similarity", *flags)


def test_results_of_other_weights_data_or_types_are_refused(local, models, copied, tmp_path):
    before = (copied / "m" / "Pairs.json").read_text()
    (copied / "m" / "Search.json").unlink()
    # Nor may other tasks of another model stand in the same row.
    for task in ("Pairs", "Search"):
        with pytest.raises(SettingsMismatch, match="\n  model: "):
            run_local(local, models[1], copied, "--name", "m", "--tasks", task)
    assert (copied / "m" / "Pairs.json").read_text() == before and not (copied / "m" / "Search.json").exists()
    data = shutil.copytree(local, tmp_path / "data")
    # The same number of bytes.
    text = (data / "pairs.jsonl").read_text()
    (data / "pairs.jsonl").write_text(text.replace("cat", "dog"))
    with pytest.raises(SettingsMismatch, match="\n  dataset: "):
        run_local(data, models[0], copied, "--name", "m", "--tasks", "Pairs")
    (data / "pairs.jsonl").write_text(text)
    tasks = (data / "tasks.yaml").read_text()
    (data / "tasks.yaml").write_text(tasks.replace("Clusters:", "Other:").replace("Topics:", "Clusters:"))
    with pytest.raises(SettingsMismatch, match="\n  type: "):
        run_local(data, models[0], copied, "--name", "m", "--tasks", "Clusters")


def test_a_task_that_fails_does_not_stop_the_others(local, models, tmp_path):
    """Equal similarities have no correlation with anything: NaN is an error, not a result."""
    rows = {"sentence1": ["a cat"] * 5, "sentence2": ["the dog"] * 5, "score": [0.0, 1.0, 2.0, 3.0, 4.0]}
    write_rows(tmp_path / "constant.jsonl", **rows)
    tasks = {"Constant": {"type": "STS", "data": "constant.jsonl"}}
    tasks["Pairs"] = {"type": "PairClassification", "data": str(local / "pairs.jsonl")}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks, sort_keys=False))
    with pytest.raises(SystemExit, match="1 tasks failed:\n  Constant: FloatingPointError: .*nan"):
        run_local(tmp_path, models[0], tmp_path / "out", "--name", "m")
    assert [file.name for file in (tmp_path / "out" / "m").rglob("*.json")] == ["Pairs.json"]
    assert "Pairs" in (tmp_path / "out" / "report.md").read_text()


def test_embeddings_that_are_not_finite_are_an_error(local, tmp_path):
    folder = save_model(tmp_path / "model", 1)
    backbone = SentenceTransformer(folder, device="cpu")[0].auto_model
    # In the range of float16, but the states are not.
    backbone.layer_norm.weight.data.fill_(6e4)
    backbone.save_pretrained(folder)
    with pytest.raises(SystemExit, match="embeddings are not finite.*Set `dtype` to float32"):
        run_local(local, folder, tmp_path / "out", "--tasks", "Pairs", "--dtype", "float16")
    assert not list((tmp_path / "out").rglob("Pairs.json"))


def test_a_model_with_its_own_code_needs_leave(local, tmp_path):
    save_with_its_own_code(tmp_path / "own", tiny_tokenizer())
    flags = [local, str(tmp_path / "own"), tmp_path / "out", "--tasks", "Similarity"]
    with pytest.raises(ValueError, match="trust_remote_code"):
        run_local(*flags)
    assert set(run_local(*flags, "--trust_remote_code", "true")["own"]) == {"Similarity"}


def test_16_bits_on_a_gpu_only_unless_given():
    chosen = [choose_dtype("auto", torch.device(device)) for device in ("cuda", "cpu")]
    assert chosen == [torch.bfloat16, torch.float32]
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16


def test_published_rows_are_consistent():
    """The average of each row of Tables 4 and 5 is that of its types, weighted by their tasks, up to rounding."""
    rows, counts = read_published(TABLES), Counter(benchmark_types("MTEB(eng, v1)").values())
    assert len(rows) == 13
    for name, (*types, average) in rows.items():
        weighted = sum(score * counts[kind] for score, kind in zip(types, TASK_TYPES)) / 56
        assert weighted == pytest.approx(average, abs=0.11), name


def test_published_rows_are_those_of_the_paper(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text().replace("<b>", "").replace("</b>", "")
    for name, row in read_published(TABLES).items():
        digits = 2 if name.endswith("CDE") else 1
        assert "\t".join(f"{score:.{digits}f}" for score in row) in paper, name


def write_results(folder, scores: dict[str, float], data: str = "same") -> None:
    """Results made up, as `Results` writes them."""
    folder.mkdir(exist_ok=True)
    types = benchmark_types("MTEB(eng, v1)") | benchmark_types("MTEB(eng, v2)")
    for task, score in scores.items():
        content = {"task": task, "type": types[task], "metric": "x", "score": score, "settings": {"dataset": data}}
        (folder / f"{task}.json").write_text(json.dumps(content))


def test_the_report_of_another_benchmark_counts_its_tasks(tmp_path):
    types = benchmark_types("MTEB(eng, v2)")
    write_results(tmp_path / "a", dict.fromkeys(types, 0.25))
    lines = write_report(tmp_path, "MTEB(eng, v2)", types, {}).splitlines()
    counts = [int(cell.split("(")[1].strip(") ")) for cell in lines[2].split("|")[2:-1]]
    assert counts == [8, 8, 3, 2, 10, 9, 1, 41] and lines[4] == "| **a** |" + " 25.0 |" * 8


def test_the_report_marks_means_of_some_tasks(tmp_path):
    """Complete columns as numbers, others with the number of their tasks, beside the paper's rows."""
    types = benchmark_types("MTEB(eng, v1)")
    sts = [task for task, kind in types.items() if kind == "STS"]
    some = [task for task, kind in types.items() if kind not in ("Retrieval", "Summarization", "STS")] + ["NQ"]
    write_results(tmp_path / "a", dict.fromkeys(some, 0.25) | dict.fromkeys(sts, 0.5))
    write_results(tmp_path / "b", dict.fromkeys(sts, 0.5))
    write_results(tmp_path / "b", {"STS12": 0.5}, data="other")
    lines = write_report(tmp_path, "MTEB(eng, v1)", types, read_published(TABLES)).splitlines()
    assert "Not all models got the same data for STS12: do not compare them on these." in lines
    # 10 tasks of 50 and 31 of 25 percent.
    assert "| **a** | 25.0 | 25.0 | 25.0 | 25.0 | 25.0 [1] | 50.0 | - | 31.1 [41] |" in lines
    assert "| **b** | - | - | - | - | - | 50.0 | - | 50.0 [10] |" in lines
    assert "| NeoBERT 4096 (paper) | 61.6 | 40.8 | 76.2 | 51.2 | 31.6 | 74.8 | 30.7 | 51.3 |" in lines
    assert "| NeoBERT, CDE (paper) | 82.1 | 50.3 | 86.7 | 57.7 | 56.4 | 82.3 | 31.0 | 66.6 |" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["means"]["a"]["Avg."]["tasks"] == 41 and len(report["published"]) == 13


def test_unknown_tasks_types_and_instructions_are_refused(local, tmp_path):
    given = ["--instructions", str(CONFIGS / "instructions.yaml")]
    refused("STS-12.*STS12", *given, "--tasks", "STS-12")
    refused("Retreival.*Retrieval", *given, "--types", "Retreival")
    refused("No task is selected", *given, "--tasks", "STS12", "--types", "Retrieval")
    refused("{instruction}", *given, "--prompt_template", "query: ")
    refused("leave `separator` out", "--separator", "space", "--prompt_template", "{instruction} ")
    refused("`mteb` is false", *given, "--mteb", "false", "--local_tasks", str(local / "tasks.yaml"))
    for change, message in (
        ({"STS12": None}, "i.yaml"),
        ({"STS-12": "x"}, "'STS-12'.*'STS12'"),
        ({"CQADupstackAndroidRetrieval": "x"}, "CQADupstackAndroidRetrieval"),
        ({"STS12": {"query": "a", "document": "b"}}, "STS12"),
        ({"STS12": {"query": "a", "corpus": "b"}}, "i.yaml"),
    ):
        (tmp_path / "i.yaml").write_text(yaml.safe_dump(INSTRUCTIONS | change))
        refused(message, "--instructions", str(tmp_path / "i.yaml"))
    (tmp_path / "i.yaml").write_text(yaml.safe_dump({key: INSTRUCTIONS[key] for key in INSTRUCTIONS if key != "NQ"}))
    refused("NQ", "--instructions", str(tmp_path / "i.yaml"))


def test_configurations_are_read():
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "eng_v1.yaml"), "--model", "m"])
    assert settings.mteb and settings.max_length == 1024 and settings.dtype == "float16"
    assert (ROOT / settings.instructions).is_file() and [ROOT / file for file in settings.published] == TABLES
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "eng_v2.yaml"), "--model", "m"])
    tasks, instructions = collect_tasks(settings)
    assert len(tasks) == 41 and instructions.keys() == {task.metadata.name for task in tasks}
    assert {entry["query"] for entry in instructions.values()} <= set(
        INSTRUCTIONS.values()
    ) and settings.published == []
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "local.yaml"), "--model", "m"])
    assert not settings.mteb
    example = yaml.safe_load((ROOT / settings.local_tasks).read_text())
    assert [entry["type"] for entry in example.values()] == list(TYPES)


def test_results_need_no_script(local, models, tmp_path):
    """From Python: a task of one's own, any model."""
    model = load_embedding_model(models[0], torch.float32, device="cpu")
    task = make_task(LocalTask("Mine", "PairClassification", local / "pairs.jsonl"))
    encoder = InstructionEncoder(model, "mine", {}, [task])
    settings = {"model": embedding_fingerprint(model)}
    assert evaluate(Results(tmp_path / "mine", settings, encoder), [task], batch_size=8) == {}
    assert json.loads((tmp_path / "mine" / "Mine.json").read_text())["metric"] == "max_ap"
