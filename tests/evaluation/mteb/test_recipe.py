"""MTEB evaluation: the whole path on local data, resuming, prompts, the report, and settings that are refused."""

import json
import shutil
from pathlib import Path

import mteb
import pytest
import torch
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from neobert_hf.common.files import FolderInUse, folder_lock
from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.common.results import ResultError
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.local_tasks import TYPES, LocalTask, make_task, read_local_tasks
from neobert_hf.evaluation.mteb.recipe import (
    MTEBSettings,
    benchmark_tasks,
    choose_dtype,
    collect_tasks,
    describe_benchmark,
)
from neobert_hf.evaluation.mteb.report import TASK_TYPES, plot_report, read_published, write_report
from neobert_hf.evaluation.mteb.results import ResultSettings, ResumableEvaluation
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import (
    CONFIGS,
    INSTRUCTIONS,
    random_texts,
    record_prompts,
    refused,
    run_local,
    save_model,
    write_rows,
)
from tests.helpers.other_encoders import save_with_its_own_code
from tests.helpers.small_tokenizer import WORDS, tiny_tokenizer


TABLES = [CONFIGS / "table4.yaml", CONFIGS / "table5.yaml"]


@pytest.fixture
def copied(evaluated, tmp_path) -> Path:
    return shutil.copytree(evaluated.folder, tmp_path / "copied")


def test_every_local_type_is_evaluated_and_models_differ(local, models, evaluated, copied):
    report = run_local(local, models[1], copied, "--batch_size", "7")
    assert report["m"] == evaluated.report["m"] and len(report) == 2
    first, second = (entry["local"] for entry in (report.pop("m"), *report.values()))
    assert {entry["type"] for entry in first.values()} == {entry["type"] for entry in second.values()} == set(TYPES)
    # Chance is below 10 (48 documents), 46 (5 candidates) and about 50.
    assert first["Search"]["score"] > 35 and first["Rerank"]["score"] > 60 and first["Pairs"]["score"] > 80
    for name in ("Search", "Similarity", "Topics", "Clusters"):
        assert first[name]["score"] != second[name]["score"], name
    markdown = (copied / "report.md").read_text()
    assert all(name in markdown for name in [*first, "ndcg_at_10", "m", *report])
    assert (copied / "report.png").stat().st_size > 10_000
    assert not list(copied.rglob("*.partial"))


def test_relevant_document_is_the_one_of_the_same_row(models, tmp_path):
    documents = sorted(set(random_texts(40, seed=3)))
    write_rows(tmp_path / "same.jsonl", query=documents, document=documents)
    write_rows(tmp_path / "wrong.jsonl", query=documents, document=documents[1:] + documents[:1])
    tasks = {name: {"type": "Retrieval", "data": f"{name}.jsonl"} for name in ("same", "wrong")}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    (report,) = run_local(tmp_path, models[0], tmp_path / "out").values()
    scores = {name: entry["score"] for name, entry in report["local"].items()}
    # Word order apart, equal texts have equal embeddings.
    assert scores["same"] > 99 and scores["wrong"] < 50


def test_sts_equals_a_plain_computation(local, models, evaluated):
    from scipy.stats import spearmanr

    rows = Dataset.from_parquet(str(local / "sts.parquet"))
    model = SentenceTransformer(models[0], device="cpu")
    first, second = (model.encode(rows[column], prompt="on a mat ") for column in ("sentence1", "sentence2"))
    expected = spearmanr(model.similarity_pairwise(first, second), rows["score"]).statistic
    assert evaluated.report["m"]["local"]["Similarity"]["score"] == pytest.approx(100 * expected, abs=1e-3)


def test_scores_are_those_of_mteb_itself(local, models, evaluated, tmp_path):
    """Its own wrapper, where there are no instructions to differ in."""
    tasks = yaml.safe_load((local / "tasks.yaml").read_text())
    instructed = [name for name, entry in tasks.items() if entry.pop("instruction", None)]
    for entry in tasks.values():
        entry |= {part: str(local / entry[part]) for part in ("data", "corpus", "train") if part in entry}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    again = run_local(tmp_path, models[0], tmp_path / "out", "--name", "m", "--tasks", *instructed)
    ours = evaluated.report["m"]["local"] | again["m"]["local"]
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


