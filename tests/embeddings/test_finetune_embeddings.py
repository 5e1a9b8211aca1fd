"""examples/finetune_embeddings.py on small data: what it trains, with which loss, and which settings it refuses."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.arguments import DenseArguments, EmbeddingArguments
from neobert_hf.embeddings.batches import ContrastiveCollator
from neobert_hf.embeddings.datasets import load_pairs, read_descriptions
from neobert_hf.embeddings.losses import info_nce_loss
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.embedding_runs import losses_of, run
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import ENCODERS, save_other_encoder


def test_a_run_leaves_an_embedding_model_a_card_and_numbers(settings, tmp_path):
    log = run("dense", settings(max_steps=18, report_to="tensorboard"))
    losses = losses_of(log)
    assert len(losses) == 18 and sum(losses[-5:]) < sum(losses[:5]) - 1
    evaluations = [entry for entry in log if "eval_retrieval_cosine_ndcg@10" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12, 18]
    for entry in evaluations:
        assert 0 <= entry["eval_retrieval_cosine_ndcg@10"] <= 1 and -1 <= entry["eval_sts_spearman_cosine"] <= 1
    output = tmp_path / "run"
    model = SentenceTransformer(str(output / "model"))
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    assert model[1].pooling_mode == "mean" and model.similarity_fn_name == "cosine" and model.max_seq_length == 48
    vectors = model.encode(["some text", "another"])
    again = SentenceTransformer(str(output / "checkpoint-18")).encode(["some text", "another"])
    assert vectors.shape == (2, 32) and (vectors == again).all()
    card = (output / "model" / "README.md").read_text()
    for text in ("MultipleNegativesRankingLoss", "triplets", "pairs", "nested", "Find the answer.", "ndcg@10"):
        assert text in card, text
    assert not list(output.glob("*.partial")) and list(output.rglob("events.out.tfevents.*"))


def batch_and_model(data, encoder):
    (description,), _ = read_descriptions(str(data / "datasets.yaml"), ["triplets"])
    rows = load_pairs(description).select(range(6))
    model = build_encoder(str(encoder), 48).eval()
    return rows, model


def info_nce(model, queries: list[str], documents: list[str], temperature: float) -> float:
    """Section 5.2.1, from texts."""
    queries, documents = (torch.tensor(model.encode(texts)).double() for texts in (queries, documents))
    scores = F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T / temperature
    return -scores.log_softmax(1).diagonal().mean().item()


def loss_of(loss, model, rows, prompt: str) -> torch.Tensor:
    collator = ContrastiveCollator(preprocess_fn=model.preprocess, prompts={"triplets": {"query": prompt}})
    batch = collator([row | {"dataset_name": "triplets"} for row in rows])
    features = [
        {key.removeprefix(f"{column}_"): value for key, value in batch.items() if key.startswith(f"{column}_")}
        for column in ("query", "positive", "hard_negative")
        if f"{column}_input_ids" in batch
    ]
    return loss(features, None)


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_the_loss_is_the_papers_over_all_documents_and_hard_negatives(data, encoder, mini_batch_size):
    rows, model = batch_and_model(data, encoder)
    # Negatives of this batch are positives of it, too, and would be left out.
    assert [len(row["negatives"]) for row in rows] == [0, 1, 1, 0, 1, 1]
    rows = [row | {"negatives": [f"{text} indeed" for text in row["negatives"]]} for row in rows]
    negatives = [text for row in rows for text in row["negatives"]]
    queries = [f"Find the answer. {row['query']}" for row in rows]
    expected = info_nce(model, queries, [row["positive"] for row in rows] + negatives, 0.07)
    loss = info_nce_loss(model, 0.07, mini_batch_size)
    with torch.enable_grad():
        value = loss_of(loss, model, rows, "Find the answer. ")
    # Measured: 3e-7 of 5, float32 against float64.
    assert value.item() == pytest.approx(expected, abs=1e-5)
    without = info_nce(model, [row["query"] for row in rows], [row["positive"] for row in rows] + negatives, 0.07)
    assert abs(without - expected) > 1e-3


def turned_guide(encoder) -> SentenceTransformer:
    """A guide that finds other texts alike than the encoder does."""
    guide = build_encoder(str(encoder), 48).eval()
    with torch.no_grad():
        for weight in guide.parameters():
            weight.copy_(weight.flip(0))
    return guide


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_a_guide_takes_false_negatives_out(data, encoder, mini_batch_size):
    """Against InfoNCE without the documents that the guide finds closer to a query than the right one."""
    rows, model = batch_and_model(data, encoder)
    rows = [row | {"negatives": [f"{text} indeed" for text in row["negatives"]]} for row in rows]
    documents = [row["positive"] for row in rows] + [text for row in rows for text in row["negatives"]]
    guide = turned_guide(encoder)

    def scores(encoder) -> torch.Tensor:
        queries, texts = (torch.tensor(encoder.encode(some)).double() for some in (queries_of(rows), documents))
        return F.normalize(queries, dim=1) @ F.normalize(texts, dim=1).T

    def queries_of(rows) -> list[str]:
        return [row["query"] for row in rows]

    guided, own = scores(guide), scores(model) / 0.07
    # Some of the documents are the same text: equal but for the last bit, and so not closer. Others differ by 0.03.
    false = guided > guided.diagonal()[:, None] + 1e-9
    assert 0 < false.sum() < false.numel() - len(rows)
    expected = -own.masked_fill(false, -math.inf).log_softmax(1).diagonal().mean().item()
    value = loss_of(info_nce_loss(model, 0.07, mini_batch_size, guide=guide), model, rows, "")
    assert value.item() == pytest.approx(expected, abs=1e-5)
    value.backward()
    assert all(weight.grad is None for weight in guide.parameters())
    assert abs(expected - info_nce(model, queries_of(rows), documents, 0.07)) > 1e-3


@pytest.mark.parametrize("guided", [False, True])
def test_gradcache_has_the_same_gradients(data, encoder, guided):
    def gradients(mini_batch_size: int | None, guide: SentenceTransformer | None) -> dict[str, torch.Tensor]:
        rows, model = batch_and_model(data, encoder)
        loss_of(info_nce_loss(model, 0.07, mini_batch_size, [16], guide), model, rows, "").backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    guide = turned_guide(encoder) if guided else None
    whole, cached = gradients(None, guide), gradients(2, guide)
    assert whole.keys() == cached.keys()
    for name, gradient in whole.items():
        # Sums in another order, in float32.
        assert (gradient - cached[name]).norm() < 1e-4 * gradient.norm(), name


def test_matryoshka_trains_the_prefixes_as_well(settings, data, encoder, tmp_path):
    rows, model = batch_and_model(data, encoder)
    rows = [row | {"negatives": []} for row in rows]
    queries, documents = [row["query"] for row in rows], [row["positive"] for row in rows]

    class Prefix:
        def encode(self, texts):
            return model.encode(texts)[:, :8]

    expected = info_nce(model, queries, documents, 0.07) + info_nce(Prefix(), queries, documents, 0.07)
    loss = loss_of(info_nce_loss(model, 0.07, None, [8]), model, rows, "")
    assert loss.item() == pytest.approx(expected, abs=1e-4)
    run("dense", settings(matryoshka_dims="8 16", max_steps=2))
    small = SentenceTransformer(str(tmp_path / "run" / "model"), truncate_dim=8)
    assert small.encode("text").shape == (8,)


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
    settings, arguments = parse_config(
        DenseArguments,
        EmbeddingArguments,
        args=["--config", str(ROOT / "configs/embeddings/paper.yaml"), "--model", "m", "--use_cpu", "1", "--bf16", "0"],
    )
    assert (settings.temperature, settings.alpha, arguments.max_steps) == (0.07, 0.5, 2000)
    assert (arguments.adam_beta2, arguments.weight_decay, arguments.get_warmup_steps(2000)) == (0.95, 0.01, 2000)


def test_contrastive_pretraining_on_what_the_script_wrote(tmp_path, monkeypatch, encoder):
    """Both commands of configs/embeddings/contrastive.yaml, with a small encoder and few steps."""
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    body = "It keeps one vector for each passage of a document and finds those that are nearest to a query, number {}."
    for number in range(40):
        Path(f"corpus/{number}.md").write_text(f"# How index {number} works\n\n{body.format(number)}\n")
    load_example("make_pairs").main(["--source", "corpus", "--output", "data/text_pairs.parquet"])
    Path("configs").symlink_to(ROOT / "configs")
    flags = f"--config configs/embeddings/contrastive.yaml --model {encoder} --max_steps 3 --save_steps 3"
    flags += " --per_device_train_batch_size 8 --max_length 32 --use_cpu true --report_to none --logging_steps 1"
    load_example("finetune_embeddings").main(flags.split())
    log = json.loads(Path("runs/contrastive/log.json").read_text())
    assert all(math.isfinite(entry["loss"]) for entry in log if "loss" in entry)
    assert (tmp_path / "runs/contrastive/model/modules.json").is_file()
