"""Real task objects of MTEB(eng, v1), one of each type, with injected data: nothing is downloaded."""

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy

from neobert_hf.evaluation.mteb.encoder import InstructionEncoder, parts_of
from neobert_hf.evaluation.mteb.recipe import benchmark_tasks
from neobert_hf.evaluation.mteb.report import TASK_TYPES
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


def test_real_tasks_of_every_type(models, tmp_path, monkeypatch):
    """Each reads all its texts after the paper's instruction, documents without one; one of them has 12 parts."""
    names = ["Banking77Classification", "RedditClustering", "TwitterURLCorpus", "SciDocsRR", "CQADupstackRetrieval"]
    names += ["STS22", "SummEval"]
    expected = {}
    for task in (task for task in benchmark_tasks() if task.metadata.name in names):
        prompt = INSTRUCTIONS[task.metadata.name] + " "
        asymmetric = task.metadata.type in ("Retrieval", "Reranking")
        for part in parts_of(task):
            monkeypatch.setattr(part, "dataset", None)
            monkeypatch.setattr(part, "data_loaded", False)
            inject(part)
            expected[part.metadata.name] = {("query", prompt), ("document", "")} if asymmetric else {(None, prompt)}
    seen, prompts, encode = record_prompts(monkeypatch), {}, InstructionEncoder.encode

    def record(self, inputs, *, task_metadata, **kwargs):
        seen.clear()
        embeddings = encode(self, inputs, task_metadata=task_metadata, **kwargs)
        role = kwargs.get("prompt_type")
        prompts.setdefault(task_metadata.name, set()).update((role and role.value, prompt) for prompt, _ in seen)
        return embeddings

    monkeypatch.setattr(InstructionEncoder, "encode", record)
    flags = ["--config", str(CONFIGS / "eng_v1.yaml"), "--output_dir", str(tmp_path), "--name", "m"]
    run_mteb.main(["--model", models[0], *flags, "--tasks", *names])
    assert prompts == expected and len(prompts) == 18
    report = (tmp_path / "report.md").read_text()
    (row,) = (line for line in report.splitlines() if line.startswith("| **m** |"))
    assert row.count("[1]") == len(TASK_TYPES) - 1 and all(f"| {name} |" in report for name in names)

    # A part that is finished is not evaluated again.
    (tmp_path / "m" / "CQADupstackRetrieval.json").unlink()
    (tmp_path / "m" / "parts" / "CQADupstackTexRetrieval.json").unlink()
    prompts.clear()
    run_mteb.main(["--model", models[0], *flags, "--tasks", *names])
    assert [*prompts] == ["CQADupstackTexRetrieval"]
    assert (tmp_path / "report.md").read_text() == report