def test_second_model_does_not_get_the_scores_of_the_first(local, models, copied):
    """Neither under a name of its own (above) nor under the same."""
    (copied / "m" / "Search.json").unlink()
    before = (copied / "m" / "Pairs.json").read_text()
    # Nor may its other tasks stand beside those of the first in one row.
    for task in ("Pairs", "Search"):
        with pytest.raises(SettingsMismatch, match="model: .* there, .* now"):
            run_local(local, models[1], copied, "--name", "m", "--tasks", task)
    assert (copied / "m" / "Pairs.json").read_text() == before and not (copied / "m" / "Search.json").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--dtype", "bfloat16"], "dtype: 'float32' there, 'bfloat16' now"),
        (["--max_length", "8"], "max_length: 64 there, 8 now"),
        (["--truncate_dim", "32"], "truncate_dim: None there, 32 now"),
        (["--prompt_template", "the {instruction} "], "prompt: 'on a mat ' there, 'the on a mat ' now"),
    ],
)
def test_results_of_other_settings_are_refused(local, models, copied, flags, message):
    with pytest.raises(SettingsMismatch, match=message):
        run_local(local, models[0], copied, "--name", "m", "--tasks", "Similarity", *flags)


def test_results_of_other_data_are_refused(local, models, copied, tmp_path):
    shutil.copytree(local, tmp_path / "data")
    flags = ["--name", "m", "--tasks", "Pairs"]
    run_local(tmp_path / "data", models[0], copied, *flags)
    # The same number of bytes.
    text = (tmp_path / "data" / "pairs.jsonl").read_text()
    (tmp_path / "data" / "pairs.jsonl").write_text(text.replace("cat", "dog"))
    with pytest.raises(SettingsMismatch, match="dataset: "):
        run_local(tmp_path / "data", models[0], copied, *flags)


def test_the_result_of_another_type_is_refused(models, tmp_path):
    """Of the same columns of the same file; its name said STS, and the score was the correlation."""
    first, second = random_texts(8, seed=1), random_texts(8, seed=2)
    write_rows(tmp_path / "p.jsonl", sentence1=first, sentence2=second, score=[0, 1] * 4, label=[0, 1] * 4)
    for task_type in ("STS", "PairClassification"):
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"Mine": {"type": task_type, "data": "p.jsonl"}}))
        if task_type == "STS":
            run_local(tmp_path, models[0], tmp_path / "out", "--name", "m")
    with pytest.raises(SettingsMismatch, match="type: 'STS' there, 'PairClassification' now"):
        run_local(tmp_path, models[0], tmp_path / "out", "--name", "m")


def test_what_is_no_result_is_named(local, models, copied):
    (copied / "m" / "Pairs.json").write_text('{"task": "Pairs"}')
    with pytest.raises(ResultError, match="Pairs.json is not a result"):
        run_local(local, models[0], copied, "--name", "m", "--tasks", "Pairs")


def test_a_task_that_another_process_works_on_is_refused(local, models, tmp_path):
    """Other tasks of the same model may run beside it, as on several GPUs."""
    with folder_lock(tmp_path / "m" / "Similarity"), pytest.raises(FolderInUse, match="m/Similarity is being written"):
        run_local(local, models[0], tmp_path, "--name", "m")
    with folder_lock(tmp_path / "m" / "Topics"), pytest.raises(OSError, match="nowhere"):
        run_local(local, "/nowhere", tmp_path, "--name", "m", "--tasks", "Similarity")


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


def test_pooling_is_float32_in_a_16_bit_model(models):
    model = load_embedding_model(models[0], torch.bfloat16, device="cpu")
    assert model[0].auto_model.dtype == torch.bfloat16
    sentences = random_texts(6)
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
    chosen = [choose_dtype("auto", torch.device(device)) for device in ("cuda", "cpu")]
    assert chosen == [torch.bfloat16, torch.float32]
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16


def test_float16_sums_do_not_overflow(tmp_path):
    """States of a few thousand, of which the sum over a text is beyond float16."""
    folder = save_model(tmp_path, 1)
    backbone = SentenceTransformer(folder, device="cpu")[0].auto_model
    backbone.layer_norm.weight.data.fill_(3e3)
    backbone.save_pretrained(folder)
    sentences = [" ".join(WORDS[:10] * 5)]
    exact = load_embedding_model(folder, torch.float32, device="cpu").encode(sentences, convert_to_tensor=True)
    half = load_embedding_model(folder, torch.float16, device="cpu").encode(sentences, convert_to_tensor=True)
    assert 50 * exact.abs().max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(half, exact, rtol=0.05, atol=30)


