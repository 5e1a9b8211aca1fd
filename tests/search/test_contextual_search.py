"""Search with a contextual model: one context for all that an index holds, kept with it."""

from pathlib import Path

import pytest
import torch

from neobert_hf.common.fingerprints import fingerprint
from neobert_hf.common.run import SettingsMismatch
from neobert_hf.contextual.model import build_contextual_encoder
from neobert_hf.search.lancedb_index import LanceDBIndex
from tests.helpers.search_encoder import save_search_encoder
from tests.search.conftest import write_rows


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


@pytest.mark.parametrize("count", [20, 2])
def test_queries_and_new_documents_read_the_context_of_the_index(index, query, encoder, texts, tmp_path, count):
    """Also if the first source has fewer documents than a context."""
    rows = {f"d{number}": " ".join(text.split()[:5]) for number, text in enumerate(texts)}
    first = dict(list(rows.items())[:count])
    assert index(write_rows(tmp_path / "corpus.jsonl", first), "--id_column=id")[0] == count
    stored = LanceDBIndex(tmp_path / "index")
    context = stored.read_context()
    assert context.shape == (SIZE, 32) and stored.identity["context"] == fingerprint(context.float())
    # Of documents of the source.
    own = torch.tensor(encoder.encode(list(first.values())))
    assert all(((own - row).abs().amax(1) < 1e-5).any() for row in context)
    # What is added later is embedded with the same context.
    assert index(write_rows(tmp_path / "corpus.jsonl", rows), "--id_column=id")[0] == len(rows) - count
    assert torch.equal(stored.read_context(), context)
    documents, (asked,) = (
        encoder.encode(some, prompt=prompt, dataset_embeddings=context, normalize_embeddings=True)
        for some, prompt in ((list(rows.values()), ""), (["the value of a list"], "find "))
    )
    (hits,) = query("the value of a list", top_k=100)
    found = {hit["document"]: hit["score"] for hit in hits}
    assert found == pytest.approx(dict(zip(rows, documents @ asked)), abs=1e-5)
    # Another context is refused.
    stored.write_context(torch.ones(SIZE, 32))
    for run in (lambda: query("a list"), lambda: index(tmp_path / "corpus.jsonl", "--id_column=id")):
        with pytest.raises(SettingsMismatch, match="context: "):
            run()
