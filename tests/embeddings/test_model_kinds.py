"""Every kind of Sentence Transformers model on NeoBERT: dense, sparse, late interaction and reranker.

The scripts under examples/ train each on small data: what comes out, that it loads anywhere, and what they refuse.
"""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.embeddings.models import build_sparse_encoder, load_embedding_model
from tests.helpers.embedding_runs import KINDS, losses_of, run


TEXTS = ["short", "a list of the numbers from one to ten in the order of their names", "for loops and functions", "x"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_leaves_a_model_that_has_learned_and_its_scores(trained, kind):
    log = json.loads((trained[kind] / "log.json").read_text())
    losses = losses_of(log)
    assert len(losses) == 12 and all(map(math.isfinite, losses))
    if kind == "reranker":
        # A new head scores near 0, and the right document weighs as much as the 4 wrong ones. It learns in more steps.
        assert losses[0] == pytest.approx(8 / 5 * math.log(2), abs=0.02)
    else:
        assert losses[-1] < losses[0]
    if kind == "sparse":
        assert all(log[11][f"{side}_regularizer_loss"] > 0 for side in ("query", "document"))
    folder = trained[kind] / "model"
    # It loads without this package.
    modules = json.loads((folder / "modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    stored = load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in stored.values())
    # Evaluations are before training and every 6 steps.
    scores = [(entry["step"], value) for entry in log for name, value in entry.items() if "ndcg@10" in name]
    assert {step for step, _ in scores} == {0, 6, 12} and all(0 <= score <= 1 for _, score in scores)


def test_float16_is_finite_and_close(trained, tmp_path):
    shutil.copytree(trained["dense"] / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    # Sums over the tokens of a text exceed the largest float16, 65,504; the published model's states reach 130.
    name = next(name for name in weights if name.endswith("layer_norm.weight"))
    weights[name] = weights[name] * 3_000
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    expected, found = (
        load_embedding_model(str(tmp_path / "model"), dtype, device="cpu")
        .encode([*TEXTS, " ".join(TEXTS * 4)], convert_to_tensor=True)
        .float()
        for dtype in (torch.float32, torch.float16)
    )
    assert found.isfinite().all() and (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", ["sparse", "multi_vector", "reranker"])
def test_models_of_other_kinds_are_not_taken_for_dense_ones(trained, kind):
    """Sentence Transformers would drop the head, average the states, and say so in one line of its log."""
    with pytest.raises(ValueError, match=f"`model`.*{KINDS[kind][2].__name__}"):
        load_embedding_model(str(trained[kind] / "model"), torch.float32, device="cpu")


def test_splade_is_the_maximum_of_log_saturated_mlm_logits(encoder):
    model = build_sparse_encoder(str(encoder), 48).to("cpu").eval()
    mlm = NeoBERTForMaskedLM.from_pretrained(encoder).eval()
    for text, found in zip(TEXTS, model.encode(TEXTS, convert_to_sparse_tensor=False)):
        with torch.no_grad():
            logits = mlm(**model.tokenizer(text, return_tensors="pt")).logits[0]
        expected = torch.log1p(F.relu(logits)).amax(0)
        # Measured: 5e-7 of 4.
        assert torch.allclose(found.float(), expected, atol=1e-5) and (found > 0.1).any()


# Settings, models that are not there, and models that are not of the kind that is needed.
BAD_SETTINGS = [
    ("dense", {"temprature": 1}, ValueError, "temperature"),
    # Transformers would take each of these, and this recipe would not use it.
    ("dense", {"num_train_epochs": 5}, ValueError, "`num_train_epochs`.*`max_steps`"),
    ("multi_vector", {"prompts": "Find"}, ValueError, "`prompts`.*`datasets`"),
    ("sparse", {"only": "pairz"}, ValueError, "'pairs'"),
    ("dense", {"matryoshka_dims": "8 64"}, ValueError, "`matryoshka_dims`.*32"),
    ("dense", {"matryoshka_dims": 0}, ValueError, "`matryoshka_dims`"),
    ("dense", {"temperature": 0}, ValueError, "`temperature`"),
    ("dense", {"lora_rank": 0}, ValueError, "`lora_rank`"),
    ("dense", {"max_steps": 0}, ValueError, "`max_steps`"),
    ("dense", {"max_length": 2}, ValueError, "`max_length`"),
    ("dense", {"alpha": "nan"}, ValueError, "`alpha`"),
    ("reranker", {"negatives": 0}, ValueError, "`negatives`"),
    ("sparse", {"query_weight": -1}, ValueError, "`query_weight`"),
    ("dense", {"negatives": 2}, ValueError, "`miner`.*`negatives`"),
    ("sparse", {"load_best_model_at_end": True, "max_steps": 5}, ValueError, "`eval_steps` is 6 and `max_steps` 5"),
    ("dense", {"early_stopping_patience": 2}, ValueError, "`early_stopping_patience`.*`load_best_model_at_end: true`"),
    (
        "dense",
        {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"},
        ValueError,
        "`metric_for_best_model` is 'accuracy'.*retrieval_cosine_ndcg@10.*sts_spearman_cosine",
    ),
    ("dense", {"per_device_train_batch_size": 2}, ValueError, "triplets.*`per_device_train_batch_size` of 3 or more"),
    ("dense", {"model": "nowhere"}, OSError, "`model`.*nowhere"),
    ("dense", {"guide": "encoder"}, ValueError, "`guide`"),
    ("dense", {"miner": "sparse", "negatives": 1}, ValueError, "`miner`.*SparseEncoder"),
    ("sparse", {"model": "dense"}, ValueError, "no trained MLM head"),
    ("reranker", {"model": "classifier"}, ValueError, "a classifier of 3 classes"),
    ("reranker", {"teacher": "classifier"}, ValueError, "`teacher` is .*, a classifier of 3 classes"),
]


@pytest.mark.parametrize("kind, change, error, message", BAD_SETTINGS)
def test_bad_settings_and_models_are_refused_before_training(
    trained, settings, encoder, tmp_path, kind, change, error, message
):
    places = {"encoder": encoder, "nowhere": tmp_path / "nowhere", "classifier": tmp_path / "classifier"}
    if "classifier" in change.values():
        AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=3).save_pretrained(places["classifier"])
        AutoTokenizer.from_pretrained(encoder).save_pretrained(places["classifier"])
    for name in {"model", "guide", "miner", "teacher"} & change.keys():
        given = change[name]
        change = change | {name: trained[given] / "model" if given in KINDS else places[given]}
    with pytest.raises(error, match=message):
        run(kind, settings(**change))
    assert not list((tmp_path / "run").glob("checkpoint-*"))
