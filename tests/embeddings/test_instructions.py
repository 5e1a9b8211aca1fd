"""Instructions of queries and documents, and what stands between them and the texts: trained, saved and asked with."""

import pytest
import torch
from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from transformers import AutoTokenizer

from neobert_hf.embeddings import mining
from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.instructions import as_prompt, separator_of, separator_text
from neobert_hf.embeddings.recipe import read_data, retrieval_evaluator, run_identity
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, choose_template
from tests.helpers.embedding_runs import load, run


QUERY, DOCUMENT = "Find the answer.[SEP] [CLS]", "An answer.[SEP] [CLS]"


def instruct(content: dict) -> None:
    """As the released wrapper: before queries and documents, with the tokens between two texts."""
    content["separator"] = "special_tokens"
    for entry in (content["train"]["triplets"], content["evaluation"]["retrieval"]):
        entry["document_instruction"] = "An answer."


def test_a_tokenizer_reads_the_separator_as_the_end_of_one_text_and_the_beginning_of_another(tokenizer):
    prompt = as_prompt("a list of\n", separator_text("special_tokens", tokenizer))
    assert prompt == "a list of[SEP] [CLS]"
    one, other = (tokenizer(text)["input_ids"] for text in ("a list of", "numbers"))
    assert tokenizer(f"{prompt}numbers")["input_ids"] == one + other
    assert as_prompt("a list of", separator_text("space", tokenizer)) == "a list of "
    assert as_prompt(" \n", separator_text("special_tokens", tokenizer)) == ""
    for name, text in (("space", "Find it. "), ("special_tokens", QUERY), (None, "")):
        assert separator_of(["", text], tokenizer) == name


def test_separators_that_a_tokenizer_does_not_have_are_refused(tokenizer, encoder):
    with pytest.raises(ValueError, match="`separator` is 'tab'; it must be space or special_tokens"):
        separator_text("tab", tokenizer)
    other = AutoTokenizer.from_pretrained(encoder)
    other.split_special_tokens = True
    with pytest.raises(ValueError, match="the tokenizer treats \\[SEP\\] \\[CLS\\] as words. Set it to space"):
        separator_text("special_tokens", other)
    other.cls_token = None
    with pytest.raises(ValueError, match="'\\[SEP\\]' for the end of a text and None for its beginning"):
        separator_text("special_tokens", other)
    assert separator_of([QUERY], other) == "space"


@pytest.fixture(scope="module")
def instructed(encoder, data, tmp_path_factory):
    """The output of a dense run with both instructions, and what was read in it: each text with its prompt."""
    import yaml

    from tests.embeddings.conftest import describe

    folder, seen, preprocess = tmp_path_factory.mktemp("instructed"), [], SentenceTransformer.preprocess

    def record(self, inputs, prompt=None, **kwargs):
        seen.extend((prompt or "", text) for text in inputs)
        return preprocess(self, inputs, prompt=prompt, **kwargs)

    content = describe(data)
    instruct(content)
    # Texts that are no right documents of other rows.
    content["train"]["triplets"]["negatives"] = "question"
    (folder / "datasets.yaml").write_text(yaml.safe_dump(content))
    settings = {"model": encoder, "datasets": folder / "datasets.yaml", "output_dir": folder / "run"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SentenceTransformer, "preprocess", record)
        run("dense", settings | {"max_steps": 4, "save_steps": 4, "eval_strategy": "no", "only": "triplets"})
    return folder / "run", seen


def test_training_reads_them_and_the_model_keeps_them(instructed, data):
    output, seen = instructed
    rows, test = (Dataset.from_parquet(str(data / f"{name}.parquet")) for name in ("triplets", "test"))
    expected = {
        QUERY: {*rows["question"], *test["question"]},
        DOCUMENT: {*rows["answer"], *rows["question"], *test["answer"]},
    }
    # The model card reads some without.
    found = {prompt: {text for before, text in seen if before == prompt} for prompt in expected}
    assert all(found[prompt] <= texts for prompt, texts in expected.items())
    for prompt, column in ((QUERY, "question"), (DOCUMENT, "answer"), (DOCUMENT, "question")):
        assert found[prompt] & set(rows[column]), column
    assert load("dense", output).prompts == {"query": QUERY, "document": DOCUMENT}
    card = (output / "model" / "README.md").read_text()
    assert "with a prompt before queries and before documents" in card and f'`document`: `"{DOCUMENT}"`' in card


