"""All 56 real task objects of MTEB(eng, v1), with injected data: nothing is downloaded."""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy

from neobert_hf.evaluation.mteb.encoder import InstructionEncoder, parts_of
from neobert_hf.evaluation.mteb.recipe import benchmark_tasks, benchmark_types
from neobert_hf.evaluation.mteb.report import COLUMNS, TASK_TYPES
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS, random_texts, record_prompts, run_mteb


def inject(task) -> None:
    """A few rows in the form that the task has after loading, under its own columns, splits and subsets."""
    one, two = random_texts(24, seed=4), random_texts(24, seed=5)
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
    tasks = [task for task in benchmark_tasks() if names is None or task.metadata.name in names]
    for task in tasks:
        for part in parts_of(task):
            monkeypatch.setattr(part, "dataset", None)
            monkeypatch.setattr(part, "data_loaded", False)
            inject(part)
    seen, prompts, encode = record_prompts(monkeypatch), {}, InstructionEncoder.encode

    def record(self, inputs, *, task_metadata, **kwargs):
        seen.clear()
        embeddings = encode(self, inputs, task_metadata=task_metadata, **kwargs)
        role = kwargs.get("prompt_type")
        prompts.setdefault(task_metadata.name, set()).update((role and role.value, prompt) for prompt, _ in seen)
        return embeddings

    monkeypatch.setattr(InstructionEncoder, "encode", record)
    flags = ["--config", str(CONFIGS / "eng_v1.yaml"), "--output_dir", str(output), "--name", "m"]
    run_mteb.main(["--model", model, *flags, *(["--tasks", *names] if names else [])])
    report = json.loads((output / "report.json").read_text())
    return {"tasks": report["models"]["m"], "types": report["means"]["m"]}, prompts


def expected_prompts(names: Collection[str]) -> dict:
    expected = {}
    for task in (task for task in benchmark_tasks() if task.metadata.name in names):
        prompt = INSTRUCTIONS[task.metadata.name] + " "
        asymmetric = task.metadata.type in ("Retrieval", "Reranking")
        for part in parts_of(task):
            expected[part.metadata.name] = {("query", prompt), ("document", "")} if asymmetric else {(None, prompt)}
    return expected


def test_real_tasks_of_every_type(models, tmp_path, monkeypatch):
    """Also one of 12 parts."""
    names = ["Banking77Classification", "RedditClustering", "TwitterURLCorpus", "SciDocsRR", "CQADupstackRetrieval"]
    names += ["STS22", "SummEval"]
    report, prompts = evaluate_real_tasks(names, models[0], tmp_path, monkeypatch)
    assert set(report["types"]) == {*COLUMNS} and set(report["tasks"]) == set(names)
    assert prompts == expected_prompts(names) and len(prompts) == 18


@pytest.mark.slow
def test_all_56_real_tasks(models, tmp_path, monkeypatch):
    report, prompts = evaluate_real_tasks(None, models[0], tmp_path, monkeypatch)
    assert len(report["tasks"]) == 56 and report["types"]["Avg."]["tasks"] == 56
    counts = Counter(benchmark_types("MTEB(eng, v1)").values())
    assert {kind: report["types"][kind]["tasks"] for kind in TASK_TYPES} == counts
    assert len(prompts) == 67 and prompts == expected_prompts(INSTRUCTIONS)
    assert "[" not in (tmp_path / "report.md").read_text().split("## ")[0].split("Scores in")[0]
