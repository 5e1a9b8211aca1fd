"""Every kind of Sentence Transformers model on NeoBERT: dense, sparse, late interaction and reranker.

The scripts under examples/ train each on small data: what comes out, that it loads anywhere, and what they refuse.
"""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from torch.nn import functional as F

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.embeddings.arguments import EmbeddingArguments, RecipeArguments
from neobert_hf.embeddings.batches import MultiVectorCollator, RerankingCollator
from neobert_hf.embeddings.inference import load_embedding_model
from neobert_hf.embeddings.models import (
    build_encoder,
    build_multi_vector_encoder,
    build_sparse_encoder,
    flatten_inputs,
    load_trained_model,
)
from neobert_hf.embeddings.recipe import read_data, reranking_evaluator, retrieval_evaluator
from tests.helpers.embedding_runs import KINDS, load, losses_of, run
from tests.helpers.other_encoders import save_other_encoder


TEXTS = ["short", "a list of the numbers from one to ten in the order of their names", "for loops and functions", "x"]
QUERY = "how to sort a list"


def outputs_of(model, texts: list[str], **kwargs) -> torch.Tensor:
    """One row a text, whatever the kind; of a reranker its logits for one query, of token vectors all of a text."""
    if isinstance(model, CrossEncoder):
        pairs = [(QUERY, text) for text in texts]
        scores = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True, **kwargs)
        return scores.float().unsqueeze(1).cpu()
    if isinstance(model, MultiVectorEncoder):
        # Every text ends at its own length.
        return torch.cat([vectors.float().cpu() for vectors in model.encode_document(texts, **kwargs)])
    if isinstance(model, SparseEncoder):
        return model.encode(texts, convert_to_sparse_tensor=False, **kwargs).float().cpu()
    return torch.tensor(model.encode(texts, **kwargs)).float()


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_leaves_a_complete_model_that_has_learned(trained, kind):
    log = json.loads((trained[kind] / "log.json").read_text())
    losses = losses_of(log)
    assert len(losses) == 12 and all(map(math.isfinite, losses))
    assert [entry["step"] for entry in log if "eval_runtime" in entry] == [6, 12]
    if kind == "sparse":
        assert all(log[11][f"{side}_regularizer_loss"] > 0 for side in ("query", "document"))
    if kind == "reranker":
        # A new head scores near 0, and the right document weighs as much as the 4 wrong ones.
        assert losses[0] == pytest.approx(8 / 5 * math.log(2), abs=0.02)
    else:
        # A reranker needs more than 12 steps.
        assert losses[-1] < losses[0]
    arguments = torch.load(trained[kind] / "checkpoint-12" / "training_args.bin", weights_only=False)
    prompts = {"triplets": "Find the answer. ", "pairs": "Find the text. ", "nested": ""}
    if kind != "reranker":
        prompts = {name: {"query": prompt} if prompt else {} for name, prompt in prompts.items()}
    assert arguments.prompts == prompts
    folder = trained[kind] / "model"
    modules = json.loads((folder / "modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (folder / name).stat().st_size > 0, name
    stored = load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in stored.values())


EVALUATORS = {"sparse": SparseInformationRetrievalEvaluator, "multi_vector": MultiVectorInformationRetrievalEvaluator}


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_model_scores_as_the_trained_one_did(trained, encoder, data, kind):
    settings = RecipeArguments(str(encoder), str(data / "datasets.yaml"))
    rows = read_data(settings, EmbeddingArguments("unused", bf16=False, use_cpu=True))
    if kind == "reranker":
        evaluator = reranking_evaluator(rows)
        assert all(sample["query"].startswith("Find the answer. ") for sample in evaluator.samples)
    else:
        evaluator = retrieval_evaluator(rows, *([EVALUATORS[kind]] if kind in EVALUATORS else []))
        assert evaluator.query_prompt == "Find the answer. "
    logged = [entry for entry in json.loads((trained[kind] / "log.json").read_text()) if "eval_runtime" in entry][-1]
    metrics = evaluator(load(kind, trained[kind]))
    assert any("ndcg@10" in name for name in metrics)
    for name, value in metrics.items():
        assert logged[f"eval_{name}"] == pytest.approx(value, abs=1e-6), name


FRESH_PROCESS = """
import sys, torch, neobert_hf
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from transformers.utils import logging
_, texts, query, target, *folders = sys.argv
texts = texts.split("|")
dense, sparse, multi_vector, reranker = (
    cls(folder, device="cpu")
    for cls, folder in zip((SentenceTransformer, SparseEncoder, MultiVectorEncoder, CrossEncoder), folders)
)
torch.set_num_threads(1)
torch.save({
    "dense": torch.tensor(dense.encode(texts)),
    "sparse": sparse.encode(texts, convert_to_sparse_tensor=False),
    "multi_vector": torch.cat(multi_vector.encode_document(texts)),
    "reranker": reranker.predict(
        [(query, text) for text in texts], activation_fn=torch.nn.Identity(), convert_to_tensor=True
    ).unsqueeze(1),
}, target)
"""


def test_all_kinds_load_in_a_fresh_process_with_the_same_outputs(trained, tmp_path):
    expected = {}
    for kind in KINDS:
        model = load(kind, trained[kind])
        expected[kind] = outputs_of(model, TEXTS)
        # Once more through save_pretrained, as a user would hand it on.
        model.save_pretrained(str(tmp_path / kind))
    folders = [str(tmp_path / kind) for kind in KINDS]
    command = [sys.executable, "-c", FRESH_PROCESS, "|".join(TEXTS), QUERY, str(tmp_path / "outputs.pt"), *folders]
    subprocess.run(command, check=True, timeout=1500, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = torch.load(tmp_path / "outputs.pt")
    for kind in KINDS:
        assert torch.equal(found[kind], expected[kind]), kind


@pytest.mark.parametrize("kind", KINDS)
def test_flattened_inputs_give_the_same_outputs_and_compute_no_padding(trained, kind):
    model = load(kind, trained[kind])
    pairs = [(QUERY, text) if kind == "reranker" else text for text in TEXTS]
    real = sum(len(ids) for ids in model.tokenizer(pairs)["input_ids"])
    seen = []
    backbone = model[0].model if kind == "dense" or kind == "multi_vector" else model[0].model.model
    backbone.transformer_encoder[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].shape[:2]))
    if kind == "sparse":
        model[0].model.decoder.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[:2]))
    padded = outputs_of(model, TEXTS, prompt="")
    # The layers strip the padding of padded batches; the decoder gets it back.
    assert seen[0] == (1, real) and (kind != "sparse" or seen[1].numel() > real)
    seen.clear()
    flatten_inputs(model)
    assert "cu_seq_lens_q" in model.preprocess(TEXTS if kind != "reranker" else pairs)
    flattened = outputs_of(model, TEXTS, prompt="")
    assert seen and all(shape == (1, real) for shape in seen)
    # Float32, sums in another order. Measured on a CPU: 1e-6.
    assert (flattened - padded).abs().max() < 1e-5 * padded.abs().max()
    model[0].unpad_inputs = False
    assert torch.equal(outputs_of(model, TEXTS, prompt=""), padded)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_models_stay_finite_and_close(trained, tmp_path, kind):
    shutil.copytree(trained[kind] / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    if kind in ("dense", "multi_vector"):
        # Sums over the tokens of a text exceed the largest float16, 65,504; the published model's states reach 130.
        name = next(name for name in weights if name.endswith("layer_norm.weight"))
        weights[name] = weights[name] * 3_000
        save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    cls, folder = KINDS[kind][2], str(tmp_path / "model")
    texts = [*TEXTS, " ".join(TEXTS * 4)]
    expected = outputs_of(cls(folder, device="cpu"), texts)
    found = outputs_of(cls(folder, device="cpu", model_kwargs={"dtype": torch.float16}), texts)
    assert found.isfinite().all() and found.shape == expected.shape
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", ["sparse", "multi_vector", "reranker"])
def test_models_of_other_kinds_are_not_taken_for_dense_ones(trained, kind):
    """Sentence Transformers would drop the head, average the states, and say so in one line of its log."""
    names = {"sparse": "SparseEncoder", "multi_vector": "MultiVectorEncoder", "reranker": "CrossEncoder"}
    for load_dense in (
        lambda path: load_trained_model(path, "miner"),
        lambda path: load_embedding_model(path, torch.float32, device="cpu"),
    ):
        with pytest.raises(ValueError, match=f"`m[a-z]+` is .*a {names[kind]}; it must be a dense embedding model"):
            load_dense(str(trained[kind] / "model"))


def test_a_roberta_reads_no_more_tokens_than_it_has_positions_for(tokenizer, tmp_path):
    save_other_encoder("roberta", tmp_path / "roberta", tokenizer)
    path = str(tmp_path / "roberta")
    for model in (
        build_encoder(path, 1024),
        load_embedding_model(path, torch.float32, device="cpu"),
        build_multi_vector_encoder(path, 1024),
    ):
        assert model.max_seq_length == 23
        assert outputs_of(model, ["and " * 60]).isfinite().all()


# SPLADE


def test_splade_is_the_maximum_of_log_saturated_mlm_logits(encoder):
    model = build_sparse_encoder(str(encoder), 48).to("cpu").eval()
    assert "cu_seq_lens_q" in model.preprocess(TEXTS)
    mlm = NeoBERTForMaskedLM.from_pretrained(encoder).eval()
    for text, found in zip(TEXTS, outputs_of(model, TEXTS)):
        with torch.no_grad():
            logits = mlm(**model.tokenizer(text, return_tensors="pt")).logits[0]
        expected = torch.log1p(F.relu(logits)).amax(0)
        # Measured: 5e-7 of 4.
        assert torch.allclose(found, expected, atol=1e-5) and (found > 0.1).any()


def test_a_backbone_without_its_mlm_head_is_no_sparse_encoder(settings, encoder, tokenizer, trained, tmp_path):
    NeoBERTModel.from_pretrained(encoder).save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    save_other_encoder("bert", tmp_path / "bert", tokenizer)
    for model in (tmp_path / "backbone", trained["dense"] / "model", tmp_path / "bert"):
        with pytest.raises(ValueError, match="no trained MLM head"):
            run("sparse", settings(model=model))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


# Training data


ROWS = [
    {"query": f"q{number}", "positive": f"p{number}", "negatives": negatives, "dataset_name": "d"}
    for number, negatives in enumerate((["n0", "n1"], ["p0", "n2", "n3"], ["n4", "n5", "n6"]))
]


def test_late_interaction_gets_as_many_negatives_as_every_row_has():
    def show(texts, prompt, task):
        """The texts instead of tokens."""
        return {"texts": texts, "prompt": prompt, "called": task}

    batch = MultiVectorCollator(show, prompts={"d": {"query": "Find. "}})(ROWS)
    texts = {name.removesuffix("_texts"): value for name, value in batch.items() if name.endswith("_texts")}
    assert texts == {
        "query": ["q0", "q1", "q2"],
        "positive": ["p0", "p1", "p2"],
        "negative_0": ["n0", "n2", "n4"],
        "negative_1": ["n1", "n3", "n5"],
    }
    assert batch["query_prompt"] == "Find. " and batch["positive_prompt"] is None
    assert (batch["query_called"], batch["positive_called"], batch["negative_1_called"]) == ("query", *2 * ["document"])
    batch = MultiVectorCollator(show)([*ROWS, ROWS[0] | {"negatives": []}])
    assert not any(name.startswith("negative") for name in batch)


def test_a_reranker_gets_hard_negatives_first_and_then_other_rows_documents():
    batch = RerankingCollator(None, prompts={"d": "Find. "}, negatives=3)([*ROWS[:2], ROWS[2] | {"negatives": []}])
    assert batch.pop("prompt") == "Find. " and batch.pop("dataset_name") == "d"
    assert batch.pop("label").tolist() == [1, 0, 0, 0] * 2 + [1, 0, 0]
    assert batch == {
        "query": ["q0"] * 4 + ["q1"] * 4 + ["q2"] * 3,
        "document": ["p0", "n0", "n1", "p1", "p1", "p0", "n2", "n3", "p2", "p0", "p1"],
    }


BAD_SETTINGS = [
    ("sparse", {"temperature": 0.1}, "--temperature"),
    ("dense", {"temprature": 1}, "temperature"),
    # Transformers would take each of these, and this recipe would not use it.
    ("dense", {"num_train_epochs": 5}, "`num_train_epochs`.*`max_steps`"),
    ("dense", {"batch_sampler": "group_by_label"}, "`batch_sampler`"),
    ("sparse", {"multi_dataset_batch_sampler": "round_robin"}, "`multi_dataset_batch_sampler`.*`alpha`"),
    ("multi_vector", {"prompts": "Find"}, "`prompts`.*`datasets`"),
    ("sparse", {"only": "pairz"}, "'pairs'"),
    ("dense", {"matryoshka_dims": "8 64"}, "32"),
    ("dense", {"per_device_train_batch_size": 2}, "triplets.*`per_device_train_batch_size` of 3 or more"),
]


@pytest.mark.parametrize("kind, change, message", BAD_SETTINGS)
def test_bad_settings_are_refused_before_training(settings, tmp_path, kind, change, message):
    with pytest.raises(ValueError, match=message):
        run(kind, settings(**change))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_classifier_of_several_classes_is_no_reranker(settings, encoder, tokenizer, tmp_path):
    NeoBERTForSequenceClassification.from_pretrained(encoder, num_labels=3).save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="expects a model with 1 output label, but got a model with 3"):
        run("reranker", settings(model=tmp_path / "classifier"))
