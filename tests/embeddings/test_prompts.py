"""The prompts of training belong to the model: it is saved with them, and whoever loads it asks with them."""

import pytest
import torch
import yaml
from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.prompts import as_prompt, prompt_of
from neobert_hf.embeddings.recipe import read_data, retrieval_evaluator
from tests.embeddings.conftest import describe
from tests.helpers.embedding_runs import KINDS, load, run


PROMPT = "Find the answer. "
QUERY, DOCUMENT = "Find the answer.[SEP] [CLS] ", "An answer.[SEP] [CLS] "
TEXTS = ["a list of numbers", "for loops and functions"]


def read(encoder, file, only=()):
    settings = RecipeArguments(str(encoder), str(file), only=list(only))
    return read_data(settings, EmbeddingArguments("unused", bf16=False, use_cpu=True))


def vectors(found) -> torch.Tensor:
    """Whatever a model of any kind returns, as one tensor."""
    if isinstance(found, list):
        return torch.cat([torch.as_tensor(each) for each in found])
    return torch.as_tensor(found).to_dense()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_with_its_prompts_and_asks_with_them(trained, kind):
    model = load(kind, trained[kind])
    if kind == "reranker":  # It reads no instructions.
        assert not any(model.prompts.values()) and model.default_prompt_name is None
        return
    named = {name: text for name, text in model.prompts.items() if text}
    assert named == {"triplets": PROMPT, "pairs": "Find the text. ", "query": PROMPT}
    assert model.prompts["nested"] == model.prompts["document"] == ""
    # Plain `encode` puts nothing before a text.
    assert model.default_prompt_name is None
    asked, prompted = vectors(model.encode_query(TEXTS)), vectors(model.encode_query(TEXTS, prompt=PROMPT))
    bare = vectors(model.encode_query(TEXTS, prompt=""))
    assert torch.equal(asked, prompted) and (asked.shape != bare.shape or not torch.equal(asked, bare))
    assert torch.equal(vectors(model.encode_document(TEXTS)), vectors(model.encode_document(TEXTS, prompt="")))


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


@pytest.fixture
def seen(monkeypatch) -> set[tuple[str, str]]:
    """Each text that a model reads, after its prompt."""
    found = set()

    def record(kind: type) -> None:
        preprocess = kind.preprocess

        def recording(self, inputs, prompt=None, **kwargs):
            found.update((prompt or "", text) for text in inputs)
            return preprocess(self, inputs, prompt=prompt, **kwargs)

        monkeypatch.setattr(kind, "preprocess", recording)

    record(SentenceTransformer)
    record(MultiVectorEncoder)
    return found


@pytest.mark.parametrize("instruction", ["Other.", ""])
def test_an_evaluation_asks_once_with_the_instruction_of_its_dataset(trained, encoder, data, edit, seen, instruction):
    rows = Dataset.from_parquet(str(data / "test.parquet"))
    evaluator = retrieval_evaluator(read(encoder, edit(lambda content: instruct(content, retrieval=instruction))))
    evaluator(load("dense", trained["dense"]))
    expected = {(as_prompt(instruction), query) for query in rows["question"]} | {("", text) for text in rows["answer"]}
    assert seen == expected


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_training_reads_both_instructions_and_the_model_asks_with_them(data, encoder, tmp_path, seen, kind):
    """Hard negatives are documents. Instructions end with the separator of the released wrapper for MTEB."""
    content = describe(data)
    for entry in (content["train"]["triplets"], content["evaluation"]["retrieval"]):
        entry |= {"instruction": QUERY, "document_instruction": DOCUMENT}
    # Texts that are no right documents of other rows.
    content["train"]["triplets"]["negatives"] = "question"
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump(content))
    settings = {"model": encoder, "datasets": tmp_path / "datasets.yaml", "output_dir": tmp_path / "run"}
    run(kind, settings | {"max_steps": 2, "save_steps": 2, "eval_strategy": "no", "only": "triplets"})
    rows, test = (Dataset.from_parquet(str(data / f"{name}.parquet")) for name in ("triplets", "test"))
    questions, answers = {*rows["question"], *test["question"]}, {*rows["answer"], *test["answer"]}
    # The model card reads some without.
    queries, documents = ({text for prompt, text in seen if prompt == wanted} for wanted in (QUERY, DOCUMENT))
    assert queries and queries <= questions and documents <= answers | questions
    assert documents & set(rows["answer"]) and documents & set(rows["question"])

    model = load(kind, tmp_path / "run")
    assert (model.prompts["query"], model.prompts["document"]) == (QUERY, DOCUMENT)
    for encode, prompt in ((model.encode_query, QUERY), (model.encode_document, DOCUMENT)):
        assert torch.equal(vectors(encode(TEXTS)), vectors(encode([prompt + text for text in TEXTS], prompt="")))


def test_a_prompt_for_passages_is_one_for_documents(trained):
    """As many models have it; Sentence Transformers would take its own empty default."""
    model = load("dense", trained["dense"])
    model.prompts = {"query": "query: ", "document": "", "passage": "passage: "}
    assert prompt_of(model, "document") == "passage: " and prompt_of(model, "query") == "query: "
