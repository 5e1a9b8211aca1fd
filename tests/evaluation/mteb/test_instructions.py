"""Instructions and prompts: which texts have them, what stands between the two, and the paper's own sentences."""

import json

import pytest
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.mteb.encoder import TYPES_WITH_QUERIES, InstructionEncoder
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, benchmark_tasks, build_prompts, read_instructions
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS, record_prompts, run_local


def test_only_the_texts_that_an_instruction_is_for_get_it(local, evaluation):
    folder, seen = evaluation

    def texts(prompt: str) -> set[str]:
        return {text for before, text in seen if before == prompt}

    for file, column, prompt in (("search", "question", "the cat sat "), ("rerank", "query", "the dog ran ")):
        assert texts(prompt) == {
            json.loads(line)[column] for line in (local / f"{file}.jsonl").read_text().splitlines()
        }
    sentences = Dataset.from_parquet(str(local / "sts.parquet"))
    assert texts("on a mat ") == {*sentences["sentence1"], *sentences["sentence2"]}
    # Documents have one of their own or none; tasks without an instruction are left to the model.
    assert {before for before, _ in seen} == {"the cat sat ", "a dog ", "the dog ran ", "on a mat ", "", None}
    stored = json.loads((folder / "m" / "Search.json").read_text())["settings"]
    assert stored["prompts"] == {"query": "the cat sat ", "document": "a dog "}


@pytest.mark.parametrize(
    "instruction, flags, query, document",
    [
        (None, [], "a cat[SEP] [CLS]", "the dog[SEP] [CLS]"),
        ("on a mat\n", [], "on a mat[SEP] [CLS]", ""),
        ("on a mat", ["--separator", "space"], "on a mat ", ""),
        ("", [], "", ""),
    ],
)
def test_a_model_has_its_own_prompts_and_its_separator_unless_told_otherwise(
    local, models, tmp_path, monkeypatch, instruction, flags, query, document
):
    prompts = {"query": "a cat[SEP] [CLS]", "document": "the dog[SEP] [CLS]"}
    SentenceTransformer(models[0], device="cpu", prompts=prompts).save(str(tmp_path / "model"))
    task = yaml.safe_load((local / "tasks.yaml").read_text())["Search"]
    task |= {"data": str(local / "search.jsonl"), "corpus": str(local / "more.parquet"), "instruction": instruction}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"Search": task}))
    seen = record_prompts(monkeypatch)
    run_local(tmp_path, str(tmp_path / "model"), tmp_path / "out", "--name", "m", *flags)
    assert {before for before, _ in seen} == {query, document}
    stored = json.loads((tmp_path / "out" / "m" / "Search.json").read_text())["settings"]["prompts"]
    assert stored == {"query": query, "document": document}


def test_a_task_that_is_called_like_a_dataset_of_the_training_has_its_prompt(models):
    """As in MTEB's own wrapper, except that documents have none."""
    model = SentenceTransformer(models[0], device="cpu")
    model.prompts = {"MSMARCO-document": "", "MSMARCO": "Find. ", "STS12": "Alike? ", "query": "Ask. ", "document": ""}
    encoder = InstructionEncoder(model, "m", {})
    tasks = {task.metadata.name: task.metadata for task in benchmark_tasks()}
    assert encoder.prompts_of(tasks["MSMARCO"]) == {"query": "Find. ", "document": ""}
    del model.prompts["MSMARCO-document"]
    model.prompts["document"] = "Text: "
    assert encoder.prompts_of(tasks["MSMARCO"]) == {"query": "Find. ", "document": "Text: "}
    assert encoder.prompts_of(tasks["NQ"]) == {"query": "Ask. ", "document": "Text: "}
    assert encoder.prompts_of(tasks["STS12"]) == {"text": "Alike? "} != encoder.prompts_of(tasks["STS13"])


def test_the_instructions_of_all_56_tasks_are_the_words_of_the_paper(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text().replace(" .", ".")
    tasks = benchmark_tasks()
    instructions = read_instructions(str(CONFIGS / "instructions.yaml"), tasks)
    assert len(tasks) == 56 and instructions == {task: {"query": text} for task, text in INSTRUCTIONS.items()}
    for task, text in INSTRUCTIONS.items():
        name = task.split("Clustering")[0]
        if "Clustering" in task and name != "TwentyNewsgroups":
            text = text.replace(f" {name} ", " <dataset> ")
        assert text in paper, task
    prompts = build_prompts(instructions, tasks, " ")
    parts = [name for name in prompts if name.startswith("CQADupstack") and name != "CQADupstackRetrieval"]
    assert len(parts) == 12 and len(prompts) == 68
    assert all(prompts[part]["query"] == INSTRUCTIONS["CQADupstackRetrieval"] + " " for part in parts)


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
    assert build_prompts(instructions, tasks, "[SEP] [CLS]")["NQ"]["document"].endswith("Passage:[SEP] [CLS]")