def test_search_mteb_and_sentence_transformers_ask_in_the_same_way(instructed, edit):
    pytest.importorskip("lancedb")
    from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder

    path = str(instructed[0] / "model")
    model, texts = load("dense", instructed[0]), ["a list of numbers", "for loops"]
    expected = {"query": model.encode_query(texts), "document": model.encode_document(texts)}
    for kind, prompt in (("query", QUERY), ("document", DOCUMENT)):
        assert torch.equal(torch.tensor(expected[kind]), torch.tensor(model.encode([prompt + text for text in texts])))
    search = PassageEncoder(EmbeddingSettings(path), "cpu")
    assert (search.identity["query_prompt"], search.identity["document_prompt"]) == (QUERY, DOCUMENT)
    # The evaluation in training gives both, so that neither is left to the model.
    content = edit(instruct)
    settings = RecipeArguments(str(instructed[0] / "checkpoint-4"), str(content))
    evaluator = retrieval_evaluator(read_data(settings, EmbeddingArguments("unused", bf16=False, use_cpu=True)))
    assert (evaluator.query_prompt, evaluator.corpus_prompt) == (QUERY, DOCUMENT)
    # Instructions of another kind get the separator that the model was trained with.
    template = choose_template(MTEBSettings(path, "unused"), model)
    assert template == "{instruction}[SEP] [CLS]"


def test_late_interaction_reads_hard_negatives_as_documents(settings, edit, monkeypatch):
    seen, preprocess = [], MultiVectorEncoder.preprocess

    def record(self, inputs, prompt=None, **kwargs):
        seen.extend((prompt or "", text) for text in inputs)
        return preprocess(self, inputs, prompt=prompt, **kwargs)

    monkeypatch.setattr(MultiVectorEncoder, "preprocess", record)

    def nested_only(content: dict) -> None:
        content["train"]["nested"] |= {"instruction": "Find it.", "document_instruction": "It."}
        content["train"]["nested"]["negatives"] = "set.pos.1"
        content.pop("evaluation")

    changes = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "only": "nested"}
    run("multi_vector", settings(**changes, datasets=edit(nested_only)))
    assert "x" in {text for before, text in seen if before == "It. "}
    assert {before for before, _ in seen} - {""} == {"Find it. ", "It. "}


def test_a_reranker_reads_instructions_only_if_it_is_told_to(settings, trained, tmp_path, monkeypatch):
    """Also in its evaluation. A miner reads them in any case."""
    seen = []
    find = mining.prompts_of_helper
    monkeypatch.setattr(mining, "prompts_of_helper", lambda *args: seen.append(find(*args)) or seen[-1])
    changes = {"max_steps": 1, "save_steps": 1, "eval_steps": 1, "only": "pairs", "miner": trained["dense"] / "model"}
    run("reranker", settings(**changes))
    assert seen == [("Find the text. ", "")]
    model = load("reranker", tmp_path / "run")
    assert set(model.prompts.values()) == {""}
    arguments = torch.load(tmp_path / "run" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert arguments.prompts == {"pairs": ""}


def test_runs_know_their_instructions(encoder, data, edit):
    def values(file) -> dict:
        chosen = RecipeArguments(str(encoder), str(file), only=["triplets"])
        arguments = EmbeddingArguments("unused", bf16=False, use_cpu=True)
        return run_identity(chosen, arguments, read_data(chosen, arguments))["datasets"]["triplets"]

    plain, changed = values(data / "datasets.yaml"), values(edit(instruct))
    assert changed == plain | {"separator": "[SEP] [CLS]", "document_instruction": "An answer."}
