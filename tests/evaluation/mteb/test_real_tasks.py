"""Real task objects of MTEB(eng, v1) that no local task is like, with injected data: nothing is downloaded."""

from datasets import Dataset, DatasetDict

from neobert_hf.evaluation.mteb.encoder import InstructionEncoder, parts_of
from neobert_hf.evaluation.mteb.recipe import benchmark_tasks
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS, random_texts, record_prompts, run_mteb


def inject(task) -> None:
    """A few rows in the form that the task has after loading, under its own columns, splits and subsets."""
    one, two = random_texts(24, seed=4), random_texts(24, seed=5)
    if task.metadata.type == "Retrieval":
        split = {
            "queries": Dataset.from_dict({"id": [f"q{i}_0" for i in range(6)], "text": one[:6]}),
            "corpus": Dataset.from_dict({"id": [f"d{i}" for i in range(24)], "title": two, "text": one}),
            "relevant_docs": {f"q{i}_0": {f"d{i}": 1, f"d{i + 6}": 1} for i in range(6)},
            "top_ranked": None,
        }
    elif task.metadata.type == "STS":
        split = {task.column_names[0]: one, task.column_names[1]: two, "score": [i % 5 for i in range(24)]}
    else:
        assert task.metadata.type == "Summarization"
        split = {"text": one[:3], "human_summaries": [one[:2]] * 3, "machine_summaries": [two[:4]] * 3}
        split["relevance"] = [[1, 2, 3, 4], [2, 1, 4, 3], [4, 3, 1, 2]]
    if task.metadata.type == "Retrieval":
        task.dataset = dict.fromkeys(task.hf_subsets, dict.fromkeys(task.eval_splits, split))
    else:
        splits = DatasetDict(dict.fromkeys(task.eval_splits, Dataset.from_dict(split)))
        task.dataset = dict.fromkeys(task.hf_subsets, splits) if task.metadata.is_multilingual else splits
    task.data_loaded = True


def test_real_tasks_with_parts_subsets_and_summaries(models, tmp_path, monkeypatch):
    """Each reads all its texts after the paper's instruction, documents without one; one of them has 12 parts."""
    names, expected = ["CQADupstackRetrieval", "STS22", "SummEval"], {}
    for task in (task for task in benchmark_tasks() if task.metadata.name in names):
        prompt = INSTRUCTIONS[task.metadata.name] + " "
        asymmetric = task.metadata.type == "Retrieval"
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
    assert prompts == expected and len(prompts) == 14
    report = (tmp_path / "report.md").read_text()
    (row,) = (line for line in report.splitlines() if line.startswith("| **m** |"))
    assert row.count("[1]") == 2 and all(f"| {name} |" in report for name in names)

    # A part that is finished is not evaluated again.
    (tmp_path / "m" / "CQADupstackRetrieval.json").unlink()
    (tmp_path / "m" / "parts" / "CQADupstackTexRetrieval.json").unlink()
    prompts.clear()
    run_mteb.main(["--model", models[0], *flags, "--tasks", *names])
    assert [*prompts] == ["CQADupstackTexRetrieval"]
    assert (tmp_path / "report.md").read_text() == report
