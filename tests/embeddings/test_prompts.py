"""The prompts of training belong to the model: it is saved with them, and whoever loads it asks with them."""

import pytest
import torch
from datasets import Dataset

from neobert_hf.embeddings.arguments import EmbeddingArguments, PairSettings
from neobert_hf.embeddings.prompts import as_prompt, prompt_of
from neobert_hf.embeddings.recipe import describe_data, load_data, retrieval_evaluator
from tests.helpers.embedding_runs import KINDS, load, record_prompts, run


PROMPT = "Find the answer. "
QUERY, DOCUMENT = "Find the answer.[SEP] [CLS] ", "An answer.[SEP] [CLS] "
TEXTS = ["a list of numbers", "for loops and functions"]


def read(encoder, file, only=()):
    settings = PairSettings(str(encoder), datasets=str(file), only=list(only))
    data = describe_data(settings)
    load_data(data, settings, EmbeddingArguments("unused", bf16=False, use_cpu=True))
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_with_its_prompts(trained, kind):
    model = load(kind, trained[kind])
    if kind == "reranker":  # It reads no instructions.
        assert not any(model.prompts.values()) and model.default_prompt_name is None
        return
    named = {"triplets": PROMPT, "pairs": "Find the text. ", "query": PROMPT}
    assert {name: text for name, text in model.prompts.items() if text} == named
    assert model.prompts["nested"] == model.prompts["document"] == ""
    # Plain `encode` puts nothing before a text.
    assert model.default_prompt_name is None


def instruct(content: dict, default: str | None = None, **instructions: str) -> None:
    for name, instruction in instructions.items():
        part = content["evaluation"] if name == "retrieval" else content["train"]
        part[name]["instruction"] = instruction
    if default is not None:
        content["train"][default]["default"] = True


RULES = [
    # As the evaluation asks, if that was trained; otherwise as the largest dataset (200, 80 and 50 rows).
    (lambda c: instruct(c, retrieval="Find the text."), (), "pairs"),
    (lambda c: instruct(c, retrieval=""), (), "nested"),
    (lambda c: instruct(c, retrieval="Never trained."), (), "triplets"),
    (lambda c: instruct(c, default="nested"), (), "nested"),
    (lambda c: c.pop("evaluation"), ["pairs"], "pairs"),
]


@pytest.mark.parametrize("change, only, name", RULES)
def test_which_dataset_queries_are_asked_like(encoder, edit, change, only, name):
    data = read(encoder, edit(change), only)
    prompts = data.prompts()
    assert prompts["query"] == data.train[name].prompt and prompts["document"] == ""
    if len(data.train) == 1:
        assert prompts.keys() == {"query", "document"}
    else:
        assert all(prompts[each] == dataset.prompt for each, dataset in data.train.items())


@pytest.mark.parametrize("instruction", ["Other.", ""])
def test_an_evaluation_asks_once_with_the_instruction_of_its_dataset(
    trained, encoder, data, edit, monkeypatch, instruction
):
    rows = Dataset.from_parquet(str(data / "test.parquet"))
    evaluator = retrieval_evaluator(read(encoder, edit(lambda content: instruct(content, retrieval=instruction))))
    model = load("dense", trained["dense"])
    seen = record_prompts(monkeypatch)
    evaluator(model)
    expected = {(as_prompt(instruction), query) for query in rows["question"]} | {("", text) for text in rows["answer"]}
    assert {(prompt or "", text) for prompt, text in seen} == expected


def instruct_both(content: dict) -> None:
    for entry in (content["train"]["triplets"], content["evaluation"]["retrieval"]):
        entry |= {"instruction": QUERY, "document_instruction": DOCUMENT}
    # Texts that are no right documents of other rows.
    content["train"]["triplets"]["negatives"] = "question"


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_training_reads_both_instructions_and_the_model_asks_with_them(
    data, edit, settings, tmp_path, monkeypatch, kind
):
    """Hard negatives are documents. Instructions end with the separator of the released wrapper for MTEB."""
    seen = record_prompts(monkeypatch)
    changes = {"max_steps": 2, "save_steps": 2, "eval_strategy": "no", "only": "triplets"}
    run(kind, settings(datasets=edit(instruct_both), **changes))
    rows, test = (Dataset.from_parquet(str(data / f"{name}.parquet")) for name in ("triplets", "test"))
    questions, answers = {*rows["question"], *test["question"]}, {*rows["answer"], *test["answer"]}
    # The model card reads some without.
    queries, documents = ({text for prompt, text in seen if prompt == wanted} for wanted in (QUERY, DOCUMENT))
    assert queries and queries <= questions and documents <= answers | questions
    assert documents & set(rows["answer"]) and documents & set(rows["question"])

    model = load(kind, tmp_path / "run")
    assert (model.prompts["query"], model.prompts["document"]) == (QUERY, DOCUMENT)
    for encode, prompt in ((model.encode_query, QUERY), (model.encode_document, DOCUMENT)):
        # Of a multi-vector model a list, and of a dense one a tensor.
        for asked, prompted in zip(encode(TEXTS), encode([prompt + text for text in TEXTS], prompt=""), strict=True):
            assert torch.equal(torch.as_tensor(asked), torch.as_tensor(prompted))


def test_a_prompt_for_passages_is_one_for_documents(trained):
    """As many models have it; Sentence Transformers would take its own empty default."""
    model = load("dense", trained["dense"])
    model.prompts = {"query": "query: ", "document": "", "passage": "passage: "}
    assert prompt_of(model, "document") == "passage: " and prompt_of(model, "query") == "query: "
