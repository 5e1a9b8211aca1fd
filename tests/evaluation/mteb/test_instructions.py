"""Instructions for documents, and what stands between an instruction and a text."""

import json

import pytest
import yaml
from sentence_transformers import SentenceTransformer

from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.mteb.encoder import TYPES_WITH_QUERIES
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, benchmark_tasks, build_prompts, read_instructions
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS, record_prompts, refused, run_local


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
    assert result["prompts"] == prompts and result["settings"]["document_prompt"] == prompts["document"]
    # With another one the result would be another.
    with pytest.raises(Exception, match="document_prompt: 'the dog.SEP. .CLS.' there, 'a dog.SEP. .CLS.' now"):
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
        assert result["prompts"] == {"query": prompt, "document": ""}
        assert ("its prompts end with special tokens, not with space" in capsys.readouterr().out) == warned


def test_the_released_instructions_are_the_papers_with_what_each_text_is():
    (settings,) = parse_config(MTEBSettings, args=["--config", str(CONFIGS / "released.yaml"), "--model", "m"])
    assert settings.separator == "special_tokens" and settings.output_dir != "runs/mteb"
    tasks = benchmark_tasks()
    instructions = read_instructions(str(ROOT / settings.instructions), tasks, settings.benchmark)
    for task in tasks:
        entry, paper = instructions[task.metadata.name], INSTRUCTIONS[task.metadata.name]
        if task.metadata.type in TYPES_WITH_QUERIES:
            assert entry.keys() == {"query", "document"}
            assert all(text.startswith(f"{paper} ") and text.endswith(":") for text in entry.values())
        else:
            assert entry == ""
    documents = build_prompts(instructions, tasks, "{instruction}[SEP] [CLS]", "document")
    assert documents["NQ"].endswith("Passage:[SEP] [CLS]")
    assert documents["CQADupstackTexRetrieval"] == documents["CQADupstackRetrieval"] != documents["STS12"] == ""


def test_what_is_refused(search, local, tmp_path):
    flags = ["--mteb", "false", "--local_tasks"]
    refused("set `instruction`", *flags, str(search(instruction=None, document_instruction="x") / "tasks.yaml"))
    sts = {"Alike": {"type": "STS", "data": str(local / "sts.parquet"), "document_instruction": "x"}}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(sts))
    refused("type STS has no documents: leave `document_instruction` out", *flags, str(tmp_path / "tasks.yaml"))
    refused("leave one out", "--separator", "space", "--prompt_template", "{instruction} ")
    for entry, message in (
        ({"query": "a", "document": "b"}, "STS12 is of the type STS and has no documents"),
        ({"query": "a", "corpus": "b"}, "must hold one `Task: instruction` or"),
    ):
        (tmp_path / "i.yaml").write_text(yaml.safe_dump(INSTRUCTIONS | {"STS12": entry}))
        refused(message, "--instructions", str(tmp_path / "i.yaml"))
