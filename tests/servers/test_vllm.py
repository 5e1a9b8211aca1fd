"""Promise 20: a folder that we save is served by vLLM with the same numbers, over HTTP, on a CPU in float32."""

import json
import re
import urllib.error

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from tests.helpers.models import ROOT, save_checkpoint


# Ragged, empty, and in one batch. `LONG` is longer than any model here takes.
TEXTS = ["the cat sat on the mat", "", "a", "what is 17 times 3? nobody knows", "a dog and a cat " * 3]
LONG = "a dog " * 3000
EAGER = "--enforce-eager"  # Compiling takes half a minute; the first test does it.


def same(found, expected) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    print(f"largest difference {np.abs(found - expected).max():.1e}")
    return found.shape == expected.shape and bool(np.abs(found - expected).max() <= 1e-5)


def embeddings(server, texts=TEXTS, **options) -> list[list[float]]:
    return [entry["embedding"] for entry in server.ask("/v1/embeddings", input=list(texts), **options)["data"]]


def check_overlong(server, encode) -> None:
    """A text that is too long is an error, or cut where the request says so."""
    with pytest.raises(urllib.error.HTTPError, match="400"):
        embeddings(server, [LONG])
    assert same(embeddings(server, [*TEXTS, LONG], truncate_prompt_tokens=-1), encode([*TEXTS, LONG]))


def test_the_shipped_model(serve):
    """Means, a linear layer behind them, and normalised; in compiled blocks."""
    folder = ROOT / "models" / "distilled"
    model = SentenceTransformer(str(folder), device="cpu")
    with serve(folder) as server:
        assert same(embeddings(server), model.encode(TEXTS))
        check_overlong(server, model.encode)


def test_a_folder_of_sentence_transformers(serve, tmp_path):
    """Its pooling, its layers behind it, and no normalisation; its prompts only by the route /v2/embed.

    Sentence Transformers keeps the length in the tokenizer, where vLLM does not look for it.
    """
    encoder = Transformer(str(save_checkpoint(tmp_path / "encoder")), max_seq_length=20)
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[encoder, Pooling(64, "cls"), Dense(64, 24), Dense(24, 16)], device="cpu")
    model.prompts = {"query": "find: ", "document": "in: "}
    model.save_pretrained(str(tmp_path / "model"))
    with serve(tmp_path / "model", "--max-model-len", "20", EAGER) as server:
        check_overlong(server, model.encode)
        normalised = embeddings(server, truncate_prompt_tokens=-1, use_activation=True)
        assert same(normalised, model.encode(TEXTS, normalize_embeddings=True))
        for kind, encode in {"query": model.encode_query, "document": model.encode_document}.items():
            options = {"model": str(tmp_path / "model"), "input_type": kind, "embedding_types": ["float"]}
            found = server.ask("/v2/embed", texts=[*TEXTS, LONG], **options)["embeddings"]["float"]
            assert same(found, encode([*TEXTS, LONG]))


def test_the_published_layout(serve, tmp_path):
    """A masked language model under the original's names is an encoder whose states are averaged."""
    folder = save_checkpoint(tmp_path / "model", NeoBERTForMaskedLM)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    published = json.loads((ROOT / "tests" / "data" / "published_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    config |= {name: published[name] for name in ("architectures", "auto_map")}
    (folder / "config.json").write_text(json.dumps(config))
    with serve(folder, EAGER) as server:
        assert same(embeddings(server), expected)


def test_remote_code_without_the_package(serve, tmp_path):
    """The saved code alone, of which vLLM takes the first token unless it is told otherwise."""
    folder = save_checkpoint(tmp_path / "model", NeoBERTModel)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    means = ("--pooler-config", '{"seq_pooling_type": "MEAN"}')
    with serve(folder, "--trust-remote-code", *means, EAGER, VLLM_PLUGINS="") as server:
        assert same(embeddings(server), expected)
    assert list(tmp_path.glob("modules/**/modeling_neobert.py"))


@pytest.mark.parametrize("pooling, problem", [("cls", "single_label"), ("mean", "multi_label")])
def test_classes(pooling, problem, serve, tmp_path):
    options = {"classifier_pooling": pooling, "problem_type": f"{problem}_classification", "num_labels": 3}
    folder = save_checkpoint(tmp_path / "model", NeoBERTForSequenceClassification, **options)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    with serve(folder, EAGER) as server:
        found = [entry["probs"] for entry in server.ask("/classify", input=TEXTS)["data"]]
        assert same(found, logits.softmax(-1) if problem == "single_label" else logits.sigmoid())
        raw = [entry["probs"] for entry in server.ask("/classify", input=TEXTS, use_activation=False)["data"]]
        assert same(raw, logits)


def test_pairs(serve, tmp_path):
    """A reranker of Sentence Transformers: scores, and documents in the order of them."""
    save_checkpoint(tmp_path / "base", NeoBERTForSequenceClassification, num_labels=1)
    model = CrossEncoder(str(tmp_path / "base"), device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    query, *documents = [text for text in TEXTS if text]
    expected = model.predict([(query, document) for document in documents])
    with serve(tmp_path / "model", EAGER) as server:
        found = server.ask("/score", queries=query, documents=documents)["data"]
        assert same([entry["score"] for entry in found], expected)
        ranked = server.ask("/rerank", query=query, documents=documents)["results"]
        assert [entry["index"] for entry in ranked] == list(np.argsort(-expected))
        assert same([entry["relevance_score"] for entry in ranked], -np.sort(-expected))


def test_versions_of_the_page():
    """docs/clients.md names the versions that are installed here."""
    page = (ROOT / "docs" / "clients.md").read_text().split("## Servers")[1]
    constraints = (ROOT / "tests" / "servers" / "constraints.txt").read_text().split()
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert rows and all(f"{name}=={version}" in constraints for name, version in rows)
