"""Instructions for documents, and what stands between an instruction and a text."""

import json

import pytest
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.mteb.encoder import TYPES_WITH_QUERIES, InstructionEncoder
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, benchmark_tasks, build_prompts, read_instructions
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS, record_prompts, run_local


@pytest.fixture
def search(local, tmp_path):
    """A file with one task, with changes."""

    def write(**changes):
        task = yaml.safe_load((local / "tasks.yaml").read_text())["Search"]
        task |= {"data": str(local / "search.jsonl"), "corpus": str(local / "more.parquet")} | changes
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"Search": task}))
        return tmp_path

    return write


def test_documents_have_an_instruction_of_their_own(search, models, tmp_path, monkeypatch):
    seen = record_prompts(monkeypatch)
    folder = search(instruction="a cat", document_instruction="the dog")
    flags = ("--separator", "special_tokens", "--name", "m")
    run_local(folder, models[0], tmp_path / "out", *flags)
    prompts = {"query": "a cat[SEP] [CLS]", "document": "the dog[SEP] [CLS]"}
    assert {before for before, _ in seen} == set(prompts.values())
    result = json.loads((tmp_path / "out/m/Search.json").read_text())
    assert result["settings"]["prompts"] == prompts
    # With another one the result would be another.
    with pytest.raises(SettingsMismatch, match="\\n  prompts.document: "):
        run_local(search(instruction="a cat", document_instruction="a dog"), models[0], tmp_path / "out", *flags)


def test_the_separator_is_that_of_the_models_own_prompts_or_said_aloud(search, models, tmp_path, capsys):
    model = SentenceTransformer(models[0], device="cpu", prompts={"query": "a cat[SEP] [CLS]", "document": ""})
    model.save(str(tmp_path / "model"))
    folder = search(instruction="on a mat")
    for number, (flags, prompt, warned) in enumerate(
        (
            ((), "on a mat[SEP] [CLS]", False),
            (("--separator", "space"), "on a mat ", True),
            (("--prompt_template", "the {instruction}: "), "the on a mat: ", True),
        )
    ):
        run_local(folder, str(tmp_path / "model"), tmp_path / str(number), "--name", "m", *flags)
        result = json.loads((tmp_path / str(number) / "m" / "Search.json").read_text())
        assert result["settings"]["prompts"] == {"query": prompt, "document": ""}
        assert ("its prompts end with special tokens, not with space" in capsys.readouterr().out) == warned


def test_the_released_instructions_are_the_papers_with_what_each_text_is():
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "released.yaml"), "--model", "m"])
    assert settings.separator == "special_tokens" and settings.output_dir != "runs/mteb"
    tasks = benchmark_tasks()
    instructions = read_instructions(str(ROOT / settings.instructions), tasks)
    for task in tasks:
        entry, paper = instructions[task.metadata.name], INSTRUCTIONS[task.metadata.name]
        if task.metadata.type in TYPES_WITH_QUERIES:
            assert entry.keys() == {"query", "document"}
            assert all(text.startswith(f"{paper} ") and text.endswith(":") for text in entry.values())
        else:
            assert entry == {"query": ""}
    prompts = build_prompts(instructions, tasks, "{instruction}[SEP] [CLS]")
    documents = {name: prompt["document"] for name, prompt in prompts.items()}
    assert documents["NQ"].endswith("Passage:[SEP] [CLS]")
    assert documents["CQADupstackTexRetrieval"] == documents["CQADupstackRetrieval"] != documents["STS12"] == ""


def test_only_queries_get_the_instruction(local, evaluated):
    for file, column, prompt in (("search", "question", "the cat sat "), ("rerank", "query", "the dog ran ")):
        queries = {json.loads(line)[column] for line in (local / f"{file}.jsonl").read_text().splitlines()}
        assert {text for before, text in evaluated.seen if before == prompt} == queries
    # Documents get an empty one; tasks without an instruction are left to the model.
    assert {before for before, _ in evaluated.seen} == {"the cat sat ", "the dog ran ", "on a mat ", "", None}
    sentences = Dataset.from_parquet(str(local / "sts.parquet"))
    instructed = [text for before, text in evaluated.seen if before == "on a mat "]
    assert sorted(instructed) == sorted([*sentences["sentence1"], *sentences["sentence2"]])


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
        files = {name: json.loads((output / "m" / f"{name}.json").read_text()) for name in tasks}
        stored = {name: content["settings"]["prompts"] for name, content in files.items()}
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
