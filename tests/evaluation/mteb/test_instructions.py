"""Instructions and prompts: which texts have them, what stands between the two, and the paper's own sentences."""

import json

import pytest
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.mteb.encoder import TYPES_WITH_QUERIES, InstructionEncoder, parts_of
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, benchmark_tasks, read_instructions
from tests.helpers.embedding_runs import record_prompts
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS, random_texts, run_local, run_mteb


def test_only_the_texts_that_an_instruction_is_for_get_it(local, evaluation):
    folder, seen = evaluation

    def texts(prompt: str) -> set[str]:
        return {text for before, text in seen if before == prompt}

    for file, column, prompt in (("search", "question", "the cat sat "), ("rerank", "query", "the dog ran ")):
        assert texts(prompt) == {
            json.loads(line)[column] for line in (local / f"{file}.jsonl").read_text().splitlines()
        }
    # Documents of the corpus as well; the two sentences of each row.
    assert texts("a dog ") == texts("on a mat ") == {*random_texts(24, seed=1), *random_texts(24, seed=2)}
    # Documents have one of their own or none; tasks without an instruction are left to the model.
    assert {before for before, _ in seen} == {"the cat sat ", "a dog ", "the dog ran ", "on a mat ", "", None}
    stored = json.loads((folder / "m" / "Search.json").read_text())["identity"]
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
    stored = json.loads((tmp_path / "out" / "m" / "Search.json").read_text())["identity"]["prompts"]
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


def inject(monkeypatch, task) -> None:
    """A few rows in the form that a real task has after loading: nothing is downloaded."""
    one, two = random_texts(24, seed=4), random_texts(24, seed=5)
    if task.metadata.type == "Retrieval":
        split = {
            "queries": Dataset.from_dict({"id": [f"q{i}_0" for i in range(6)], "text": one[:6]}),
            "corpus": Dataset.from_dict({"id": [f"d{i}" for i in range(24)], "title": two, "text": one}),
            "relevant_docs": {f"q{i}_0": {f"d{i}": 1, f"d{i + 6}": 1} for i in range(6)},
            "top_ranked": None,
        }
    else:
        columns = {task.column_names[0]: one, task.column_names[1]: two, "score": [i % 5 for i in range(24)]}
        split = Dataset.from_dict(columns)
    subsets = dict.fromkeys(task.hf_subsets, dict.fromkeys(task.eval_splits, split))
    monkeypatch.setattr(task, "dataset", subsets)
    monkeypatch.setattr(task, "data_loaded", True)


def test_tasks_with_parts_or_subsets_have_the_papers_instruction_everywhere(models, tmp_path, monkeypatch):
    """CQADupstack has 12 parts; a part that is finished is not evaluated again."""
    names, prompts, encode = ["CQADupstackRetrieval", "STS22"], {}, InstructionEncoder.encode
    expected = {"STS22": {(None, INSTRUCTIONS["STS22"] + " ")}}
    for task in (task for task in benchmark_tasks() if task.metadata.name in names):
        for part in parts_of(task):
            inject(monkeypatch, part)
            of_queries = ("query", INSTRUCTIONS["CQADupstackRetrieval"] + " ")
            expected.setdefault(part.metadata.name, {of_queries, ("document", "")})
    seen = record_prompts(monkeypatch)

    def record(self, inputs, *, task_metadata, prompt_type=None, **kwargs):
        seen.clear()
        embeddings = encode(self, inputs, task_metadata=task_metadata, prompt_type=prompt_type, **kwargs)
        kinds = {(prompt_type and prompt_type.value, prompt) for prompt, _ in seen}
        prompts.setdefault(task_metadata.name, set()).update(kinds)
        return embeddings

    monkeypatch.setattr(InstructionEncoder, "encode", record)
    flags = ["--config", str(CONFIGS / "eng_v1.yaml"), "--output_dir", str(tmp_path), "--name", "m"]
    run_mteb.main(["--model", models[0], *flags, "--tasks", *names])
    assert prompts == expected and len(prompts) == 13
    report = (tmp_path / "report.md").read_text()
    (row,) = (line for line in report.splitlines() if line.startswith("| **m** |"))
    assert row.count("[1]") == 2 and all(f"| {name} |" in report for name in names)
    (tmp_path / "m" / "CQADupstackRetrieval.json").unlink()
    (tmp_path / "m" / "parts" / "CQADupstackTexRetrieval.json").unlink()
    prompts.clear()
    run_mteb.main(["--model", models[0], *flags, "--tasks", *names])
    assert [*prompts] == ["CQADupstackTexRetrieval"]
    assert (tmp_path / "report.md").read_text() == report
