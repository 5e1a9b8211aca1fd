"""The instructions of training belong to the model: it is saved with them, and whoever loads it asks with them."""

import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from mteb.models.abs_encoder import get_prompt_name
from mteb.types import PromptType

from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments, RerankerArguments
from neobert_hf.embeddings.datasets import PairDataset
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.mining import mine_negatives
from neobert_hf.embeddings.prompts import dataset_of_queries, prompts_of_helper, prompts_to_save
from neobert_hf.embeddings.recipe import read_data, reranking_evaluator, retrieval_evaluator
from neobert_hf.evaluation.mteb.recipe import benchmark_tasks
from tests.helpers.embedding_runs import KINDS, described, load


PROMPT = "Find the answer. "
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
    named = {name: text for name, text in model.prompts.items() if text}
    assert named == {"triplets": PROMPT, "pairs": "Find the text. ", "query": PROMPT}
    assert model.prompts["nested"] == model.prompts["document"] == ""
    if kind == "reranker":
        # Its one method is asked with a query every time.
        pairs = [(TEXTS[0], text) for text in TEXTS]
        expected = model.predict([(PROMPT + query, text) for query, text in pairs], prompt="")
        assert torch.equal(vectors(model.predict(pairs)), vectors(expected))
        assert not torch.equal(vectors(model.predict(pairs, prompt="")), vectors(expected))
        return
    # Plain `encode` puts nothing before a text.
    assert model.default_prompt_name is None
    assert torch.equal(vectors(model.encode_query(TEXTS)), vectors(model.encode_query(TEXTS, prompt=PROMPT)))
    assert torch.equal(vectors(model.encode_document(TEXTS)), vectors(model.encode_document(TEXTS, prompt="")))
    assert vectors(model.encode_query(TEXTS)).shape != vectors(model.encode_query(TEXTS, prompt="")).shape or (
        not torch.equal(vectors(model.encode_query(TEXTS)), vectors(model.encode_query(TEXTS, prompt="")))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_names_the_prompts(trained, kind):
    card = (trained[kind] / "model" / "README.md").read_text()
    assert f'`query`: `"{PROMPT}"`' in card and '`pairs`: `"Find the text. "`' in card
    assert "`query` is the instruction of triplets: retrieval is evaluated with it." in card
    assert card.index("### Prompts") < card.index("## Training Details")
    # The example runs as it stands there.
    (example,) = re.findall(r"```python\n(.*?)```", card.partition("### Prompts")[2], re.DOTALL)[:1]
    assert ("predict(" if kind == "reranker" else "encode_query(") in example
    exec(example, {"model": load(kind, trained[kind])})


def set_instructions(content: dict, default: str | None = None, **instructions: str) -> None:
    for name, instruction in instructions.items():
        part = content["evaluation"] if name == "retrieval" else content["train"]
        part[name]["instruction"] = instruction
    if default is not None:
        content["train"][default]["default"] = True


RULES = [
    # As the evaluation asks, if that was trained; otherwise as the largest dataset (200, 80 and 50 rows).
    (lambda c: set_instructions(c, retrieval="Find the text."), (), "pairs", "retrieval is evaluated with it"),
    (lambda c: set_instructions(c, retrieval=""), (), "nested", "retrieval is evaluated with it"),
    (lambda c: set_instructions(c, retrieval="Never trained."), (), "triplets", "it is the largest dataset"),
    (lambda c: c.pop("evaluation"), ["nested", "pairs"], "pairs", "it is the largest dataset"),
    (lambda c: set_instructions(c, default="nested"), (), "nested", "it is the `default`"),
    (lambda c: set_instructions(c, default="nested"), ["pairs", "triplets"], "triplets", "retrieval is evaluated"),
    (lambda c: None, ["pairs"], "pairs", "it is the only dataset"),
]


@pytest.mark.parametrize("change, only, name, reason", RULES)
def test_which_dataset_queries_are_asked_like(encoder, edit, change, only, name, reason):
    data = read(encoder, edit(change), only)
    found, why = dataset_of_queries(data)
    assert found.name == name and why.startswith(reason)
    prompts = prompts_to_save(data)
    assert prompts["query"] == data.descriptions[name].prompt and prompts["document"] == ""
    if len(data.descriptions) == 1:
        assert prompts.keys() == {"query", "document"}
    else:
        assert all(prompts[each] == description.prompt for each, description in data.descriptions.items())


def test_a_helper_reads_a_dataset_as_it_did_when_it_was_trained_on_it(capsys):
    """Also where that was without an instruction, beside another dataset that has one."""
    before = {"faq": PairDataset("faq", "Find.", [], default=True, document_instruction="Page:")}
    before["plain"] = PairDataset("plain", "", [])
    helper = SimpleNamespace(prompts=prompts_to_save(SimpleNamespace(descriptions=before, evaluation={}, train={})))
    assert prompts_of_helper("miner", helper, before["plain"]) == ("", "")
    assert prompts_of_helper("miner", helper, before["faq"]) == ("Find. ", "Page: ")
    assert not capsys.readouterr().out
    assert prompts_of_helper("miner", helper, PairDataset("other", "", [])) == ("Find. ", "Page: ")
    assert "'Find. '" in capsys.readouterr().out


def test_mteb_itself_puts_no_instruction_before_documents(trained):
    """Its own wrapper takes the prompt of a task's name for queries and documents alike."""
    prompts = load("dense", trained["dense"]).prompts
    (task,) = (task for task in benchmark_tasks() if task.metadata.name == "MSMARCO")
    renamed = {name.replace("triplets", "MSMARCO"): prompt for name, prompt in prompts.items()}
    found = {role: renamed[get_prompt_name(renamed, task.metadata, role)] for role in PromptType}
    assert found == {PromptType.query: PROMPT, PromptType.document: ""}


def seen_by(model, evaluator) -> set[str]:
    """The texts that a model reads in an evaluation, each with what stands before it."""
    seen, preprocess = set(), model[0].preprocess

    def record(inputs, prompt=None, **kwargs):
        texts = [text[0] if isinstance(text, (list, tuple)) else text for text in inputs]
        seen.update((prompt or "") + text for text in texts)
        return preprocess(inputs, prompt=prompt, **kwargs)

    model[0].preprocess = record
    evaluator(model)
    return seen


@pytest.mark.parametrize("kind", ["dense", "reranker"])
def test_evaluations_ask_once_with_the_instruction_of_their_dataset(trained, encoder, data, edit, kind):
    rows = Dataset.from_parquet(str(data / "test.parquet"))
    for prompt in (PROMPT, "Other. ", ""):
        file = edit(lambda content, prompt=prompt: set_instructions(content, retrieval=prompt))
        evaluator = (retrieval_evaluator if kind == "dense" else reranking_evaluator)(read(encoder, file))
        expected = {prompt + query for query in rows["question"]}
        if kind == "dense":
            expected |= set(rows["answer"])
        # A prompt by itself is read as well, for its length.
        assert seen_by(load(kind, trained[kind]), evaluator) - {prompt} == expected


def test_miners_ask_with_prompts_of_their_own(trained, data, tmp_path, monkeypatch, capsys):
    """That of the dataset if they were trained with it, otherwise their own for queries."""
    rows = Dataset.from_parquet(str(data / "test.parquet")).select(range(8))
    pairs = Dataset.from_list([{"query": row["question"], "positive": row["answer"], "negatives": []} for row in rows])
    asked = []
    monkeypatch.setattr(
        "neobert_hf.embeddings.mining.mine_hard_negatives",
        lambda pairs, model, **options: (
            asked.append((options["query_prompt"], options["corpus_prompt"]))
            or Dataset.from_list([{"query": "q", "positive": "p", "label": 0}])
        ),
    )
    settings = RerankerArguments("m", "d", negatives=3, miner=str(trained["dense"] / "model"))
    for prompt in ("Find the text. ", "Another. ", ""):
        mine_negatives(pairs, described(prompt), settings, tmp_path / str(len(asked)))
    assert asked == [("Find the text. ", ""), (PROMPT, ""), (PROMPT, "")]
    printed = capsys.readouterr().out
    assert PROMPT in printed and "Another. " in printed


def test_a_prompt_for_passages_is_one_for_documents(trained):
    """As many models have it; Sentence Transformers would take its own empty default."""
    model = load("dense", trained["dense"])
    model.prompts = {"query": "query: ", "document": "", "passage": "passage: "}
    assert prompt_of(model, "document") == "passage: " and prompt_of(model, "query") == "query: "