def test_embeddings_that_are_not_finite_are_an_error(local, tmp_path):
    folder = save_model(tmp_path / "model", 1)
    backbone = SentenceTransformer(folder, device="cpu")[0].auto_model
    # In the range of float16, but the states are not.
    backbone.layer_norm.weight.data.fill_(6e4)
    backbone.save_pretrained(folder)
    with pytest.raises(SystemExit, match="embeddings are not finite.*Set `dtype` to float32"):
        run_local(local, folder, tmp_path / "out", "--tasks", "Pairs", "--dtype", "float16")
    assert not list((tmp_path / "out").rglob("Pairs.json"))


def test_fingerprint_knows_weights_architecture_and_tokenizer(models, tmp_path):
    first = embedding_fingerprint(SentenceTransformer(models[0], device="cpu"))
    shutil.copytree(models[0], tmp_path / "elsewhere")
    assert embedding_fingerprint(SentenceTransformer(str(tmp_path / "elsewhere"), device="cpu")) == first
    others = [SentenceTransformer(models[1], device="cpu")]
    for change in range(5):
        model = SentenceTransformer(models[0], device="cpu")
        if change == 0:
            model[0].auto_model.config.norm_eps = 1e-3
        elif change == 1:
            model[0].auto_model.layer_norm.weight.data[0] += 1e-3
        elif change == 2:
            model.prompts = {"query": "the "}
        elif change == 3:
            model.truncate_dim = 8
        else:
            model[1] = type(model[1])(64, pooling_mode="cls")
        others.append(model)
    prints = [embedding_fingerprint(model) for model in others]
    assert len({first, *prints}) == 7


def test_models_that_are_refused_and_one_that_needs_its_own_code(local, tmp_path):
    SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=8)]).save(str(tmp_path / "static"))
    with pytest.raises(ValueError, match="static begins with StaticEmbedding; this needs .* a Transformers encoder"):
        run_local(local, str(tmp_path / "static"), tmp_path / "out", "--tasks", "Similarity")
    save_with_its_own_code(tmp_path / "own", tiny_tokenizer())
    flags = [local, str(tmp_path / "own"), tmp_path / "out", "--tasks", "Similarity"]
    with pytest.raises(ValueError, match="trust_remote_code"):
        run_local(*flags)
    assert not list((tmp_path / "out").rglob("Pairs.json"))
    (report,) = run_local(*flags, "--trust_remote_code", "true").values()
    assert set(report["local"]) == {"Similarity"}


def test_model_with_its_own_prompts(local, models, tmp_path, monkeypatch, capsys):
    """Used by tasks without an instruction, kept away from others, and another one is said aloud."""
    prompts = {"query": "a cat ", "document": "the dog ", "here": "on a mat "}
    model = SentenceTransformer(models[0], device="cpu", prompts=prompts, default_prompt_name="query")
    model.save(str(tmp_path / "model"))
    seen = record_prompts(monkeypatch)
    tasks = {name: yaml.safe_load((local / "tasks.yaml").read_text())[name] for name in ("Search", "Similarity")}
    tasks["Search"] |= {"data": str(local / "search.jsonl"), "corpus": str(local / "more.parquet")}
    # The other task has an instruction each time.
    tasks["Similarity"] |= {"data": str(local / "sts.parquet"), "instruction": "the cat"}
    noted = "note: {} gets the prompt {!r}; the model's own is {!r}."
    noted += " {} of 2 tasks get a prompt that is not the model's.\n"
    also = noted.format("Similarity (text)", "the cat ", "", 1)
    for number, (instruction, query, document, note) in enumerate(
        (
            (None, "a cat ", "the dog ", also),
            ("on a mat\n", "on a mat ", "", noted.format("Search (document)", "", "the dog ", 2)),
            ("", "", "", noted.format("Search (query)", "", "a cat ", 2)),
            ("the dog ran", "the dog ran ", "", noted.format("Search (query)", "the dog ran ", "a cat ", 2)),
        )
    ):
        tasks["Search"]["instruction"] = instruction
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
        seen.clear()
        capsys.readouterr()
        output = tmp_path / f"out{number}"
        run_local(tmp_path, str(tmp_path / "model"), output, "--name", "m")
        assert {prompt for prompt, _ in seen} - {"the cat "} == {query, document}
        stored = {name: json.loads((output / "m" / f"{name}.json").read_text())["prompts"] for name in tasks}
        assert stored == {"Search": {"query": query, "document": document}, "Similarity": {"text": "the cat "}}
        assert note in capsys.readouterr().out


