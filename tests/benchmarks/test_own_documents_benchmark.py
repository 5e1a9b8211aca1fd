"""benchmarks/own_documents.py on a few documents: two ways, two seeds, and what is tested on nobody has trained on."""

import json

import embedding_report
import own_documents
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.examples import load_example
from tests.helpers.models import small_model
from tests.helpers.one_by_one import OneByOne, run_here


@pytest.fixture
def documents(corpus, tmp_path):
    """Forty documents, each with two sections, whose titles are marked in every second document only."""
    lines = (corpus / "train.jsonl").read_text().splitlines()
    texts = [words for words in (json.loads(line)["text"].split() for line in lines) if len(words) > 70]
    rows = []
    for number, words in enumerate(texts[:40]):
        mark = "## " if number % 2 else ""
        sections = [
            f"{mark}Part {' '.join(words[at : at + 3])}\n\n{' '.join(words[at + 3 : at + 25])}" for at in (0, 25)
        ]
        loose = f"{' '.join(words[50:58]).capitalize()}. {' '.join(words[50:70]).capitalize()}."
        rows.append({"text": "\n\n".join(["The manual", *sections, loose])})
    Dataset.from_list(rows).to_parquet(tmp_path / "documents.parquet")
    return tmp_path / "documents.parquet"


def test_ways_are_tested_on_the_same_pairs(documents, corpus, tmp_path, monkeypatch):
    small_model(NeoBERTForMaskedLM, vocab_size=600).save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(corpus / "tokenizer").save_pretrained(tmp_path / "start")
    done = []
    monkeypatch.setattr(embedding_report, "run", run_here(done))
    monkeypatch.setattr(own_documents, "ThreadPoolExecutor", OneByOne)
    monkeypatch.setattr(own_documents, "HELD_OUT", 0.3)
    few = "8 pairs of a kind, marked titles only"
    flags = ["--documents", str(documents), "--start", f"{tmp_path}/start", "--ways", own_documents.SHIPPED, few]
    flags += ["--seeds", "2", "--output_dir", f"{tmp_path}/runs", "--results", str(tmp_path), "--training"]
    flags += ["--max_steps 2 --max_length 32 --use_cpu true --per_device_train_batch_size 8"]
    own_documents.main(flags)
    # Two ways, two seeds, two trainings.
    assert done == ["finetune_embeddings.py"] * 8
    results = json.loads((tmp_path / "own_documents.json").read_text())["results"]
    assert list(results) == [own_documents.SHIPPED, few] and all(len(runs) == 2 for runs in results.values())
    assert len({json.dumps(run) for runs in results.values() for run in runs}) == 4
    report = (tmp_path / "own_documents.md").read_text()
    assert "nan" not in report and f"as shipped, against {few}" in report and "| BM25 | " in report
    assert (tmp_path / "own_documents.png").stat().st_size > 10_000

    (settings,) = own_documents.parse_config(own_documents.OwnDocumentsArguments, args=flags)
    pairs = {way: own_documents.pairs_of(settings, way) for way in results}
    kinds = [set(one["train"]["kind"]) for one in pairs.values()]
    assert kinds == [{"title", "unmarked_title", "sentence"}, {"title", "sentence"}]
    trained = {text for one in pairs.values() for name in ("query", "positive") for text in one["train"][name]}
    tests = own_documents.make_tests(pairs)
    for name, test in tests.items():
        assert len(test.queries) >= 3 and trained.isdisjoint(test.queries)
        assert all(query.startswith("Part ") == (name == own_documents.TITLES) for query in test.queries)
        assert len(set(test.documents)) == len(test.documents) and trained & set(test.documents)

    # What is called shipped is what the recipe does.
    recipe = load_example("retrieval_from_documents").RetrievalArguments(documents="a", model="b", output_dir="c")
    assert own_documents.WAYS[own_documents.SHIPPED] == (recipe.pairs_per_document, recipe.kinds)

    own_documents.main(flags)
    assert len(done) == 8
    with pytest.raises(ValueError, match="it must name 'as shipped', and may name others of"):
        own_documents.main([*flags, "--ways", few])
