"""Contextual models on MTEB tasks: one context a task and subset, made before its queries are encoded."""

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer

from neobert_hf.embeddings.contextual import build_contextual_encoder, embed_context
from neobert_hf.evaluation.mteb.encoder import context_texts
from neobert_hf.evaluation.mteb.local_tasks import read_local_tasks
from tests.helpers.mteb_tasks import run_local


SIZE = 5
NESTED = [[["x"]]] * 300


@pytest.fixture(scope="module")
def model(models, tmp_path_factory) -> str:
    torch.manual_seed(0)
    settings = {"context_size": SIZE, "context_dropout": 0.0, "soft_prompts": 8, "text_position": 0}
    model = build_contextual_encoder(models[0], 64, **settings)
    model.prompts = {"query": "the cat sat ", "document": "a dog "}
    folder = tmp_path_factory.mktemp("contextual")
    model.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str | None, list[str], torch.Tensor | None]]:
    """Prompt, texts and context of every call of `encode`."""
    seen, encode = [], SentenceTransformer.encode

    def record(self, inputs, *args, dataset_embeddings=None, prompt=None, **kwargs):
        seen.append((prompt, list(inputs), dataset_embeddings))
        return encode(self, inputs, *args, dataset_embeddings=dataset_embeddings, prompt=prompt, **kwargs)

    monkeypatch.setattr(SentenceTransformer, "encode", record)
    return seen


def test_every_task_has_a_context_of_its_own_texts(local, model, tmp_path, calls):
    names = ["Search", "Similarity", "Topics"]
    run_local(local, model, tmp_path, "--name", "m", "--tasks", *names)
    tasks = [task for task in read_local_tasks(local / "tasks.yaml")[0] if task.metadata.name in names]
    # The draws, without a context; then whatever reads them.
    assert calls[0][2] is None and sum(context is None for _, _, context in calls) == len(tasks)
    loaded, contexts = SentenceTransformer(model), {}
    # The instruction for a task's documents, or for all its texts, also stands before those of the context.
    prompts = {"Search": "a dog ", "Similarity": "on a mat ", "Topics": ""}
    for task in tasks:
        task.load_data()
        texts = context_texts(task, "default", SIZE)
        contexts[task.metadata.name] = embed_context(loaded, texts, seed=0, prompt=prompts[task.metadata.name])
    # All texts read the context of their task, queries as well as documents.
    read = [context for _, _, context in calls if context is not None]
    assert all(any(torch.equal(context, each) for each in contexts.values()) for context in read)
    assert all(any(torch.equal(context, each) for context in read) for each in contexts.values())
    queries = [context for prompt, texts, context in calls if prompt == "the cat sat "]
    assert queries and all(torch.equal(context, contexts["Search"]) for context in queries)


def test_texts_of_large_tasks_and_of_several_subsets():
    class Task:
        class metadata:
            name = "task"

        eval_splits = ["test"]
        column_names = ("sentence1", "sentence2")
        dataset = {
            subset: DatasetDict(
                test=Dataset.from_dict({"sentence1": [f"{subset} {n}" for n in range(300)], "sentence2": NESTED})
            )
            for subset in ("en", "de")
        }

    texts = context_texts(Task, "de", SIZE)
    assert len(texts) == 2 * 100 and all(text.startswith("de ") for text in texts[:100]) and set(texts[100:]) == {"x"}