def test_a_task_that_is_called_like_a_dataset_of_the_training_has_its_prompt(models):
    """As in MTEB's own wrapper, except that documents have none."""
    model = SentenceTransformer(models[0], device="cpu")
    model.prompts = {"MSMARCO-document": "", "MSMARCO": "Find. ", "STS12": "Alike? ", "query": "Ask. ", "document": ""}
    encoder = InstructionEncoder(model, "m", {})
    tasks = {task.metadata.name: task.metadata for task in benchmark_tasks()}
    assert encoder.prompts_of(tasks["MSMARCO"]) == {"query": "Find. ", "document": ""}
    model.prompts |= {"MSMARCO-document": "Page: ", "document": "Text: "}
    assert encoder.prompts_of(tasks["MSMARCO"]) == {"query": "Find. ", "document": "Page: "}
    del model.prompts["MSMARCO-document"]
    assert encoder.prompts_of(tasks["MSMARCO"]) == {"query": "Find. ", "document": "Text: "}
    model.prompts["document"] = ""
    assert encoder.prompts_of(tasks["NQ"]) == {"query": "Ask. ", "document": ""}
    assert encoder.prompts_of(tasks["STS12"]) == {"text": "Alike? "} != encoder.prompts_of(tasks["STS13"])
    assert encoder.note(list(tasks.values())) == ""


def test_only_queries_get_the_instruction(local, evaluated):
    for file, column, prompt in (("search", "question", "the cat sat "), ("rerank", "query", "the dog ran ")):
        queries = {json.loads(line)[column] for line in (local / f"{file}.jsonl").read_text().splitlines()}
        assert {text for before, text in evaluated.seen if before == prompt} == queries
    # Documents get an empty one; tasks without an instruction are left to the model.
    assert {before for before, _ in evaluated.seen} == {"the cat sat ", "the dog ran ", "on a mat ", "", None}
    sentences = Dataset.from_parquet(str(local / "sts.parquet"))
    instructed = [text for before, text in evaluated.seen if before == "on a mat "]
    assert sorted(instructed) == sorted([*sentences["sentence1"], *sentences["sentence2"]])


def test_published_rows_are_consistent():
    """The average of each row of Tables 4 and 5 is that of its types, weighted by their tasks, up to rounding."""
    rows, counts = read_published(TABLES), describe_benchmark("MTEB(eng, v1)").counts
    assert len(rows) == 13
    for name, (*types, average) in rows.items():
        weighted = sum(score * counts[kind] for score, kind in zip(types, TASK_TYPES)) / 56
        assert weighted == pytest.approx(average, abs=0.11), name


