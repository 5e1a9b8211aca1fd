"""examples/finetune_embeddings.py on small data: what it trains, and with which loss."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.arguments import EmbeddingArguments
from neobert_hf.embeddings.batches import ContrastiveCollator
from neobert_hf.embeddings.dense import DenseSettings, info_nce_loss
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.embedding_runs import losses_of, run
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import ENCODERS, save_other_encoder


def test_a_run_leaves_an_embedding_model_a_card_and_numbers(trained):
    output = trained["dense"]
    log = json.loads((output / "log.json").read_text())
    assert all(-1 <= entry["eval_sts_spearman_cosine"] <= 1 for entry in log if "eval_sequential_score" in entry)
    model, checkpoint = (SentenceTransformer(str(output / name)) for name in ("model", "checkpoint-12"))
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    assert model[1].pooling_mode == "mean" and model.similarity_fn_name == "cosine" and model.max_seq_length == 48
    assert (model.encode(QUERIES) == checkpoint.encode(QUERIES)).all()
    card = (output / "model" / "README.md").read_text()
    for text in ("MultipleNegativesRankingLoss", "triplets", "pairs", "nested", "Find the answer.", "ndcg@10"):
        assert text in card, text


# The loss, of six rows with one hard negative or none

PROMPT = "Find the answer. "
ROWS = [
    {"query": f"find {word} in a list", "positive": f"the {word} of {other}", "negatives": negatives}
    for word, other, negatives in zip(
        ("class", "name", "value", "method", "module", "key"),
        ("an object", "a file", "a list", "a class", "python", "a dictionary"),
        ([], ["a function"], ["the name of a list"], [], ["for loops"], ["a statement"]),
    )
]
QUERIES, POSITIVES = [row["query"] for row in ROWS], [row["positive"] for row in ROWS]
DOCUMENTS = POSITIVES + [text for row in ROWS for text in row["negatives"]]


@pytest.fixture
def model(encoder) -> SentenceTransformer:
    return build_encoder(str(encoder), 48).eval()


@pytest.fixture
def guide(encoder) -> SentenceTransformer:
    """It finds other texts alike than the model does."""
    guide = build_encoder(str(encoder), 48).eval()
    with torch.no_grad():
        for weight in guide.parameters():
            weight.copy_(weight.flip(0))
    return guide


def cosines(model, queries: list[str], documents: list[str], size: int | None = None) -> torch.Tensor:
    queries, documents = (torch.tensor(model.encode(texts))[:, :size].double() for texts in (queries, documents))
    return F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T


def papers_loss(scores: torch.Tensor, temperature: float = 0.07) -> float:
    """Section 5.2.1, from cosine similarities."""
    return -(scores / temperature).log_softmax(1).diagonal().mean().item()


def loss_of(model, prompt: str = "", rows: list[dict] = ROWS, guide=None, **settings) -> torch.Tensor:
    loss = info_nce_loss(model, DenseSettings("m", datasets="d", **settings), guide)
    collator = ContrastiveCollator(preprocess_fn=model.preprocess, prompts={"d": {"query": prompt}})
    batch = collator([row | {"dataset_name": "d"} for row in rows])
    features = [
        {key.removeprefix(f"{column}_"): value for key, value in batch.items() if key.startswith(f"{column}_")}
        for column in ("query", "positive", "hard_negative")
        if f"{column}_input_ids" in batch
    ]
    return loss(features, None)


def test_the_loss_is_the_papers_over_all_documents_and_hard_negatives(model):
    expected = papers_loss(cosines(model, [PROMPT + query for query in QUERIES], DOCUMENTS))
    # Measured: 3e-7 of 5, float32 against float64.
    assert loss_of(model, PROMPT).item() == pytest.approx(expected, abs=1e-5)
    assert abs(papers_loss(cosines(model, QUERIES, DOCUMENTS)) - expected) > 1e-3


def test_a_guide_takes_false_negatives_out(model, guide):
    """Against InfoNCE without the documents that the guide finds closer to a query than the right one."""
    own, guided = cosines(model, QUERIES, DOCUMENTS), cosines(guide, QUERIES, DOCUMENTS)
    false = guided > guided.diagonal()[:, None] + 1e-9
    assert 0 < false.sum() < false.numel() - len(ROWS)
    expected = papers_loss(own.masked_fill(false, -math.inf))
    value = loss_of(model, guide=guide)
    assert value.item() == pytest.approx(expected, abs=1e-5)
    value.backward()
    assert all(weight.grad is None for weight in guide.parameters())
    assert abs(expected - papers_loss(own)) > 1e-3


@pytest.mark.parametrize("guided", [False, True])
def test_gradcache_has_the_same_loss_and_gradients(model, guide, guided):
    values, gradients = [], []
    for tokens in (None, 9):
        value = loss_of(model, guide=guide if guided else None, matryoshka_dims=[16], mini_batch_num_tokens=tokens)
        value.backward()
        values.append(value.item())
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.zero_grad()
    assert values[1] == pytest.approx(values[0], abs=1e-5)
    for name, gradient in gradients[0].items():
        # Sums in another order, in float32.
        assert (gradient - gradients[1][name]).norm() < 1e-4 * gradient.norm(), name


def test_matryoshka_trains_the_prefixes_as_well(model):
    rows = [row | {"negatives": []} for row in ROWS]
    expected = sum(papers_loss(cosines(model, QUERIES, POSITIVES, size)) for size in (8, 32))
    assert loss_of(model, rows=rows, matryoshka_dims=[8]).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_it_works_for_other_encoders(settings, tokenizer, tmp_path, name):
    save_other_encoder(name, tmp_path / name, tokenizer)
    log = run("dense", settings(model=tmp_path / name, max_steps=3, save_steps=3, eval_strategy="no"))
    assert all(map(math.isfinite, losses_of(log)))
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    before = load_file(tmp_path / name / "model.safetensors")
    assert any(not torch.equal(stored[key], before[key].float()) for key in stored if key in before)


def test_the_papers_settings():
    flags = ["--config", str(ROOT / "configs/embeddings/paper.yaml"), "--model", "m", "--use_cpu", "1", "--bf16", "0"]
    settings, arguments = parse_config(DenseSettings, EmbeddingArguments, args=flags)
    assert (settings.temperature, settings.alpha, arguments.max_steps) == (0.07, 0.5, 2000)
    assert (arguments.adam_beta2, arguments.weight_decay, arguments.get_warmup_steps(2000)) == (0.95, 0.01, 2000)
