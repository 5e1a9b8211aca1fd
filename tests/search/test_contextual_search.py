"""Search with a contextual model: one context for all that an index holds, kept with it."""

import json
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from sentence_transformers import SentenceTransformer

from neobert_hf.common.fingerprints import SettingsMismatch, fingerprint
from neobert_hf.embeddings.contextual import build_contextual_encoder
from neobert_hf.search.lancedb_index import LanceDBIndex
from tests.helpers.examples import load_example
from tests.helpers.search_encoder import save_search_encoder


pytest.importorskip("lancedb")
semantic_search = load_example("semantic_search")
SIZE = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("contextual_search")
    path = save_search_encoder(folder / "encoder")
    torch.manual_seed(0)
    model = build_contextual_encoder(path, 64, context_size=SIZE, context_dropout=0.1, soft_prompts=8, text_position=0)
    model.prompts = {"query": "find ", "document": ""}
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(dict.fromkeys(" ".join(text.split()[:5]) for _, text in sorted(topics.items())))[:30]


@pytest.fixture
def index(model, tmp_path, capsys):
    """Index rows; return how many documents were embedded, and the index."""

    def run(rows: list[str], **changes) -> tuple[int, LanceDBIndex]:
        file = tmp_path / "corpus.jsonl"
        file.write_text(
            "".join(json.dumps({"id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(rows))
        )
        settings = {"index": tmp_path / "index", "model": model, "source": file, "id_column": "id", "device": "cpu"}
        semantic_search.main(["index", *(f"--{key}={value}" for key, value in (settings | changes).items())])
        embedded = re.search(r"(\d+) documents embedded", capsys.readouterr().out)
        return int(embedded[1]), LanceDBIndex(tmp_path / "index")

    return run


@pytest.fixture
def query(tmp_path, capsys):
    def run(text: str) -> list[dict]:
        flags = {"index": tmp_path / "index", "device": "cpu", "json": True, "top_k": 30}
        semantic_search.main(["query", *(f"--{key}={value}" for key, value in flags.items()), "--text", text])
        return json.loads(capsys.readouterr().out)["hits"]

    return run


def test_queries_and_new_documents_read_the_context_of_the_index(index, query, model, texts):
    embedded, stored = index(texts[:20])
    context = stored.read_context()
    assert embedded == 20 and context.shape == (SIZE, 32)
    assert stored.identity["context"] == fingerprint(context.float())
    # Of documents of the source.
    encoder = SentenceTransformer(str(model), device="cpu")
    own = torch.tensor(encoder.encode(texts[:20]))
    assert all(((own - row).abs().amax(1) < 1e-5).any() for row in context)
    # What is added later is embedded with the same context.
    embedded, stored = index(texts)
    assert embedded == 10 and torch.equal(stored.read_context(), context)
    documents, (asked,) = (
        encoder.encode(some, prompt=prompt, dataset_embeddings=context, normalize_embeddings=True)
        for some, prompt in ((texts, ""), (["the value of a list"], "find "))
    )
    hits = query("the value of a list")
    expected = dict(zip((f"d{number}" for number in range(len(texts))), documents @ asked))
    assert {hit["document"] for hit in hits} == expected.keys()
    for hit in hits:
        assert hit["score"] == pytest.approx(expected[hit["document"]], abs=1e-5)


def test_another_context_is_refused(index, query, texts, tmp_path):
    index(texts[:20])
    LanceDBIndex(tmp_path / "index").write_context(torch.ones(SIZE, 32))
    with pytest.raises(SettingsMismatch, match="context: "):
        query("a list")
    with pytest.raises(SettingsMismatch, match="context: "):
        index(texts)


def test_a_small_source_fills_the_context(index, texts):
    embedded, stored = index(texts[:2])
    assert embedded == 2 and stored.read_context().shape == (SIZE, 32)