def test_published_rows_are_those_of_the_paper(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text().replace("<b>", "").replace("</b>", "")
    for name, row in read_published(TABLES).items():
        digits = 2 if name.endswith("CDE") else 1
        assert "\t".join(f"{score:.{digits}f}" for score in row) in paper, name


def test_the_report_of_another_benchmark_counts_its_tasks(tmp_path):
    (tmp_path / "a").mkdir()
    for task in benchmark_tasks("MTEB(eng, v2)"):
        content = {"task": task.metadata.name, "type": task.metadata.type, "metric": "x", "score": 0.25}
        content |= {"settings": {"dataset": "x"}, "result": {}}
        (tmp_path / "a" / f"{task.metadata.name}.json").write_text(json.dumps(content))
    lines = write_report(tmp_path, describe_benchmark("MTEB(eng, v2)"), {}).splitlines()
    counts = [int(cell.split("(")[1].strip(") ")) for cell in lines[2].split("|")[2:-1]]
    assert counts == [8, 8, 3, 2, 10, 9, 1, 41] and lines[4] == "| **a** |" + " 25.0 |" * 8


def test_report_marks_means_of_some_tasks(tmp_path):
    """With results made up: complete columns as numbers, others with the number of their tasks."""
    for task in benchmark_tasks():
        kind = task.metadata.type
        if kind == "Retrieval" and task.metadata.name != "NQ" or kind == "Summarization":
            continue
        score = 0.5 if kind == "STS" else 0.25
        for model in ("a", "b") if kind == "STS" else ("a",):
            content = {"task": task.metadata.name, "type": kind, "metric": "x", "score": score}
            (tmp_path / model).mkdir(exist_ok=True)
            content |= {"settings": {"dataset": model if task.metadata.name == "STS12" else "same"}, "result": {}}
            (tmp_path / model / f"{task.metadata.name}.json").write_text(json.dumps(content))
    published = read_published(TABLES)
    lines = write_report(tmp_path, describe_benchmark("MTEB(eng, v1)"), published).splitlines()
    assert "Not all models got the same data for STS12: do not compare them on these." in lines
    (a,) = (line for line in lines if line.startswith("| **a**"))
    (b,) = (line for line in lines if line.startswith("| **b**"))
    # 10 tasks of 50 and 31 of 25 percent.
    assert a == "| **a** | 25.0 | 25.0 | 25.0 | 25.0 | 25.0 [1] | 50.0 | - | 31.1 [41] |"
    assert b == "| **b** | - | - | - | - | - | 50.0 | - | 50.0 [10] |"
    assert "| NeoBERT 4096 (paper) | 61.6 | 40.8 | 76.2 | 51.2 | 31.6 | 74.8 | 30.7 | 51.3 |" in lines
    assert "| NeoBERT, CDE (paper) | 82.1 | 50.3 | 86.7 | 57.7 | 56.4 | 82.3 | 31.0 | 66.6 |" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["models"]["a"]["types"]["Avg."]["tasks"] == 41 and len(report["published"]) == 13
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_that_is_called_like_a_published_one_has_its_own_bars(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("neobert_hf.evaluation.mteb.report.write_png", lambda file, figure: figures.append(figure))
    model = {"types": {"Avg.": {"mean": 50.0, "tasks": 56}}, "tasks": {"STS12": {}}, "local": {}}
    plot_report(
        tmp_path / "report.png", {"BERT base": model}, {"BERT base": [10.0] * 8}, describe_benchmark("MTEB(eng, v1)")
    )
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["BERT base (paper)", "BERT base"]
    assert [[bar.get_height() for bar in bars][-1] for bars in axes.containers] == [10.0, 50.0]


def test_an_empty_name_is_refused():
    refused("give the model a `name`", "--name", "./")


def test_unknown_tasks_and_types():
    instructions = ["--instructions", str(CONFIGS / "instructions.yaml")]
    refused("Unknown task 'STS-12'; did you mean 'STS12'", *instructions, "--tasks", "STS-12")
    refused("Unknown type 'Retreival'; did you mean 'Retrieval'", *instructions, "--types", "Retreival")
    refused("None of .* tasks is selected", *instructions, "--tasks", "STS12", "--types", "Retrieval")
    refused("None of 0 tasks is selected", "--mteb", "false")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"STS12": None}, "must hold one"),
        ({"STS-12": "x"}, "'STS-12' is not a task of MTEB.eng, v1.; did you mean 'STS12'"),
        ({"CQADupstackAndroidRetrieval": "x"}, "'CQADupstackAndroidRetrieval' is not a task"),
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
    refused("MTEB's have none", "--local_tasks", str(local / "tasks.yaml"))
    refused("`mteb` is false", *flags, "--mteb", "false", "--local_tasks", str(local / "tasks.yaml"))


def test_configurations_are_read():
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "eng_v1.yaml"), "--model", "m"])
    assert settings.mteb and settings.max_length == 1024 and settings.dtype == "float16"
    assert (ROOT / settings.instructions).is_file() and [ROOT / file for file in settings.published] == TABLES
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "eng_v2.yaml"), "--model", "m"])
    tasks, instructions = collect_tasks(settings)
    assert len(tasks) == 41 and instructions.keys() == {task.metadata.name for task in tasks}
    assert set(instructions.values()) <= set(INSTRUCTIONS.values()) and settings.published == []
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "local.yaml"), "--model", "m"])
    assert not settings.mteb
    example = yaml.safe_load((ROOT / settings.local_tasks).read_text())
    assert [entry["type"] for entry in example.values()] == list(TYPES)


def test_results_need_no_script(local, models, tmp_path):
    """From Python: a task of one's own, any model."""
    model = load_embedding_model(models[0], torch.float32, device="cpu")
    task = make_task(LocalTask("Mine", "PairClassification", local / "pairs.jsonl"))
    encoder = InstructionEncoder(model, "mine", {"Mine": ""})
    settings = ResultSettings(embedding_fingerprint(model), "float32", model.max_seq_length, None)
    evaluation = ResumableEvaluation(tmp_path / "mine", settings, encoder)
    assert evaluation.run([task], batch_size=8) == {}
    assert json.loads((tmp_path / "mine" / "Mine.json").read_text())["metric"] == "max_ap"
