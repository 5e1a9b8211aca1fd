"""examples/train_contextual.py: clusters and batches, the loss and its gradients, runs that resume to the bit."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.common.settings import parse_config
from neobert_hf.contextual import clusters
from neobert_hf.contextual.clusters import ClusterBatchSampler, find_clusters
from neobert_hf.contextual.model import build_contextual_encoder
from neobert_hf.contextual.recipe import ContextualSettings
from neobert_hf.contextual.training import ContextualCollator, ContextualLoss, mean_cosine
from neobert_hf.embeddings.arguments import EmbeddingArguments
from neobert_hf.embeddings.datasets import read_descriptions
from tests.helpers.embedding_runs import load, losses_of, run
from tests.helpers.models import ROOT


PROMPT = "Find the answer. "
CONTEXT = {"context_size": 5, "context_dropout": 0.0, "soft_prompts": 8, "text_position": 0}
# Of a run; each context has as many documents as a batch of `pairs` has rows.
SIZES = {"context_size": 8, "mini_batch_size": 3, "learning_rate": 1e-3, "eval_steps": 12, "save_steps": 4}


# The loss


def contextual_model(encoder: Path, **changes) -> SentenceTransformer:
    torch.manual_seed(0)
    model = build_contextual_encoder(str(encoder), 48, **CONTEXT | changes).double()
    # A new head starts so small that its gradients would be lost among the others.
    with torch.no_grad():
        for head in (model[0].model.first_head, model[0].model.second_head):
            for parameter in head.parameters():
                parameter.normal_(std=0.3)
    return model


def features_of(model: SentenceTransformer) -> list[dict]:
    """Queries with a prompt, documents and hard negatives of different lengths, as the collator gives them."""
    generator = random.Random(0)
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha())[:200]

    def draw(count: int) -> list[str]:
        return [" ".join(generator.choices(words, k=generator.randrange(2, 14))) for _ in range(count)]

    columns = (draw(7), PROMPT), (draw(7), None), (draw(3), None)
    return [model.preprocess(texts, prompt=prompt) for texts, prompt in columns]


MASK = torch.zeros(7, 7, dtype=torch.bool)
MASK[0, 3] = MASK[5, 1] = True


def plain_loss(model: SentenceTransformer, features: list[dict], mask: torch.Tensor | None, size: int) -> torch.Tensor:
    """Both stages in one graph. Texts are computed in mini-batches, which draw their own numbers for dropout."""
    stages, (queries, documents, negatives) = model[0].model, features

    def embed(texts: dict, **options) -> torch.Tensor:
        rows = range(0, len(texts["input_ids"]), size)
        parts = [{name: texts[name][row : row + size] for name in ("input_ids", "attention_mask")} for row in rows]
        return torch.cat([stages(**part, **options).pooler_output for part in parts])

    drawn = torch.randperm(len(documents["input_ids"]))[: stages.config.context_size]
    context = embed({name: documents[name][drawn] for name in ("input_ids", "attention_mask")})
    units = [
        F.normalize(embed(texts, dataset_embeddings=context, prompt_length=texts.get("prompt_length")), dim=1)
        for texts in (queries, documents, negatives)
    ]
    scores = units[0] @ torch.cat(units[1:]).T / 0.1
    if mask is not None:
        scores[:, :7] = scores[:, :7].masked_fill(mask, -torch.inf)
    return -scores.log_softmax(1).diagonal().mean()


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("mini_batch_size", [2, 100])
@pytest.mark.parametrize("mask, dropout", [(MASK, False), (None, True)], ids=["mask", "dropout"])
def test_cached_gradients_are_those_of_one_graph(encoder, mini_batch_size, mask, dropout):
    """With dropout: 0.1 in both stages, and a third of the context hidden."""
    model = contextual_model(encoder, context_dropout=0.3 * dropout).train(dropout)
    features = features_of(model)
    torch.manual_seed(5)
    expected = plain_loss(model, features, mask, mini_batch_size)
    (3 * expected).backward()
    expected_gradients = gradients_of(model)
    torch.manual_seed(5)
    value = ContextualLoss(model, 0.1, mini_batch_size)(features, mask)
    # As the Trainer divides a loss by its accumulation steps, and a gradient scaler multiplies it.
    (3 * value).backward()
    assert abs(value - expected) <= 1e-12
    found = gradients_of(model)
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).abs().max() <= 1e-12 * max(1, gradient.abs().max()), name


def test_a_first_stage_that_has_collapsed_is_seen_in_the_log():
    """`context_cosine` is the mean of all pairs of two vectors of a context, of any lengths."""
    assert mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])) == pytest.approx(-1 / 3)


# Clusters and batches


def batches_of(clusters: list[int], texts: list[tuple[str, str]], epoch: int = 0) -> list[list[int]]:
    """Batches of 8 rows with these clusters and texts."""
    queries, positives = zip(*texts)
    rows = Dataset.from_dict({"query": queries, "positive": positives, "cluster": clusters})
    sampler = ClusterBatchSampler(rows, 8, seed=3)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) <= len(sampler) and all(len(batch) == 8 for batch in batches)
    return batches


def test_an_epoch_has_every_row_once_in_batches_of_one_cluster():
    sizes = [32, 17, 8, 30, 9]
    planted = [number for number, size in enumerate(sizes) for _ in range(size)]
    random.Random(0).shuffle(planted)
    texts = [(f"query {number}", f"document {number}") for number in range(96)]
    epochs = [batches_of(planted, texts, epoch) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(96))
        pure = [len({planted[row] for row in batch}) == 1 for batch in batches]
        assert sum(pure) == sum(size // 8 for size in sizes)


def test_no_batch_has_a_text_twice():
    generator = random.Random(0)
    texts = [(f"q{generator.randrange(30)}", f"d{generator.randrange(40)}") for _ in range(200)]
    # A query that is the document of another row.
    texts += [(f"d{number}", f"q{number}") for number in range(20)]
    batches = batches_of([number % 3 for number in range(220)], texts)
    rows = [row for batch in batches for row in batch]
    assert len(batches) > 20 and len(rows) == len(set(rows))
    for batch in batches:
        found = [text for row in batch for text in set(texts[row])]
        assert len(found) == len(set(found))
    # Equal rows fill no batch, and no row is waited for for ever.
    assert batches_of([0] * 20, [("same", "text")] * 20) == []


def test_clusters_are_those_that_were_planted_and_neighbours_follow_each_other(monkeypatch):
    """Six clusters on an arc, of 3,000 rows, of which a batch of k-means is a tenth."""
    for name, value in (("BLOCK", 100), ("LEAST_ROWS", 300), ("BATCHES", 5)):
        monkeypatch.setattr(clusters, name, value)
    generator = np.random.default_rng(0)
    planted = generator.permutation(np.repeat(np.arange(6), 500))
    centres = np.stack([np.cos(planted * 0.5), np.sin(planted * 0.5), *np.zeros((62, 3_000))], 1)
    # Of a unit vector the length says nothing.
    queries, positives = (5 * (centres + generator.normal(0, 0.02, centres.shape)) for _ in range(2))
    vectors = Dataset.from_dict({"query_vector": queries, "positive_vector": positives})
    found = find_clusters(vectors, 500, seed=0)
    numbers = [set(found[planted == cluster]) for cluster in range(6)]
    assert all(len(number) == 1 for number in numbers) and len(set.union(*numbers)) == 6
    # A chain of neighbours along the arc has at most one jump, from an end that it reached first to the other side.
    chain = [int(planted[found == number][0]) for number in range(6)]
    assert sum(abs(left - right) != 1 for left, right in zip(chain, chain[1:])) <= 1


def test_false_negatives_are_masked_by_the_vectors():
    # The second document is as near to the first query as its own, the third nearer.
    queries = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]
    positives = [[0.6, 0.8], [0.6, 0.8], [0.8, 0.6]]
    rows = [
        {"query": f"a {n}", "positive": f"b {n}", "negatives": [], "cluster": 0}
        | {"query_vector": queries[n], "positive_vector": positives[n]}
        for n in range(3)
    ]
    # Scores: [.6 .6 .8], [.8 .8 .6], [1 1 .96]; the right ones: .6 .8 .96
    expected = {0.0: [[0, 0, 1], [0, 0, 0], [1, 1, 0]], 0.01: [[0, 1, 1], [1, 0, 0], [1, 1, 0]]}
    expected |= {-0.1: [[0, 0, 1], [0, 0, 0], [0, 0, 0]]}
    for margin, mask in expected.items():
        collator = ContextualCollator(preprocess_fn=lambda texts, **kwargs: {"texts": texts}, margin=margin)
        assert collator(rows)["label"].tolist() == torch.tensor(mask).bool().tolist()


# Runs


def test_a_run_leaves_a_contextual_model_and_goes_on_with_its_clusters_only(settings, helper, tmp_path):
    folder, changes = tmp_path / "run", settings(**SIZES, first_model=helper)
    log = run("contextual", changes)
    losses = losses_of(log)
    assert len(losses) == 12 and sum(losses[-4:]) < sum(losses[:4])
    assert all(0 < entry["context_cosine"] < 1 for entry in log if "loss" in entry)
    assert 0 <= log[-1]["eval_retrieval_cosine_ndcg@10"] <= 1
    model = load("contextual", folder)
    assert model[0].model.config.context_size == 8 and model.prompts["query"] == "Find the answer. "
    assert (folder / "model" / "contextual_neobert.py").is_file()
    last, before = (load_file(folder / name / "model.safetensors") for name in ("model", "checkpoint-8"))
    for name in ("first_stage.layer_norm.weight", "second_stage.layer_norm.weight", "soft_prompts.weight"):
        assert not torch.equal(last[name], before[name]), name
    # The first model gave clusters of a batch's size, and vectors, which are stored as float16.
    stored = {file: Dataset.from_parquet(str(file)) for file in (folder / "clusters").iterdir()}
    ((file, pairs),) = [(file, rows) for file, rows in stored.items() if len(rows) == 80]
    assert len(stored) == 3 and max(pairs["cluster"]) == 80 // 8 - 1
    expected = SentenceTransformer(str(helper)).encode(pairs["positive"][:3], normalize_embeddings=True)
    assert np.abs(np.asarray(pairs["positive_vector"][:3]) - expected).max() < 1e-3

    shutil.rmtree(folder / "checkpoint-12")
    # No batch would fill the second one: it has 8 rows.
    for size, error in ((6, SettingsMismatch), (9, ValueError)):
        with pytest.raises(error, match="context_size"):
            run("contextual", changes | {"context_size": size})
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        run("contextual", changes)


@pytest.mark.parametrize("name, pairs, datasets", [("contextual", 1.5e6, 22), ("contextual_phase_1", 235e6, 29)])
def test_both_phases_of_the_paper_are_three_epochs(name, pairs, datasets):
    """Appendix G.2."""
    flags = ["--config", str(ROOT / "configs" / "embeddings" / f"{name}.yaml"), "--model", "m", "--use_cpu", "true"]
    kind = ContextualSettings
    settings, arguments = parse_config(kind, EmbeddingArguments, args=[*flags, "--bf16", "false"])
    assert settings.context_size == settings.max_length == arguments.per_device_train_batch_size == 512
    assert arguments.max_steps == pytest.approx(3 * pairs / 512, rel=1e-3)
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.lr_scheduler_type) == (5e-5, 1000, "linear")
    data = read_descriptions(settings.datasets)
    assert len(data.train) == datasets and data.evaluation["retrieval"].prompt
    # The reference code has a prefix for both sides, the paper's instructions are for queries.
    assert all(bool(each.document_prompt) == (datasets == 29) and each.prompt for each in data.train.values())
