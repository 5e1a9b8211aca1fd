"""A pair of models, a small task of each local type, and a finished evaluation."""

from pathlib import Path

import pytest
import yaml

from tests.helpers.embedding_runs import record_prompts
from tests.helpers.mteb_tasks import random_texts, run_local, save_model, write_rows


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> list[str]:
    return [save_model(tmp_path_factory.mktemp("model") / "same_name", seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> Path:
    """One small task of each type; the YAML file beside its data."""
    folder = tmp_path_factory.mktemp("local")
    a, b = random_texts(24, seed=1), random_texts(24, seed=2)
    # Half of a text's words suffice to find it, with most models.
    parts = [" ".join(text.split()[: len(text.split()) // 2 + 1]) for text in a]
    write_rows(folder / "search.jsonl", question=parts, document=a)
    write_rows(folder / "more.parquet", document=b)
    negatives = [b[i : i + 4] for i in range(8)]
    write_rows(folder / "rerank.jsonl", query=parts[:8], positive=[[text] for text in a[:8]], negative=negatives)
    write_rows(folder / "sts.parquet", sentence1=a, sentence2=b, score=[float(i % 7) for i in range(24)])
    labels = [len(text) % 3 for text in a + b]
    write_rows(folder / "topics.parquet", text=a + b, label=labels)
    write_rows(folder / "topics_train.parquet", text=[f"{text} mat" for text in a + b], label=labels)
    write_rows(folder / "pairs.jsonl", sentence1=a, sentence2=parts[:12] + b[12:], label=[1] * 12 + [0] * 12)
    search = {"type": "Retrieval", "data": "search.jsonl", "corpus": "more.parquet", "columns": {"query": "question"}}
    tasks = {
        "Search": search | {"instruction": {"query": "the cat sat", "document": "a dog"}},
        "Rerank": {"type": "Reranking", "data": "rerank.jsonl", "instruction": "the dog ran"},
        "Similarity": {"type": "STS", "data": "sts.parquet", "instruction": "on a mat"},
        "Topics": {"type": "Classification", "data": "topics.parquet", "train": "topics_train.parquet"},
        "Clusters": {"type": "Clustering", "data": "topics.parquet"},
        "Pairs": {"type": "PairClassification", "data": "pairs.jsonl"},
    }
    (folder / "tasks.yaml").write_text(yaml.safe_dump(tasks, sort_keys=False))
    return folder


@pytest.fixture(scope="session")
def evaluation(local, models, tmp_path_factory) -> tuple[Path, list[tuple[str | None, str]]]:
    """The first model under the name "m" on all local tasks: the folder, and the texts read, each with its prompt."""
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        seen = record_prompts(patch)
        run_local(local, models[0], folder, "--name", "m")
    return folder, seen


@pytest.fixture(scope="session")
def evaluated(evaluation) -> Path:
    return evaluation[0]
